// Compaction: moves extents where enough rows are free but no run of them is long enough.
#pragma once
#include <cstdint>

#include "store/store.h"

namespace gear::cpu {

// Slides neighbouring extents together until a run of `num_rows` rows is free where the next search
// begins. False: extents that cannot move separate the free rows here. Requires the lock. Cost: of
// the neighbours in order, the first ones that have at most 4 * `num_rows` rows move, else those
// with the fewest. A death at any instruction leaves the move to the next owner of the lock. The
// same in Python: deepspeed_gear/store/compaction.py.
bool MakeRun(Store& store, int64_t num_rows);

enum class MovedOut { kYes, kNoRows, kNever };

// Moves a complete trajectory, which is short beside the rows that were reserved for it, to free
// rows near those that were evicted last: with the free rows on both sides its place is a run of
// `num_rows` rows, where the next search begins. kNoRows, or kNever, and nothing has changed: there
// is no gap among `most` extents; it is read, or there would be no run. Requires the lock, and that
// extents move here. Cost: one copy of its rows.
MovedOut MoveOut(Store& store, int64_t slot, int64_t num_rows, int most);

// Lets the next search begin up to so many extents before a slot's. Requires the lock.
void SearchNear(Store& store, int64_t slot, int distance);

}  // namespace gear::cpu
