// The tree of masses: built from its leaves, and mended where leaves change. Sums are integers, so
// the order in which atomics add them does not matter.
#include "common/permutation.h"
#include "common/tree.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gear::cuda {
namespace {

// A warp for each node of one level.
__global__ void SumChildrenKernel(const uint64_t* __restrict__ below, int64_t used,
                                  uint64_t* __restrict__ nodes, int64_t width) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t node = GlobalThread() / kWarp; node < width; node += GlobalThreads() / kWarp) {
    uint64_t sum = node < used ? below[node * kFanOut + lane] : 0;
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, step);
    if (lane == 0) nodes[node] = sum;
  }
}

// Open addressing: keys[h] = item + 1 or 0, last[h] = the last position of that item.
struct Table {
  unsigned long long* keys;
  unsigned long long* last;
  uint64_t mask;

  __device__ uint64_t Start(uint64_t key) const { return Mix(key) & mask; }
};

__global__ void FindLastKernel(const Table table, const int64_t* __restrict__ items, int64_t count,
                               int64_t num_items) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    Require(items[i] >= 0 && items[i] < num_items);
    const auto key = static_cast<unsigned long long>(items[i]) + 1;
    uint64_t at = table.Start(key);
    for (;; at = (at + 1) & table.mask) {
      const unsigned long long found = atomicCAS(&table.keys[at], 0ull, key);
      if (found == 0 || found == key) break;
    }
    atomicMax(&table.last[at], static_cast<unsigned long long>(i));
  }
}

__global__ void SetKernel(const Table table, const int64_t* __restrict__ items,
                          const int64_t* __restrict__ masses, int64_t count, const TreeShape shape,
                          uint64_t* __restrict__ sums) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const auto key = static_cast<unsigned long long>(items[i]) + 1;
    uint64_t at = table.Start(key);
    while (table.keys[at] != key) at = (at + 1) & table.mask;
    if (table.last[at] != static_cast<unsigned long long>(i)) continue;
    int64_t node = items[i];
    const uint64_t change = static_cast<uint64_t>(masses[i]) - sums[node];  // modulo 2^64
    if (change == 0) continue;
    sums[node] += change;  // one thread an item
    for (int level = 1; level < shape.levels; ++level) {
      node >>= kFanOutBits;
      AtomicAdd(&sums[shape.offset[level] + node], change);
    }
  }
}

uint64_t TableSize(int64_t count) {
  uint64_t size = 2;
  while (size < 2 * static_cast<uint64_t>(count)) size *= 2;
  return size;
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

int64_t TreeUpdateScratch(int64_t count) { return static_cast<int64_t>(2 * TableSize(count)); }

void TreeUpdate(uint64_t* sums, int64_t num_items, const int64_t* items, const int64_t* masses,
                int64_t count, int64_t* scratch, void* stream) {
  if (count == 0) return;
  const uint64_t size = TableSize(count);
  auto* words = reinterpret_cast<unsigned long long*>(scratch);
  const Table table{words, words + size, size - 1};
  Check(cudaMemsetAsync(scratch, 0, 2 * size * sizeof(int64_t), AsStream(stream)), "TreeUpdate");
  FindLastKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(table, items, count, num_items);
  CheckLaunch("TreeUpdate");
  SetKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(table, items, masses, count,
                                                              ShapeOfTree(num_items), sums);
  CheckLaunch("TreeUpdate");
}

}  // namespace gear::cuda
