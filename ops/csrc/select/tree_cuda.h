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
