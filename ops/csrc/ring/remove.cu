// Removal of trajectories by their ids: a warp for each, then the nodes above, level by level.
#include "ring/ring.h"

#include "common/launch_cuda.h"
#include "ring/cleared_masses_cuda.h"

namespace gear::cuda {
namespace {

__global__ void RemoveKernel(const Ring ring, const int64_t* __restrict__ ids, int64_t count,
                             int64_t* __restrict__ removed) {
  const int lane = LaneOfWarp();
  const bool by_row = ring.rule.by_row;
  uint64_t steps = 0, drawable = 0;  // modulo 2^64
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    const int64_t id = ids[i], at = id < 0 ? 0 : id % ring.shape.num_slots;
    Slot& slot = ring.slots[at];
    int64_t was = 0;
    if (lane == 0 && id >= 0 && slot.id == id)  // of equal ids the first removes
      was = static_cast<int64_t>(
          atomicExch(reinterpret_cast<unsigned long long*>(&slot.state), 0ull));
    was = __shfl_sync(kAllLanes, was, 0);
    if (lane == 0) removed[i] = was == kCommitted ? at : -1;
    if (was != kCommitted) continue;
    const int64_t num_steps = slot.num_rows - ring.shape.final_row;
    drawable -= by_row ? ClearItems(ring, slot.first_row, num_steps, lane, kWarp)
                       : ClearItems(ring, at, 1, lane, kWarp);
    if (lane == 0) {
      steps -= static_cast<uint64_t>(num_steps);
      slot.num_steps = 0;  // its eviction frees nothing more
    }
  }
  AddToCount(ring.state, kRingSteps, steps);
  AddToCount(ring.state + kRingCounts, kDrawable, drawable);
}

__global__ void MendRemovedKernel(const Ring ring, const TreeShape tree, int level, int64_t count,
                                  const int64_t* __restrict__ removed) {
  const int lane = LaneOfWarp();
  const bool by_row = ring.rule.by_row;
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    const int64_t at = removed[i];
    if (at < 0) continue;
    const Slot& slot = ring.slots[at];
    MendRun(ring, tree, level, by_row ? slot.first_row : at,
            by_row ? slot.num_rows - ring.shape.final_row : 1, lane);
  }
}

}  // namespace

void RingRemove(const Ring& ring, const int64_t* ids, int64_t count, int64_t* removed,
                void* stream) {
  if (count == 0) return;
  const TreeShape tree = ShapeOfTree(ring.NumItems());
  Launch("RingRemove", RemoveKernel, Blocks(count * kWarp), kThreads, stream, ring, ids, count,
         removed);
  for (int level = 1; level < tree.levels; ++level) {
    Launch("RingRemove", MendRemovedKernel, Blocks(count * kWarp), kThreads, stream, ring, tree,
           level, count, removed);
  }
}

}  // namespace gear::cuda
