#include "rows/copy_cpu.h"
#include "common/prefetch.h"

#include <cstring>

namespace gear::cpu {
namespace {

template <bool kToColumn>
void Copy(char* column, char* together, int64_t bytes) {
  std::memcpy(kToColumn ? column : together, kToColumn ? together : column,
              static_cast<size_t>(bytes));
}

// `kRowBytes` is the size of a row that the compiler knows, 0 for any: single rows of a few bytes
// are then moves instead of calls.
template <bool kToColumn, int64_t kRowBytes>
void CopyRows(const Placed* placed, int64_t count, int64_t row_bytes, char* column,
              char* together) {
  constexpr int64_t kLookAhead = 48;  // places that are requested before their turn
  for (int64_t i = 0; i < count; ++i) {
    if (i + kLookAhead < count) {
      const Placed& next = placed[i + kLookAhead];
      PrefetchBytes(column + next.row * row_bytes, next.rows * row_bytes);
    }
    char* rows = column + placed[i].row * row_bytes;
    const int64_t bytes = placed[i].rows * row_bytes;
    if (kRowBytes > 0 && placed[i].rows == 1)
      Copy<kToColumn>(rows, together, kRowBytes);
    else
      Copy<kToColumn>(rows, together, bytes);
    together += bytes;
  }
}

template <bool kToColumn>
void CopyOfSize(const Placed* placed, int64_t count, int64_t row_bytes, char* column,
                char* together) {
  switch (row_bytes) {
    case 1:
      return CopyRows<kToColumn, 1>(placed, count, row_bytes, column, together);
    case 4:
      return CopyRows<kToColumn, 4>(placed, count, row_bytes, column, together);
    case 8:
      return CopyRows<kToColumn, 8>(placed, count, row_bytes, column, together);
    case 12:
      return CopyRows<kToColumn, 12>(placed, count, row_bytes, column, together);
    case 16:
      return CopyRows<kToColumn, 16>(placed, count, row_bytes, column, together);
    default:
      return CopyRows<kToColumn, 0>(placed, count, row_bytes, column, together);
  }
}

}  // namespace

void CopyTogether(const Placed* placed, int64_t count, int64_t row_bytes, char* column,
                  char* together) {
  CopyOfSize<false>(placed, count, row_bytes, column, together);
}

void CopyApart(const Placed* placed, int64_t count, int64_t row_bytes, char* column,
               char* together) {
  CopyOfSize<true>(placed, count, row_bytes, column, together);
}

}  // namespace gear::cpu
