// The highest priorities, exactly: the bits of the k-th highest are found 8 at a time by counting,
// then the leaves above it are taken, and of equal ones the first. Only those taken are sorted.
#include "common/convert.h"
#include "common/launch_cuda.h"
#include "common/power.h"
#include "priorities/priorities.h"

namespace gear::cuda {
namespace {

inline constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits, kPasses = 4;  // of 31 bits of order
inline constexpr int kBinsOfLane = kDigits / kWarp;
inline constexpr int kAtOnce = 4;  // loads of a lane under way
inline constexpr int64_t kTopBlocks = 1024;
inline constexpr uint64_t kHighestOrder = 0x7FFFFFFFu;

// Sort key: by `high`, then by `low`; the sort is stable.
struct Ordered {
  uint64_t high;
  int64_t low, value;
};

__device__ inline bool Precedes(const Ordered& a, const Ordered& b) {
  return a.high != b.high ? a.high < b.high : a.low < b.low;
}

// The first of `count` items for which `is_after` holds, if it holds for all items after that one.
template <typename IsAfter>
__device__ int64_t FirstOf(int64_t count, const IsAfter& is_after) {
  int64_t begin = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    if (is_after(begin + half)) {
      count = half;
    } else {
      begin += half + 1;
      count -= half + 1;
    }
  }
  return begin;
}

inline constexpr int64_t kRun = 32;  // that is sorted at once

__global__ void SortRunsKernel(const Ordered* __restrict__ from, Ordered* __restrict__ to,
                               int64_t count) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const Ordered own = from[i];
    const int64_t first = i / kRun * kRun, end = Min(first + kRun, count);
    int64_t place = first;
    for (int64_t k = first; k < end; ++k) {
      const Ordered other = from[k];
      place += Precedes(other, own) || (k < i && !Precedes(own, other));
    }
    to[place] = own;
  }
}

// Merges neighbouring runs of `run` items.
__global__ void MergeKernel(const Ordered* __restrict__ from, Ordered* __restrict__ to,
                            int64_t count, int64_t run) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const Ordered own = from[i];
    const int64_t first = i / (2 * run) * (2 * run);
    const int64_t middle = Min(first + run, count), end = Min(middle + run, count);
    if (i < middle) {
      const auto is_after = [&](int64_t k) { return !Precedes(from[middle + k], own); };
      to[i + FirstOf(end - middle, is_after)] = own;
    } else {
      const auto is_after = [&](int64_t k) { return Precedes(own, from[first + k]); };
      to[i - (middle - first) + FirstOf(middle - first, is_after)] = own;
    }
  }
}

// Runs of 32 by rank, then merged by rank: every item computes its own place, so the threads of a
// block share nothing. Returns `items` or `other`, whichever holds the result; both have `count`.
// Cost: log2(count / 32) + 1 launches, in each of which an item is moved once, to a place found by
// bisection.
Ordered* Sort(Ordered* items, Ordered* other, int64_t count, void* stream) {
  if (count < 2) return items;
  Launch("Sort", SortRunsKernel, Blocks(count), kThreads, stream, items, other, count);
  for (int64_t run = kRun; run < count; run *= 2) {
    Ordered* sorted = other;
    other = items;
    items = sorted;
    Launch("Sort", MergeKernel, Blocks(count), kThreads, stream, items, other, count, run);
  }
  return other;
}

// State of the search for the k-th highest: its first bits, and how many of the leaves that begin
// with them are still needed. `taken`: places that are assigned to higher ones. `first`: the leaf
// from which on they are numbered, round the end.
struct Search {
  uint64_t prefix, wanted, taken;
  int64_t first;
};

struct Leaves {
  const float* priorities;
  const uint64_t* sums;
  int64_t count;

  __device__ int64_t At(int64_t first, int64_t number) const {
    const int64_t leaf = first + number;
    return leaf < count ? leaf : leaf - count;
  }
};

// Orders of kAtOnce leaves of a lane, from number `begin` on; -1 for leaves that
// `is_candidate(order)` or their mass excludes. All loads of priorities are under way before one is
// looked at.
template <typename IsCandidate>
__device__ void LoadOrders(const Leaves& leaves, int64_t first, int64_t begin, int64_t end,
                           const IsCandidate& is_candidate, int64_t* orders) {
  const int lane = LaneOfWarp();
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    const int64_t i = begin + k * kWarp + lane;
    orders[k] = -1;
    if (i < end) orders[k] = OrderOf(BitCast<uint32_t>(leaves.priorities[leaves.At(first, i)]));
  }
