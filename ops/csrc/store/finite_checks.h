// Checks of floating-point columns for NaN and infinities.
#pragma once
#include <cstdint>

namespace gear::cpu {

// The element type whose exponents are checked; kUnchecked for integers, bool, and columns that may
// hold NaN. The codes are those of deepspeed_gear/store/native_rows.py.
enum class Exponents : int64_t { kUnchecked, kFloat16, kBFloat16, kFloat32, kFloat64 };

// Returns whether no element has an exponent of all ones. Cost: one read.
bool AllFinite(const void* values, int64_t bytes, Exponents type);

// Copies, and returns whether all that was copied is finite. Cost: one read of the copy, a block at
// a time, while it is in the nearest cache.
bool CopyFinite(void* to, const void* from, int64_t bytes, Exponents type);

}  // namespace gear::cpu
