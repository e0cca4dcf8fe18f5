// Copies of single rows: of those of scalars a call of memcpy costs more than the copy.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace gear::cpu {

// Calls visit(bytes) with the bytes of a row: constants that the compiler knows where they are few.
template <typename Visit>
void WithRowBytes(int64_t bytes, const Visit& visit) {
  switch (bytes) {
    case 1:
      return visit(std::integral_constant<int64_t, 1>{});
    case 4:
      return visit(std::integral_constant<int64_t, 4>{});
    case 8:
      return visit(std::integral_constant<int64_t, 8>{});
    case 12:
      return visit(std::integral_constant<int64_t, 12>{});
    case 16:
      return visit(std::integral_constant<int64_t, 16>{});
    default:
      return visit(bytes);
  }
}

// Copies row i of `source` to row rows[i] of `to`; a negative row is left out.
inline void ScatterRows(char* to, const char* source, int64_t row_bytes, const int64_t* rows,
                        int64_t count) {
  WithRowBytes(row_bytes, [=](auto bytes) {  // by value: written bytes may alias references
    for (int64_t i = 0; i < count; ++i)
      if (rows[i] >= 0)
        std::memcpy(to + rows[i] * bytes, source + i * bytes, static_cast<size_t>(bytes));
  });
}

}  // namespace gear::cpu
