// Removal of trajectories from a ring by their ids. Callers check.
#pragma once
#include "ring/ring.h"

namespace gear::cpu {

// Removed trajectories keep their rows until they would be evicted. Ids that are not stored are
// ignored. `removed`: the slot of each id, -1 where nothing was removed.
void RingRemove(const Ring& ring, const RingShape& shape, const RingRule& rule, const int64_t* ids,
                int64_t count, int64_t* removed);

}  // namespace gear::cpu

namespace gear::cuda {

void RingRemove(const cpu::Ring& ring, const RingShape& shape, const RingRule& rule,
                const int64_t* ids, int64_t count, int64_t* removed, void* stream);

}  // namespace gear::cuda