#pragma unroll
  for (int k = 0; k < kAtOnce; ++k) {
    if (orders[k] < 0) continue;
    const bool may_be = is_candidate(static_cast<uint64_t>(orders[k]));
    if (!may_be || leaves.sums[leaves.At(first, begin + k * kWarp + lane)] == 0) orders[k] = -1;
  }
}

// Counts the digits at `shift` of the leaves that begin with the prefix. A lane counts kBinsOfLane
// digits for its whole warp; ballots show which lanes have them.
__global__ void CountDigitsKernel(const Leaves leaves, int shift, const Search* __restrict__ search,
                                  uint64_t* counts) {
  const unsigned lane = threadIdx.x % kWarp;
  const uint64_t prefix = search->prefix;
  const auto begins_so = [&](uint64_t order) {
    return (order ^ prefix) >> (shift + kDigitBits) == 0;
  };
  __shared__ unsigned of_block[kDigits];  // one addition a digit of a block to the global counts
  for (unsigned digit = threadIdx.x; digit < kDigits; digit += blockDim.x) of_block[digit] = 0;
  __syncthreads();
  unsigned bins[kBinsOfLane] = {};
  constexpr int64_t kTile = kAtOnce * kWarp;
  const int64_t warps = GlobalThreads() / kWarp;
  for (int64_t tile = GlobalThread() / kWarp; tile * kTile < leaves.count; tile += warps) {
    int64_t orders[kAtOnce];
    LoadOrders(leaves, 0, tile * kTile, leaves.count, begins_so, orders);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      unsigned lanes = __ballot_sync(kAllLanes, orders[k] >= 0);
      if (lanes == 0) continue;  // alike in all lanes
      const auto digit = static_cast<unsigned>(orders[k] >> shift) % kDigits;
      unsigned has[kDigitBits];
#pragma unroll
      for (int bit = 0; bit < kDigitBits; ++bit)
        has[bit] = __ballot_sync(kAllLanes, (digit >> bit & 1) != 0);
#pragma unroll
      for (int bit = 0; bit < 5; ++bit) lanes &= (lane >> bit & 1) != 0 ? has[bit] : ~has[bit];
#pragma unroll
      for (int bin = 0; bin < kBinsOfLane; ++bin) {
        unsigned of_bin = lanes;
#pragma unroll
        for (int bit = 5; bit < kDigitBits; ++bit)
          of_bin &= (bin >> (bit - 5) & 1) != 0 ? has[bit] : ~has[bit];
        bins[bin] += static_cast<unsigned>(__popc(of_bin));
      }
    }
  }
#pragma unroll
  for (int bin = 0; bin < kBinsOfLane; ++bin)
    if (bins[bin] != 0) atomicAdd(&of_block[bin * kWarp + lane], bins[bin]);
  __syncthreads();
  for (unsigned digit = threadIdx.x; digit < kDigits; digit += blockDim.x)
    if (of_block[digit] != 0) AtomicAdd(&counts[digit], of_block[digit]);
}

// Appends the digit of the k-th highest to the prefix; by one warp, from the highest digit on.
__global__ void ChooseDigitKernel(Search* search, int shift, const uint64_t* __restrict__ counts) {
  const int lane = static_cast<int>(threadIdx.x);
  uint64_t own = 0;
  const int highest = kDigits - 1 - lane * kBinsOfLane;
  for (int k = 0; k < kBinsOfLane; ++k) own += counts[highest - k];
  uint64_t above = SumBefore(own, lane);
  const uint64_t all = __shfl_sync(kAllLanes, above + own, kWarp - 1);
  // There may be fewer than k: then all are needed. Later passes count what the first one has
  // found.
  const uint64_t wanted = Min(search->wanted, all), prefix = search->prefix;
  const bool is_here = above < wanted && wanted <= above + own;
  if (__ballot_sync(kAllLanes, is_here) == 0 && lane == 0) search->wanted = 0;  // no candidates
  if (!is_here) return;
  int digit = highest;
  while (above + counts[digit] < wanted) above += counts[digit--];
  search->prefix = prefix | static_cast<uint64_t>(digit) << shift;
  search->wanted = wanted - above;
}

// Leaves of a warp that lie together, so that equal ones can be numbered.
__device__ int64_t LeavesOfWarp(int64_t count) {
  constexpr int64_t kTile = kAtOnce * kWarp;
  const int64_t warps = GlobalThreads() / kWarp;
  return ((count + warps - 1) / warps + kTile - 1) / kTile * kTile;
}

