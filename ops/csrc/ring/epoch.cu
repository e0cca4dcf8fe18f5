// Epochs over the table in the memory of one device. A thread for each sample computes its place in
// the order. It finds the item by a division where all trajectories have the same mass, else in the
// tree.
#include "ring/epoch.h"

#include "common/launch_cuda.h"
#include "ring/epoch_plan.h"
#include "select/tree_cuda.h"

namespace gear::cuda {
namespace {

// Descend by a thread, without arrays, which would lie in memory. The loads of a node do not wait
// for each other.
__device__ Hit DescendAlone(const uint64_t* __restrict__ sums, const TreeShape& shape,
                            uint64_t coordinate) {
  int64_t node = 0;
  for (int level = shape.levels - 1; level >= 0; --level) {
    const uint64_t* children = sums + shape.offset[level] + node * kFanOut;
    uint64_t up_to = 0, before = 0;
    int child = 0;
    // The last child takes what no other holds, as in Descend.
#pragma unroll 8
    for (int i = 0; i < kFanOut - 1; ++i) {
      up_to += children[i];
      const bool is_after = coordinate >= up_to;
      child += is_after ? 1 : 0;
      before = is_after ? up_to : before;
    }
    coordinate -= before;
    node = node * kFanOut + child;
  }
  return {node, coordinate};
}

// The last block advances the state.
__global__ void EpochKernel(const Ring ring, const EpochDraw draw, const TreeShape tree,
                            int64_t count, const Faults faults,
                            Resolution* __restrict__ resolutions, int64_t* __restrict__ epochs) {
  const uint64_t total = TotalOfWarp(ring.sums, tree, LaneOfWarp());
  const cpu::EpochPlan plan = cpu::PlanEpoch(draw, ring.state, total, count);
  const cpu::EqualMasses equal = cpu::EqualMassesOf(ring, total);
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const cpu::EpochSample sample = cpu::SampleOfEpoch(draw, plan, i);
    Resolution found = NoSample(sample.number);
    if (plan.has_samples) {
      const uint64_t coordinate = cpu::CoordinateOfEpoch(draw, sample, plan.size);
      const Hit hit = equal.mass > 0 ? cpu::HitOf(equal, coordinate)
                                     : DescendAlone(ring.sums, tree, coordinate);
      faults.Require(ResolveItem(ring, draw.base, hit, sample.number, &found), kEpochItem,
                     hit.item);
    }
    resolutions[i] = found;
    epochs[i] = sample.epoch;
  }
  if (IsLastBlock(&ring.state[kRingBlocks]) && threadIdx.x == 0)
    cpu::AdvanceEpoch(ring.state, plan, total);
}

}  // namespace

void RingEpoch(const Ring& ring, const EpochDraw& draw, int64_t count, Resolution* resolutions,
               int64_t* epochs, void* stream) {
  if (count == 0) return;
  Launch("RingEpoch", EpochKernel, Blocks(count), kThreads, stream, ring, draw,
         ShapeOfTree(ring.NumItems()), count, FaultsOfProcess(), resolutions, epochs);
}

}  // namespace gear::cuda
