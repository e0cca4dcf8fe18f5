// A warp in the tree of masses.
#pragma once
#include "common/launch_cuda.h"
#include "common/tree.h"

namespace gear::cuda {

// Descend by a warp: a lane for each child, so that a level is one read of 256 bytes and a scan.
__device__ inline Hit DescendWarp(const uint64_t* __restrict__ sums, const TreeShape& shape,
                                  uint64_t coordinate, int lane) {
  constexpr unsigned kAll = 0xFFFFFFFFu;
  int64_t node = 0;
  for (int level = shape.levels - 1; level >= 0; --level) {
    const uint64_t own = sums[shape.offset[level] + node * kFanOut + lane];
    uint64_t up_to = own;
#pragma unroll
    for (int step = 1; step < kFanOut; step *= 2) {
      const uint64_t below = __shfl_up_sync(kAll, up_to, step);
      if (lane >= step) up_to += below;
    }
    // The last child takes what no other holds, as in Descend.
    const unsigned holds = __ballot_sync(kAll, coordinate < up_to) | (1u << (kFanOut - 1));
    const int child = __ffs(static_cast<int>(holds)) - 1;
    coordinate -= __shfl_sync(kAll, up_to - own, child);
    node = node * kFanOut + child;
  }
  return {node, coordinate};
}

// The sum of all masses, in every lane.
__device__ inline uint64_t TotalOfWarp(const uint64_t* __restrict__ sums, const TreeShape& shape,
                                       int lane) {
  const uint64_t total = SumOfWarp(sums[shape.offset[shape.levels - 1] + lane]);
  return __shfl_sync(0xFFFFFFFFu, total, 0);
}

}  // namespace gear::cuda
