// Copies of rows between scattered places and a contiguous block.
#pragma once
#include <cstdint>

namespace gear::cpu {

// Rows of a column that lie together.
struct Placed {
  int64_t row, rows;
};

// Copies rows of a column one after the other.
void CopyTogether(const Placed* placed, int64_t count, int64_t row_bytes, char* column,
                  char* together);

// The inverse.
void CopyApart(const Placed* placed, int64_t count, int64_t row_bytes, char* column,
               char* together);

}  // namespace gear::cpu
