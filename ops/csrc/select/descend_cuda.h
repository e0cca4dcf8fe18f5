// A warp in the tree of masses.
#pragma once
#include "common/launch_cuda.h"
#include "common/tree.h"

namespace gear::cuda {

// Descend by a warp: a lane for each child, so that a level is one read of 256 bytes and a scan.
__device__ inline Hit DescendWarp(const uint64_t* __restrict__ sums, const TreeShape& shape,
                                  uint64_t coordinate, int lane) {
  int64_t node = 0;
  for (int level = shape.levels - 1; level >= 0; --level) {
    const uint64_t own = sums[shape.offset[level] + node * kFanOut + lane];
    const uint64_t before = SumBefore(own, lane);
    // The last child takes what no other holds, as in Descend.
    const unsigned holds =
        __ballot_sync(kAllLanes, coordinate < before + own) | (1u << (kFanOut - 1));
    const int child = __ffs(static_cast<int>(holds)) - 1;
    coordinate -= __shfl_sync(kAllLanes, before, child);
    node = node * kFanOut + child;
  }
  return {node, coordinate};
}

// The sum of all masses, in every lane.
__device__ inline uint64_t TotalOfWarp(const uint64_t* __restrict__ sums, const TreeShape& shape,
                                       int lane) {
  const uint64_t total = SumOfWarp(sums[shape.offset[shape.levels - 1] + lane]);
  return __shfl_sync(kAllLanes, total, 0);
}

}  // namespace gear::cuda
