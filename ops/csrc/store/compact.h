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

}  // namespace gear::cpu
