// Rows that are written one step at a time.
#pragma once
#include <cstdint>

namespace gear::cpu {

// Copies row i of `source` to row rows[i] of `to`; a negative row is left out.
void ScatterRows(char* to, const char* source, int64_t row_bytes, const int64_t* rows,
                 int64_t count);

}  // namespace gear::cpu
