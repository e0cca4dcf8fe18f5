// Masses of priorities, and the trees of their sums and minima. A wrong value in memory ends the
// kernel.
#include "common/convert.h"
#include "common/launch_cuda.h"
#include "common/power.h"
#include "priorities/priorities.h"
#include "select/select.h"
#include "select/tree_cuda.h"

namespace gear::cuda {
namespace {

__global__ void MassKernel(const float* __restrict__ priorities, int64_t count, MassScale scale,
                           const Faults faults, int64_t* __restrict__ masses) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const auto bits = BitCast<uint32_t>(priorities[i]);
    faults.Require(IsPriority(bits), kMassPriority, i);
    masses[i] = static_cast<int64_t>(MassOfPriority(bits, scale).value);
  }
}

// A node from its children, a lane for each: in the first lane.
struct Sum {
  __device__ static uint64_t Of(uint64_t child) { return SumOfWarp(child); }
};
struct Least {  // that is not zero, see IsLess
  __device__ static uint64_t Of(uint64_t child) { return LeastOfWarp(child - 1) + 1; }
};

// A warp for each node of one level; those without children are 0.
template <typename Join>
__global__ void LevelKernel(const uint64_t* __restrict__ below, int64_t used,
                            uint64_t* __restrict__ nodes, int64_t width) {
  const int lane = LaneOfWarp();
  for (int64_t node = GlobalThread() / kWarp; node < width; node += GlobalThreads() / kWarp) {
    const uint64_t value = Join::Of(node < used ? below[node * kFanOut + lane] : 0);
    if (lane == 0) nodes[node] = value;
  }
}

// A warp for each item: its node of the level that lies `shift` bits above the items. Items that
// share a node write the same value to it; -1 is none.
__global__ void LeastAboveKernel(const uint64_t* __restrict__ below,
                                 const int64_t* __restrict__ items, int64_t count,
                                 int64_t num_items, int shift, const Faults faults,
                                 uint64_t* __restrict__ nodes) {
  const int lane = LaneOfWarp();
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    if (items[i] == -1) continue;
    faults.Require(items[i] >= 0 && items[i] < num_items, kUpdateItem, i);
    const int64_t node = items[i] >> shift;
    const uint64_t least = Least::Of(below[node * kFanOut + lane]);
    if (lane == 0) nodes[node] = least;
  }
}

}  // namespace

void MassOf(const float* priorities, int64_t count, MassScale scale, int64_t* masses,
            void* stream) {
  if (count == 0) return;
  Launch("MassOf", MassKernel, Blocks(count), kThreads, stream, priorities, count, scale,
         FaultsOfProcess(), masses);
}

void TreeBuild(uint64_t* sums, int64_t num_items, void* stream) {
  const TreeShape shape = ShapeOfTree(num_items);
  for (int level = 1; level < shape.levels; ++level) {
    Launch("TreeBuild", LevelKernel<Sum>, Blocks(shape.width[level] * kWarp), kThreads, stream,
           sums + shape.offset[level - 1], shape.width[level - 1] / kFanOut,
           sums + shape.offset[level], shape.width[level]);
  }
}

void MinimaBuild(const uint64_t* sums, int64_t num_items, uint64_t* minima, void* stream) {
  const TreeShape shape = ShapeOfTree(num_items);
  for (int level = 1; level < shape.levels; ++level) {
    Launch("MinimaBuild", LevelKernel<Least>, Blocks(shape.width[level] * kWarp), kThreads, stream,
           MinimaLevel<const uint64_t*>(sums, minima, shape, level - 1),
           shape.width[level - 1] / kFanOut, minima + MinimaOffset(shape, level),
           shape.width[level]);
  }
}

// The launches are in order, so that a level is complete before the next one reads it. No early
// stop, because other threads change nodes as well.
void MinimaAbove(const uint64_t* sums, int64_t num_items, const int64_t* items, int64_t count,
                 uint64_t* minima, void* stream) {
  if (count == 0) return;
  const TreeShape shape = ShapeOfTree(num_items);
  for (int level = 1; level < shape.levels; ++level) {
    Launch("MinimaAbove", LeastAboveKernel, Blocks(count * kWarp), kThreads, stream,
           MinimaLevel<const uint64_t*>(sums, minima, shape, level - 1), items, count, num_items,
           level * kFanOutBits, FaultsOfProcess(), minima + MinimaOffset(shape, level));
  }
}

}  // namespace gear::cuda