__device__ Ordered Candidate(const Leaves& leaves, int64_t first, int64_t order, int64_t number) {
  return {kHighestOrder - static_cast<uint64_t>(order), number, leaves.At(first, number)};
}

// Takes the leaves above the k-th highest, in any order, and counts those equal to it, by warp.
__global__ void TakeAboveKernel(const Leaves leaves, Search* search, Ordered* __restrict__ found,
                                int64_t most, const Faults faults,
                                uint64_t* __restrict__ num_equal) {
  const int lane = LaneOfWarp();
  const int64_t warp = GlobalThread() / kWarp, own = LeavesOfWarp(leaves.count);
  const int64_t end = Min((warp + 1) * own, leaves.count);
  const auto lowest = static_cast<int64_t>(search->prefix);
  const int64_t first = search->first;
  const auto is_high = [&](uint64_t order) { return static_cast<int64_t>(order) >= lowest; };
  uint64_t equal = 0;
  for (int64_t begin = warp * own; begin < end; begin += kAtOnce * kWarp) {
    int64_t orders[kAtOnce];
    LoadOrders(leaves, first, begin, end, is_high, orders);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      equal += __popc(__ballot_sync(kAllLanes, orders[k] == lowest));
      const unsigned above = __ballot_sync(kAllLanes, orders[k] > lowest);
      if (above == 0) continue;
      unsigned long long place = 0;
      if (lane == 0)
        place = atomicAdd(reinterpret_cast<unsigned long long*>(&search->taken),
                          static_cast<unsigned long long>(__popc(above)));
      place = __shfl_sync(kAllLanes, place, 0) + __popc(above & ((1u << lane) - 1));
      if (orders[k] <= lowest) continue;
      const int64_t number = begin + k * kWarp + lane;
      faults.Require(static_cast<int64_t>(place) < most, kTopKChange, leaves.At(first, number));
      found[place] = Candidate(leaves, first, orders[k], number);
    }
  }
  if (lane == 0) num_equal[warp] = equal;
}

inline constexpr int kSummers = 1024;

// By one block: replaces each count by the sum of those in front of it.
__global__ void __launch_bounds__(kSummers) SumInFrontKernel(uint64_t* counts, int64_t count) {
  __shared__ uint64_t of_warps[kWarp];
  const int lane = LaneOfWarp();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  uint64_t sum = 0;
  for (int64_t begin = 0; begin < count; begin += blockDim.x) {
    const int64_t i = begin + threadIdx.x;
    const uint64_t own = i < count ? counts[i] : 0;
    const uint64_t in_warp = SumBefore(own, lane);
    if (lane == kWarp - 1) of_warps[warp] = in_warp + own;
    __syncthreads();
    const uint64_t other = lane < static_cast<int>(blockDim.x) / kWarp ? of_warps[lane] : 0;
    const uint64_t ahead = SumBefore(other, lane);
    const uint64_t before = sum + __shfl_sync(kAllLanes, ahead, warp) + in_warp;
    if (i < count) counts[i] = before;
    sum += __shfl_sync(kAllLanes, ahead + other, kWarp - 1);
    __syncthreads();  // the next turn writes the sums of the warps
  }
}

// Takes the first of those that are equal to the k-th highest, as many as are needed.
__global__ void TakeEqualKernel(const Leaves leaves, const Search* __restrict__ search,
                                Ordered* __restrict__ found, int64_t most, const Faults faults,
                                const uint64_t* __restrict__ before) {
  const int lane = LaneOfWarp();
  const int64_t warp = GlobalThread() / kWarp, own = LeavesOfWarp(leaves.count);
  const int64_t end = Min((warp + 1) * own, leaves.count);
  const auto lowest = static_cast<int64_t>(search->prefix);
  const auto wanted = static_cast<int64_t>(search->wanted);
  const int64_t first = search->first;
  const auto is_equal = [&](uint64_t order) { return static_cast<int64_t>(order) == lowest; };
  auto number = static_cast<int64_t>(before[warp]);
  for (int64_t begin = warp * own; begin < end && number < wanted; begin += kAtOnce * kWarp) {
    int64_t orders[kAtOnce];
    LoadOrders(leaves, first, begin, end, is_equal, orders);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const unsigned equal = __ballot_sync(kAllLanes, orders[k] >= 0);
      const int64_t mine = number + __popc(equal & ((1u << lane) - 1));
      number += __popc(equal);
      if (orders[k] < 0 || mine >= wanted) continue;
      const int64_t place = static_cast<int64_t>(search->taken) + mine;
      const int64_t leaf = begin + k * kWarp + lane;
      faults.Require(place < most, kTopKChange, leaves.At(first, leaf));
      found[place] = Candidate(leaves, first, lowest, leaf);
    }
  }
}

