// Removal of trajectories by their ids on the host.
#include "ring/remove.h"

#include "ring/changes_cpu.h"

namespace gear::cpu {

void RingRemove(const Ring& ring, const RingShape& shape, const RingRule& rule, const int64_t* ids,
                int64_t count, int64_t* removed) {
  Changes changes(ring, ItemsOfRing(shape, rule));
  for (int64_t i = 0; i < count; ++i) {
    removed[i] = -1;
    if (ids[i] < 0) continue;
    const int64_t at = ids[i] % shape.num_slots;
    Slot& slot = ring.slots[at];
    if (slot.state != kCommitted || slot.id != ids[i]) continue;
    Clear(ring, shape, rule, ids[i], &changes);
    slot.num_steps = 0;  // its eviction frees nothing more
    removed[i] = at;
  }
  changes.Apply();
}

}  // namespace gear::cpu
