// Draws that are limited by trajectory: one block draws as many samples at once as it has warps,
// and keeps those up to the first that uses up a trajectory. The others are drawn again without it.
#include "ring/ring.h"

#include "common/launch_cuda.h"
#include "ring/cleared_masses_cuda.h"
#include "ring/importance_weights_cuda.h"
#include "select/tree_cuda.h"

namespace gear::cuda {
namespace {

constexpr int kDrawers = 16;  // warps: samples that are drawn at once

// Whether `count` draws are left. Each trajectory with a mass has one at least, so that most often
// none is looked at. By the block, in all of its threads.
__device__ bool HasDraws(const Ring& ring, int64_t count, int64_t most) {
  __shared__ uint64_t left;
  if (ring.state[kRingCounts + kDrawable] >= count) return true;
  if (threadIdx.x == 0) left = 0;
  __syncthreads();
  const int64_t tail = ring.state[kRingTail], stored = ring.state[kRingNext] - tail;
  uint64_t own = 0;
  for (int64_t k = threadIdx.x; k < stored; k += blockDim.x) {
    const int64_t slot = (tail + k) % ring.shape.num_slots;
    if (ring.sums[slot] > 0) own += static_cast<uint64_t>(most - TimesSampled(ring.slots[slot]));
  }
  own = SumOfWarp(own);
  if (LaneOfWarp() == 0) AtomicAdd(&left, own);
  __syncthreads();
  return left >= static_cast<uint64_t>(count);
}

// Sets the mass of an item to 0, and the nodes above it. By a warp.
__device__ void TakeOut(const Ring& ring, const TreeShape& tree, int64_t item, int lane) {
  if (lane == 0) {
    ring.sums[item] = 0;
    ring.state[kRingCounts + kDrawable] -= 1;
  }
  for (int level = 1; level < tree.levels; ++level) {
    __syncwarp();  // the level below is complete
    MendNode(ring, tree, level, item >> (level * kFanOutBits), lane);
  }
}

// One block.
__global__ void __launch_bounds__(kDrawers* kWarp, 1)
    LimitedKernel(const Ring ring, const RingDraw draw, const TreeShape tree, int64_t count,
                  int64_t most, const Faults faults, Resolution* resolutions, float* weights) {
  // Of the samples that are drawn at once: slot and mass of each, and its draws before this batch
  // and in earlier rounds.
  __shared__ int64_t slots[kDrawers], times[kDrawers];
  __shared__ uint64_t masses[kDrawers];
  const int lane = LaneOfWarp(), warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const bool has_draws = HasDraws(ring, count, most);
  const uint64_t first_total = has_draws ? TotalOfWarp(ring.sums, tree, lane) : 0;
  if (first_total == 0) {
    for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
      resolutions[i] = NoSample(NumberOf(draw, ring.state, i));
      if (weights != nullptr) weights[i] = 0;
    }
    __syncthreads();  // the state is read above
    if (threadIdx.x == 0) Advance(ring.state, 0, count);
    return;
  }
  uint64_t total = first_total;
  for (int64_t done = 0; done < count;) {
    const int64_t i = done + warp;
    const int num_drawn = static_cast<int>(Min<int64_t>(warps, count - done));
    Resolution found{};
    if (warp < num_drawn) {
      const int64_t number = NumberOf(draw, ring.state, i);
      const uint64_t point = PointOf(draw, number, total, i, count);
      const Hit hit = DescendWarp(ring.sums, tree, LoadTop(ring.sums, tree, lane), point, nullptr,
                                  ring.NumItems(), lane)
                          .hit;
      if (lane == 0) {
        faults.Require(ResolveItem(ring, draw, hit, number, &found), kLimitedItem, hit.item);
        slots[warp] = found.slot;
        times[warp] = TimesSampled(ring.slots[found.slot]);
        masses[warp] = static_cast<uint64_t>(found.mass);
      }
    }
    __syncthreads();
    // In every warp alike, a lane for each of them: whether it uses up its trajectory.
    int64_t drawn = lane < num_drawn ? times[lane] : 0;
    for (int k = 0; k < num_drawn; ++k)
      drawn += k <= lane && lane < num_drawn && slots[k] == slots[lane];
    const unsigned used_up = __ballot_sync(kAllLanes, lane < num_drawn && drawn >= most);
    const int num_valid = used_up == 0 ? num_drawn : __ffs(static_cast<int>(used_up));
    if (lane == 0 && warp < num_valid) {
      resolutions[i] = found;
      AtomicAdd(reinterpret_cast<uint64_t*>(&TimesSampled(ring.slots[found.slot])), 1);
    }
    done += num_valid;
    if (used_up != 0 && done < count) {  // weights are of the masses at the last draw
      total -= masses[num_valid - 1];
      if (warp == 0) TakeOut(ring, tree, slots[num_valid - 1], lane);
    }
    __syncthreads();  // before the next round reads the tree and the counts, and writes to `slots`
  }
  if (weights != nullptr)
    WeighByBlock(ring, draw, tree, BetaOf(ring, draw), first_total, resolutions, count, weights,
                 LogOfMass{}, TablesInMemory());
  __syncthreads();  // the state is read above
  if (threadIdx.x == 0) Advance(ring.state, first_total, count);
}

}  // namespace

void RingSelectLimited(const Ring& ring, const RingDraw& draw, int64_t count, int64_t most,
                       Resolution* resolutions, float* weights, void* stream) {
  if (count == 0) return;
  const int threads = ThreadsOf(count * kWarp, kDrawers * kWarp);
  Launch("RingSelectLimited", LimitedKernel, 1, threads, stream, ring, draw,
         ShapeOfTree(ring.NumItems()), count, most, FaultsOfProcess(), resolutions, weights);
}

}  // namespace gear::cuda