__global__ void WriteItemsKernel(const Ordered* __restrict__ found, int64_t most, int64_t k,
                                 int64_t* __restrict__ items) {
  for (int64_t i = GlobalThread(); i < k; i += GlobalThreads())
    items[i] = i < most ? found[i].value : -1;
}

__global__ void BeginKernel(Search* search, uint64_t k, const int64_t* first) {
  *search = {0, k, 0, *first};
}

// The arrays of a search, one after the other in scratch memory of int64 words; without memory only
// their size.
struct Memory {
  Memory(int64_t* scratch, int64_t num_leaves, int64_t k)
      : blocks(static_cast<unsigned>(Min<int64_t>(Blocks(num_leaves), kTopBlocks))),
        most(Min(num_leaves, k)) {
    const auto take = [&](auto** array, int64_t count) {
      static_assert(sizeof(**array) % sizeof(int64_t) == 0, "whole words");
      if (scratch != nullptr)
        *array = reinterpret_cast<std::remove_pointer_t<decltype(array)>>(scratch + num_words);
      num_words += count * static_cast<int64_t>(sizeof(**array) / sizeof(int64_t));
    };
    take(&search, 1);
    take(&counts, kPasses * kDigits);
    take(&num_equal, NumWarps());
    take(&found, most);
    take(&other, most);
  }

  int64_t NumWarps() const { return int64_t{blocks} * (kThreads / kWarp); }

  unsigned blocks;
  int64_t most;  // that are found
  int64_t num_words = 0;
  Search* search = nullptr;
  uint64_t* counts = nullptr;     // [passes, digits]
  uint64_t* num_equal = nullptr;  // [warps]
  Ordered *found = nullptr, *other = nullptr;
};

}  // namespace

int64_t TopKScratch(int64_t num_leaves, int64_t k) {
  return Memory(nullptr, num_leaves, k).num_words;
}

void TopK(const float* priorities, const uint64_t* sums, int64_t num_leaves, int64_t k,
          const int64_t* first, int64_t* items, int64_t* scratch, void* stream) {
  if (k == 0) return;
  const Memory memory(scratch, num_leaves, k);
  cudaStream_t on = AsStream(stream);
  const auto fill = [&](void* to, int byte, size_t bytes) {
    Check(cudaMemsetAsync(to, byte, bytes, on), "cudaMemsetAsync");
  };
  const Leaves leaves{priorities, sums, num_leaves};
  const Faults faults = FaultsOfProcess();
  fill(memory.counts, 0, kPasses * kDigits * sizeof(uint64_t));
  // Places without a leaf are sorted after all others, and their leaf is -1.
  fill(memory.found, 0xFF, static_cast<size_t>(memory.most) * sizeof(Ordered));
  Launch("TopK", BeginKernel, 1, 1, stream, memory.search, static_cast<uint64_t>(k), first);
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = (kPasses - 1 - pass) * kDigitBits;
    uint64_t* counts = memory.counts + pass * kDigits;
    Launch("TopK", CountDigitsKernel, memory.blocks, kThreads, stream, leaves, shift, memory.search,
           counts);
    Launch("TopK", ChooseDigitKernel, 1, kWarp, stream, memory.search, shift, counts);
  }
  Launch("TopK", TakeAboveKernel, memory.blocks, kThreads, stream, leaves, memory.search,
         memory.found, memory.most, faults, memory.num_equal);
  Launch("TopK", SumInFrontKernel, 1, ThreadsOf(memory.NumWarps(), kSummers), stream,
         memory.num_equal, memory.NumWarps());
  Launch("TopK", TakeEqualKernel, memory.blocks, kThreads, stream, leaves, memory.search,
         memory.found, memory.most, faults, memory.num_equal);
  const Ordered* sorted = Sort(memory.found, memory.other, memory.most, stream);
  Launch("TopK", WriteItemsKernel, Blocks(k), kThreads, stream, sorted, memory.most, k, items);
}

}  // namespace gear::cuda
