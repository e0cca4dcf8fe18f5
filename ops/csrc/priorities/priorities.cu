// Masses and importance weights of priorities, and the tree of minima. A wrong value in memory ends
// the kernel.
#include "common/convert.h"
#include "common/launch_cuda.h"
#include "common/power.h"
#include "priorities/priorities.h"
#include "select/tree_cuda.h"

namespace gear::cuda {
namespace {

__global__ void MassKernel(const float* __restrict__ priorities, int64_t count, MassScale scale,
                           int64_t* __restrict__ masses) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const auto bits = BitCast<uint32_t>(priorities[i]);
    Require(IsPriority(bits));
    masses[i] = static_cast<int64_t>(MassOfPriority(bits, scale).value);
  }
}

__global__ void ImportanceKernel(const Resolution* __restrict__ resolutions, int64_t size,
                                 int64_t log_ratio, uint64_t beta, float* __restrict__ weights) {
  for (int64_t i = GlobalThread(); i < size; i += GlobalThreads()) {
    const int64_t mass = resolutions[i].mass;
    Require(mass > 0);
    weights[i] = BitCast<float>(ImportanceBits(log_ratio, static_cast<uint64_t>(mass), beta));
  }
}

// The least non-zero of a node's children, in lane 0; see IsLess.
__device__ uint64_t LeastOfChildren(const uint64_t* children, int lane) {
  return LeastOfWarp(children[lane] - 1) + 1;
}

// A warp for each node of one level.
__global__ void LeastKernel(const uint64_t* __restrict__ below, int64_t used,
                            uint64_t* __restrict__ nodes, int64_t width) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t node = GlobalThread() / kWarp; node < width; node += GlobalThreads() / kWarp) {
    const uint64_t least = node < used ? LeastOfChildren(below + node * kFanOut, lane) : 0;
    if (lane == 0) nodes[node] = least;
  }
}

// A warp for each item: its node of the level that lies `shift` bits above the items. Items that
// share a node write the same value to it; -1 is none.
__global__ void LeastAboveKernel(const uint64_t* __restrict__ below,
                                 const int64_t* __restrict__ items, int64_t count,
                                 int64_t num_items, int shift, uint64_t* __restrict__ nodes) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    if (items[i] == -1) continue;
    Require(items[i] >= 0 && items[i] < num_items);
    const int64_t node = items[i] >> shift;
    const uint64_t least = LeastOfChildren(below + node * kFanOut, lane);
    if (lane == 0) nodes[node] = least;
  }
}

const uint64_t* LevelBelow(const uint64_t* sums, const uint64_t* minima, const TreeShape& shape,
                           int level) {
  return level == 1 ? sums : minima + MinimaOffset(shape, level - 1);
}

}  // namespace

void MassOf(const float* priorities, int64_t count, MassScale scale, int64_t* masses,
            void* stream) {
  if (count == 0) return;
  MassKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(priorities, count, scale, masses);
  CheckLaunch("MassOf");
}

void Importance(const Resolution* resolutions, int64_t size, uint64_t numerator, uint64_t count,
                uint64_t beta, float* weights, void* stream) {
  if (size == 0) return;
  ImportanceKernel<<<Blocks(size), kThreads, 0, AsStream(stream)>>>(
      resolutions, size, Log2(numerator) - Log2(count), beta, weights);
  CheckLaunch("Importance");
}

void MinimaBuild(const uint64_t* sums, int64_t num_items, uint64_t* minima, void* stream) {
  const TreeShape shape = ShapeOfTree(num_items);
  for (int level = 1; level < shape.levels; ++level) {
    LeastKernel<<<Blocks(shape.width[level] * kWarp), kThreads, 0, AsStream(stream)>>>(
        LevelBelow(sums, minima, shape, level), shape.width[level - 1] / kFanOut,
        minima + MinimaOffset(shape, level), shape.width[level]);
    CheckLaunch("MinimaBuild");
  }
}

// The launches are in order, so that a level is complete before the next one reads it. No early
// stop, because other threads change nodes as well.
void MinimaAbove(const uint64_t* sums, int64_t num_items, const int64_t* items, int64_t count,
                 uint64_t* minima, void* stream) {
  if (count == 0) return;
  const TreeShape shape = ShapeOfTree(num_items);
  for (int level = 1; level < shape.levels; ++level) {
    LeastAboveKernel<<<Blocks(count * kWarp), kThreads, 0, AsStream(stream)>>>(
        LevelBelow(sums, minima, shape, level), items, count, num_items, level * kFanOutBits,
        minima + MinimaOffset(shape, level));
    CheckLaunch("MinimaAbove");
  }
}

}  // namespace gear::cuda
