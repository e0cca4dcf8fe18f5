// PER weights of the samples that are drawn from a ring, in a kernel: by the least mass of the
// batch or of the table, or not normalised.
#pragma once
#include "common/convert.h"
#include "common/launch_cuda.h"
#include "common/power_cuda.h"
#include "ring/ring.h"

namespace gear::cuda {

// The least mass of the table: of the top of its minima. By a warp, in all its lanes.
__device__ inline uint64_t LeastOfTable(const Ring& ring, const TreeShape& tree, int lane) {
  const uint64_t* nodes = MinimaLevel(ring.sums, ring.minima, tree, tree.levels - 1);
  return __shfl_sync(kAllLanes, LeastOfWarp(nodes[lane] - 1), 0) + 1;  // as in IsLess
}

// The exponent of the next batch's weights.
__device__ inline uint64_t BetaOf(const Ring& ring, const RingDraw& draw) {
  const int64_t batch = Min(ring.state[kRingBatch], draw.num_betas - 1);
  return static_cast<uint64_t>(draw.betas[batch]);
}

// The logarithm of a sample's mass.
struct LogOfMass {
  __device__ int64_t operator()(const Resolution& resolution) const {
    return Log2(static_cast<uint64_t>(resolution.mass));
  }
};

// The same, which the warp that drew the sample has left in the place of its number.
struct LogInRecord {
  __device__ int64_t operator()(const Resolution& resolution) const {
    return resolution.sample_number;
  }
};

// Weights of the samples `thread`, `thread` + `threads` and so on. `least`: mass of the batch. All
// lanes of a warp take part. `log_of`: LogOfMass or LogInRecord.
template <typename LogOf>
__device__ void Weigh(const Ring& ring, const RingDraw& draw, const TreeShape& tree, uint64_t beta,
                      uint64_t total, uint64_t least, const Resolution* resolutions, int64_t count,
                      float* weights, const LogOf& log_of, const PowerTables& tables,
                      int64_t thread, int64_t threads) {
  uint64_t numerator = least, divisor = 1;
  if (draw.normalize == kByTable) numerator = LeastOfTable(ring, tree, LaneOfWarp());
  if (draw.normalize == kNotNormalized) {
    numerator = total;
    divisor = static_cast<uint64_t>(ring.state[kRingCounts + kDrawable]);
  }
  // Only without a norm there is a divisor: the logarithm of 1 is 0.
  const int64_t log_divisor = divisor == 1 ? 0 : Log2(divisor, tables);
  const int64_t log_ratio = total == 0 ? 0 : Log2(numerator, tables) - log_divisor;
  for (int64_t i = thread; i < count; i += threads) {
    const int64_t log = log_ratio - log_of(resolutions[i]);
    weights[i] = total == 0 ? 0.0f : BitCast<float>(ImportanceOfLog(log, beta, tables));
  }
}

// The same by one block, which sees all samples. The state may be written after a barrier.
template <typename LogOf>
__device__ void WeighByBlock(const Ring& ring, const RingDraw& draw, const TreeShape& tree,
                             uint64_t beta, uint64_t total, const Resolution* resolutions,
                             int64_t count, float* weights, const LogOf& log_of,
                             const PowerTables& tables) {
  uint64_t least = ~uint64_t{0};
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x)
    least = Min(least, static_cast<uint64_t>(resolutions[i].mass));
  Weigh(ring, draw, tree, beta, total, LeastOfBlock(least), resolutions, count, weights, log_of,
        tables, threadIdx.x, blockDim.x);
}

}  // namespace gear::cuda
