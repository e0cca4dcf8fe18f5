// Updates of the trees of masses that kernels of several ops share.
#pragma once
#include "common/launch_cuda.h"
#include "common/tree.h"

namespace gear::cuda {

// Adds the change of a leaf, modulo 2^64, to the nodes above it. Sums are integers, so the order of
// additions does not matter.
__device__ inline void AddAbove(uint64_t* sums, const TreeShape& shape, int64_t item,
                                uint64_t change) {
  if (change == 0) return;
  for (int level = 1; level < shape.levels; ++level) {
    item >>= kFanOutBits;
    AtomicAdd(&sums[shape.offset[level] + item], change);
  }
}

// MinimaUpdate of items among which -1 means none.
void MinimaAbove(const uint64_t* sums, int64_t num_items, const int64_t* items, int64_t count,
                 uint64_t* minima, void* stream);

}  // namespace gear::cuda
