// The rate limiter of writers: whether they may add, by the items added and the samples drawn.
#pragma once
#include <cstdint>

#include "store/store.h"

namespace gear::cpu {

// Whether the rate limiter admits so many steps, in one trajectory. Of groups the counts are those
// of the last update (deepspeed_gear/store/groups.py). Over several nodes the quota of this node
// decides; the items that it refuses are noted in kWanted for the next round. Requires the lock.
bool MayInsert(const Store& store, int64_t num_steps);

}  // namespace gear::cpu
