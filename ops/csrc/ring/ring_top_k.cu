// The items of highest priority of a ring: those that TopK finds from the oldest item on, a thread
// for each.
#include "ring/ring.h"

#include "common/launch_cuda.h"
#include "priorities/priorities.h"
#include "ring/importance_weights_cuda.h"
#include "select/tree_cuda.h"

namespace gear::cuda {
namespace {

__global__ void OldestKernel(const Ring ring, const Faults faults, int64_t* oldest) {
  *oldest = OldestItem(ring.state, ring.slots, ring.shape, ring.rule);
  faults.Require(*oldest >= 0 && *oldest < ring.NumItems(), kTopKOldest, *oldest);
}

// The last block advances the state.
__global__ void RecordKernel(const Ring ring, const RingDraw draw, const TreeShape tree,
                             const int64_t* __restrict__ items, int64_t count, bool counts,
                             const Faults faults, Resolution* resolutions, float* weights) {
  const bool is_whole = items[count - 1] >= 0;
  const uint64_t total = is_whole ? TotalOfWarp(ring.sums, tree, LaneOfWarp()) : 0;
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const int64_t number = NumberOf(draw, ring.state, i);
    Resolution found = NoSample(number);
    if (is_whole)
      faults.Require(ResolveItem(ring, draw, {items[i], 0}, number, &found), kTopKItem, items[i]);
    resolutions[i] = found;
    if (weights != nullptr) weights[i] = is_whole ? 1.0f : 0.0f;
    if (counts && is_whole) TimesSampled(ring.slots[found.slot]) += 1;  // each once
  }
  if (IsLastBlock(&ring.state[kRingBlocks]) && threadIdx.x == 0) Advance(ring.state, total, count);
}

}  // namespace

int64_t RingTopKScratch(const Ring& ring, int64_t count) {
  return 1 + count + TopKScratch(ring.NumItems(), count);
}

void RingTopK(const Ring& ring, const RingDraw& draw, int64_t count, bool counts,
              Resolution* resolutions, float* weights, int64_t* scratch, void* stream) {
  if (count == 0) return;
  const int64_t num_items = ring.NumItems();
  int64_t *oldest = scratch, *items = scratch + 1;
  const Faults faults = FaultsOfProcess();
  Launch("RingTopK", OldestKernel, 1, 1, stream, ring, faults, oldest);
  TopK(ring.priorities, ring.sums, num_items, count, oldest, items, items + count, stream);
  Launch("RingTopK", RecordKernel, Blocks(count), kThreads, stream, ring, draw,
         ShapeOfTree(num_items), items, count, counts, faults, resolutions, weights);
}

}  // namespace gear::cuda
