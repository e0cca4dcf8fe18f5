// The tree of masses, built from its leaves.
#include "common/launch_cuda.h"
#include "common/tree.h"
#include "select/select.h"

namespace gear::cuda {
namespace {

// A warp for each node of one level.
__global__ void SumChildrenKernel(const uint64_t* __restrict__ below, int64_t used,
                                  uint64_t* __restrict__ nodes, int64_t width) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t node = GlobalThread() / kWarp; node < width; node += GlobalThreads() / kWarp) {
    const uint64_t sum = SumOfWarp(node < used ? below[node * kFanOut + lane] : 0);
    if (lane == 0) nodes[node] = sum;
  }
}

}  // namespace

void TreeBuild(uint64_t* sums, int64_t num_items, void* stream) {
  const TreeShape shape = ShapeOfTree(num_items);
  for (int level = 1; level < shape.levels; ++level) {
    SumChildrenKernel<<<Blocks(shape.width[level] * kWarp), kThreads, 0, AsStream(stream)>>>(
        sums + shape.offset[level - 1], shape.width[level - 1] / kFanOut,
        sums + shape.offset[level], shape.width[level]);
    CheckLaunch("TreeBuild");
  }
}

}  // namespace gear::cuda
