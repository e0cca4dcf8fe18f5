// Sums and minima above changed items of a ring.
#pragma once
#include "common/launch_cuda.h"
#include "common/tree.h"
#include "ring/ring.h"

namespace gear::cuda {

// The sum and the least non-zero mass of a node's children. All lanes of the warp take part.
__device__ inline void MendNode(const cpu::Ring& ring, const TreeShape& shape, int level,
                                int64_t node, int lane) {
  const uint64_t* below = ring.sums + shape.offset[level - 1] + node * kFanOut;
  const uint64_t sum = SumOfWarp(below[lane]);
  if (lane == 0) ring.sums[shape.offset[level] + node] = sum;
  if (ring.minima == nullptr) return;
  const uint64_t* least_below =
      (level == 1 ? ring.sums : ring.minima + MinimaOffset(shape, level - 1)) + node * kFanOut;
  uint64_t least = least_below[lane] - 1;  // as in IsLess
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    least = Min(least, __shfl_down_sync(0xFFFFFFFFu, least, step));
  if (lane == 0) ring.minima[MinimaOffset(shape, level) + node] = least + 1;
}

// The nodes of one level above a run of items. All lanes of the warp take part.
__device__ inline void MendRun(const cpu::Ring& ring, const TreeShape& shape, int level,
                               int64_t first, int64_t count, int lane) {
  const int shift = level * kFanOutBits;
  if (count == 0) return;
  for (int64_t node = first >> shift; node <= (first + count - 1) >> shift; ++node)
    MendNode(ring, shape, level, node, lane);
}

}  // namespace gear::cuda
