// Weights of the samples of a ring, and its state after them.
#pragma once
#include "common/convert.h"
#include "common/launch_cuda.h"
#include "common/power.h"
#include "ring/ring.h"

namespace gear::cuda {

// The least mass of the table: of the top of its minima. By a warp, in all its lanes.
__device__ inline uint64_t LeastOfTable(const Ring& ring, const TreeShape& tree, int lane) {
  const uint64_t* nodes = MinimaLevel(ring.sums, ring.minima, tree, tree.levels - 1);
  return __shfl_sync(kAllLanes, LeastOfWarp(nodes[lane] - 1), 0) + 1;  // as in IsLess
}

// Weights of the samples `thread`, `thread` + `threads` and so on. `least`: mass of the batch. All
// lanes of a warp take part.
__device__ inline void Weigh(const Ring& ring, const RingDraw& draw, const TreeShape& tree,
                             uint64_t total, uint64_t least, const Resolution* resolutions,
                             int64_t count, float* weights, int64_t thread, int64_t threads) {
  const int64_t batch = Min(ring.state[kRingBatch], draw.num_betas - 1);
  const auto beta = static_cast<uint64_t>(draw.betas[batch]);
  uint64_t numerator = least, divisor = 1;
  if (draw.normalize == kByTable) numerator = LeastOfTable(ring, tree, LaneOfWarp());
  if (draw.normalize == kNotNormalized) {
    numerator = total;
    divisor = static_cast<uint64_t>(ring.state[kRingCounts + kDrawable]);
  }
  const int64_t log_ratio = total == 0 ? 0 : Log2(numerator) - Log2(divisor);
  for (int64_t i = thread; i < count; i += threads) {
    const auto mass = static_cast<uint64_t>(resolutions[i].mass);
    weights[i] = total == 0 ? 0.0f : BitCast<float>(ImportanceBits(log_ratio, mass, beta));
  }
}

// The same by one block, which has written all samples. The state may be written afterwards.
__device__ inline void WeighByBlock(const Ring& ring, const RingDraw& draw, const TreeShape& tree,
                                    uint64_t total, const Resolution* resolutions, int64_t count,
                                    float* weights) {
  uint64_t least = ~uint64_t{0};
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x)
    least = Min(least, static_cast<uint64_t>(resolutions[i].mass));
  Weigh(ring, draw, tree, total, LeastOfBlock(least), resolutions, count, weights, threadIdx.x,
        blockDim.x);
  __syncthreads();  // the state is read above
}

}  // namespace gear::cuda
