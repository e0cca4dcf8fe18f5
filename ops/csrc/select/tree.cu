// The tree of masses: built from its leaves, and repaired where leaves change.
#include "common/hash_table_cuda.h"
#include "common/launch_cuda.h"
#include "select/select.h"
#include "select/tree_cuda.h"

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

__global__ void FindLastKernel(const Table table, const int64_t* __restrict__ items, int64_t count,
                               int64_t num_items) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    Require(items[i] >= 0 && items[i] < num_items);
    table.Put(items[i], i, [](int64_t a, int64_t b) { return a > b; });
  }
}

__global__ void SetKernel(const Table table, const int64_t* __restrict__ items,
                          const int64_t* __restrict__ masses, int64_t count, const TreeShape shape,
                          uint64_t* __restrict__ sums) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const int64_t item = items[i];
    if (!table.IsLast(item, i)) continue;
    const uint64_t change = static_cast<uint64_t>(masses[i]) - sums[item];
    sums[item] += change;  // one thread an item
    AddAbove(sums, shape, item, change);
  }
}

// A slot has one new mass, however often the log names it: the first thread to set it gets the
// change.
__global__ void SlotMassesKernel(const Slot* __restrict__ slots, int64_t num_slots,
                                 const int64_t* __restrict__ log, int64_t log_size, int64_t first,
                                 int64_t count, const AnchorRule rule, int64_t unit,
                                 const TreeShape shape, uint64_t* __restrict__ sums) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const int64_t item = log[(first + i) % log_size];
    Require(item >= 0 && item < num_slots);
    const Slot& slot = slots[item];
    const auto mass = static_cast<uint64_t>(
        slot.state == kCommitted ? MassOfSlot(rule, unit, slot.num_steps) : 0);
    auto* leaf = reinterpret_cast<unsigned long long*>(&sums[item]);
    AddAbove(sums, shape, item, mass - atomicExch(leaf, static_cast<unsigned long long>(mass)));
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

int64_t TreeUpdateScratch(int64_t count) { return TableWords(count); }

void TreeUpdate(uint64_t* sums, int64_t num_items, const int64_t* items, const int64_t* masses,
                int64_t count, int64_t* scratch, void* stream) {
  if (count == 0) return;
  const Table table = MakeTable(scratch, count, stream);
  FindLastKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(table, items, count, num_items);
  CheckLaunch("TreeUpdate");
  SetKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(table, items, masses, count,
                                                              ShapeOfTree(num_items), sums);
  CheckLaunch("TreeUpdate");
}

void SlotMasses(uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* log,
                int64_t log_size, int64_t first, int64_t last, const AnchorRule& rule, int64_t unit,
                void* stream) {
  if (first == last) return;
  SlotMassesKernel<<<Blocks(last - first), kThreads, 0, AsStream(stream)>>>(
      slots, num_slots, log, log_size, first, last - first, rule, unit, ShapeOfTree(num_slots),
      sums);
  CheckLaunch("SlotMasses");
}

}  // namespace gear::cuda
