// Draws from trees of masses, and their updates, in kernels of several ops.
#pragma once
#include "common/launch_cuda.h"
#include "common/tree.h"

namespace gear::cuda {

// Nodes that a warp has loaded, a lane for each: its own, and the sum of those of the lanes before.
struct NodesOfWarp {
  uint64_t own, before;
};

__device__ inline NodesOfWarp LoadNodes(const uint64_t* __restrict__ sums, const TreeShape& shape,
                                        int level, int64_t parent, int lane) {
  const uint64_t own = sums[shape.offset[level] + parent * kFanOut + lane];
  return {own, SumBefore(own, lane)};
}

// The top level.
__device__ inline NodesOfWarp LoadTop(const uint64_t* __restrict__ sums, const TreeShape& shape,
                                      int lane) {
  return LoadNodes(sums, shape, shape.levels - 1, 0, lane);
}

// The sum of all masses, in every lane.
__device__ inline uint64_t TotalOf(const NodesOfWarp& top) {
  return __shfl_sync(kAllLanes, top.before + top.own, kWarp - 1);
}

// The child that a coordinate hits, which becomes what remains of it.
__device__ inline int ChildOf(const NodesOfWarp& nodes, uint64_t* coordinate) {
  // The last child takes what no other holds, as in Descend.
  const unsigned holds =
      __ballot_sync(kAllLanes, *coordinate < nodes.before + nodes.own) | (1u << (kFanOut - 1));
  const int child = __ffs(static_cast<int>(holds)) - 1;
  *coordinate -= __shfl_sync(kAllLanes, nodes.before, child);
  return child;
}

struct WarpHit {
  Hit hit;
  uint64_t mass;  // of its item
  int64_t slot;   // of its row, where items are rows; else the item
};

// Descend by a warp: a lane for each child, so that a level is one read of 256 bytes and a scan.
// `row_slots`: [num_items], or null; those of a node's rows are loaded with their masses.
__device__ inline WarpHit DescendWarp(const uint64_t* __restrict__ sums, const TreeShape& shape,
                                      NodesOfWarp nodes, uint64_t coordinate,
                                      const int32_t* __restrict__ row_slots, int64_t num_items,
                                      int lane) {
  int64_t node = 0;
  for (int level = shape.levels - 1; level > 0; --level) {
    node = node * kFanOut + ChildOf(nodes, &coordinate);
    nodes = LoadNodes(sums, shape, level - 1, node, lane);
  }
  const int64_t leaf = node * kFanOut + lane;
  const int32_t slot = row_slots != nullptr && leaf < num_items ? row_slots[leaf] : -1;
  const int child = ChildOf(nodes, &coordinate);
  const int64_t item = node * kFanOut + child;
  const uint64_t mass = __shfl_sync(kAllLanes, nodes.own, child);
  return {{item, coordinate},
          mass,
          row_slots == nullptr ? item : int64_t{__shfl_sync(kAllLanes, slot, child)}};
}

// The sum of all masses, in every lane.
__device__ inline uint64_t TotalOfWarp(const uint64_t* __restrict__ sums, const TreeShape& shape,
                                       int lane) {
  const uint64_t total = SumOfWarp(sums[shape.offset[shape.levels - 1] + lane]);
  return __shfl_sync(kAllLanes, total, 0);
}

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

// Lanes that read the children of a node, so that a warp has the loads of four nodes under way.
inline constexpr int kNodeTeam = 8, kNodesOfWarp = kWarp / kNodeTeam;

struct Node {
  uint64_t sum, least;  // of its children; the least that is not zero, or zero
};

// The node above `sums` and `minima`, 32 children of each; null: none, its value is zero. By a team
// of kNodeTeam lanes, in its first one. All lanes of the warp take part.
__device__ inline Node NodeAbove(const uint64_t* sums, const uint64_t* minima) {
  const int lane = static_cast<int>(threadIdx.x) % kNodeTeam;
  Node node{0, ~uint64_t{0}};  // the least less one, as in IsLess
#pragma unroll
  for (int i = 0; i < kFanOut; i += kNodeTeam) {
    if (sums != nullptr) node.sum += sums[i + lane];
    if (minima != nullptr) node.least = Min(node.least, minima[i + lane] - 1);
  }
#pragma unroll
  for (int step = kNodeTeam / 2; step > 0; step /= 2) {
    node.sum += __shfl_down_sync(kAllLanes, node.sum, step);
    node.least = Min(node.least, __shfl_down_sync(kAllLanes, node.least, step));
  }
  return {node.sum, node.least + 1};
}

// Calls `visit(k)` for each k < count, by the teams of the warps of `threads` threads; k = -1 where
// a team has none while others of its warp have, so that all lanes take part.
template <typename Visit>
__device__ void ForEachNode(int64_t count, int64_t thread, int64_t threads, const Visit& visit) {
  const int64_t team = thread % kWarp / kNodeTeam;
  for (int64_t first = thread / kWarp * kNodesOfWarp; first < count;
       first += threads / kWarp * kNodesOfWarp)
    visit(first + team < count ? first + team : -1);
}

// Repairs the minima above leaves that have changed; items may repeat, -1 is none.
void MinimaAbove(const uint64_t* sums, int64_t num_items, const int64_t* items, int64_t count,
                 uint64_t* minima, void* stream);

}  // namespace gear::cuda
