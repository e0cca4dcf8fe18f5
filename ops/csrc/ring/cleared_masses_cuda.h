// Clears the masses of items that leave a ring, and mends the sums and minima above them.
#pragma once
#include "common/launch_cuda.h"
#include "common/tree.h"
#include "ring/ring.h"

namespace gear::cuda {

// Clears the masses of the items first + begin, first + begin + step and so on below first + count.
// Returns how many items lose one.
__device__ inline uint64_t ClearItems(const Ring& ring, int64_t first, int64_t count, int64_t begin,
                                      int64_t step) {
  uint64_t cleared = 0;
  for (int64_t i = begin; i < count; i += step) {
    cleared += uint64_t{ring.sums[first + i] > 0};
    ring.sums[first + i] = 0;
    if (ring.priorities != nullptr) ring.priorities[first + i] = 0;
  }
  return cleared;
}

// The sum and the least non-zero mass of a node's children. All lanes of the warp take part.
__device__ inline void MendNode(const Ring& ring, const TreeShape& tree, int level, int64_t node,
                                int lane) {
  const uint64_t* below = ring.sums + tree.offset[level - 1] + node * kFanOut;
  const uint64_t sum = SumOfWarp(below[lane]);
  if (lane == 0) ring.sums[tree.offset[level] + node] = sum;
  if (ring.minima == nullptr) return;
  const uint64_t* least_below = MinimaLevel(ring.sums, ring.minima, tree, level - 1);
  const uint64_t least = LeastOfWarp(least_below[node * kFanOut + lane] - 1);  // as in IsLess
  if (lane == 0) ring.minima[MinimaOffset(tree, level) + node] = least + 1;
}

// The nodes of one level above a run of items. All lanes of the warp take part.
__device__ inline void MendRun(const Ring& ring, const TreeShape& tree, int level, int64_t first,
                               int64_t count, int lane) {
  const int shift = level * kFanOutBits;
  if (count == 0) return;
  for (int64_t node = first >> shift; node <= (first + count - 1) >> shift; ++node)
    MendNode(ring, tree, level, node, lane);
}

}  // namespace gear::cuda
