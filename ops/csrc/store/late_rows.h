// Rows of a late column, of many trajectories at once: written, then marked as present.
#pragma once
#include <cstdint>

#include "common/slot.h"
#include "store/store.h"

namespace gear::cpu {

struct LateRows {
  int64_t written;     // slots that have the rows now
  int64_t repeated;    // trajectories that had the column already
  int64_t not_finite;  // the first row of `values` that is not finite and must be; -1: none
};

// ---- with the lock held
// Writes the rows of a late column, whose bit in kPresent is `bit`, of the trajectories of
// `records` (their ids, slots and steps count) that are stored and lack the column, and lists their
// slots in `slots`, [count]. `values` has the rows of one trajectory after the other; a row takes
// the value that is `offset` places before it in its trajectory, and zeros where there is none.
// Nothing is visible before MarkPresent; after `not_finite` nothing is written. Cost: one read for
// the check, one for the copy.
LateRows WriteLateRows(Store& store, size_t late, int64_t bit, const Resolution* records,
                       int64_t count, const char* values, int64_t offset, int64_t* slots);
// The commit points, one after the other; each slot is logged as changed.
void MarkPresent(Store& store, int64_t bit, const int64_t* slots, int64_t count);

}  // namespace gear::cpu
