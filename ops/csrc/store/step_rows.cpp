#include "store/step_rows.h"

#include <cstring>

namespace gear::cpu {

namespace {

template <size_t kBytes>
void Scatter(char* to, const char* source, const int64_t* rows, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] >= 0) std::memcpy(to + rows[i] * kBytes, source + i * kBytes, kBytes);
  }
}

}  // namespace

void ScatterRows(char* to, const char* source, int64_t row_bytes, const int64_t* rows,
                 int64_t count) {
  switch (row_bytes) {  // those of scalars; a call of memcpy costs more than they do
    case 1:
      return Scatter<1>(to, source, rows, count);
    case 4:
      return Scatter<4>(to, source, rows, count);
    case 8:
      return Scatter<8>(to, source, rows, count);
    default:
      break;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (rows[i] < 0) continue;
    std::memcpy(to + rows[i] * row_bytes, source + i * row_bytes, static_cast<size_t>(row_bytes));
  }
}

}  // namespace gear::cpu
