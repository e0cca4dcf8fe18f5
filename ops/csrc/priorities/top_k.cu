// The highest priorities, exactly: the bits of the k-th highest are found 8 at a time by counting,
// then the leaves above it are taken, and of equal ones the first. Only those taken are sorted.
#include "common/convert.h"
#include "common/launch_cuda.h"
#include "common/power.h"
#include "common/sort_cuda.h"
#include "priorities/priorities.h"

namespace gear::cuda {
namespace {

inline constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits, kPasses = 4;  // of 31 bits of order
inline constexpr int kBinsOfLane = kDigits / kWarp;
inline constexpr int kAtOnce = 4;  // loads of a lane under way
inline constexpr int64_t kTopBlocks = 1024;
inline constexpr uint64_t kHighestOrder = 0x7FFFFFFFu;

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
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
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
    if (bins[bin] != 0) AtomicAdd(&counts[bin * kWarp + lane], bins[bin]);
}

// Appends the digit of the k-th highest to the prefix; by one warp, from the highest digit on.
__global__ void ChooseDigitKernel(Search* search, int shift, const uint64_t* __restrict__ counts) {
  const int lane = static_cast<int>(threadIdx.x);
  uint64_t own = 0;
  const int highest = kDigits - 1 - lane * kBinsOfLane;
  for (int k = 0; k < kBinsOfLane; ++k) own += counts[highest - k];
  const Keyed up_to = JoinUpTo<Sums>({0, static_cast<int64_t>(own)}, lane);
  const auto all = static_cast<uint64_t>(FromLast(up_to).value);
  // There may be fewer than k: then all are needed. Later passes count what the first one has
  // found.
  const uint64_t wanted = Min(search->wanted, all), prefix = search->prefix;
  uint64_t above = static_cast<uint64_t>(up_to.value) - own;
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
                                int64_t most, Keyed* __restrict__ num_equal) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warp = GlobalThread() / kWarp, own = LeavesOfWarp(leaves.count);
  const int64_t end = Min((warp + 1) * own, leaves.count);
  const auto lowest = static_cast<int64_t>(search->prefix);
  const int64_t first = search->first;
  const auto is_high = [&](uint64_t order) { return static_cast<int64_t>(order) >= lowest; };
  int64_t equal = 0;
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
      Require(static_cast<int64_t>(place) < most);
      found[place] = Candidate(leaves, first, orders[k], begin + k * kWarp + lane);
    }
  }
  if (lane == 0) num_equal[warp] = {0, equal};
}

// Takes the first of those that are equal to the k-th highest, as many as are needed.
__global__ void TakeEqualKernel(const Leaves leaves, const Search* __restrict__ search,
                                Ordered* __restrict__ found, int64_t most,
                                const Keyed* __restrict__ before) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warp = GlobalThread() / kWarp, own = LeavesOfWarp(leaves.count);
  const int64_t end = Min((warp + 1) * own, leaves.count);
  const auto lowest = static_cast<int64_t>(search->prefix);
  const auto wanted = static_cast<int64_t>(search->wanted);
  const int64_t first = search->first;
  const auto is_equal = [&](uint64_t order) { return static_cast<int64_t>(order) == lowest; };
  int64_t number = before[warp].value;
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
      Require(place < most);
      found[place] = Candidate(leaves, first, lowest, begin + k * kWarp + lane);
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

struct Memory {
  Memory(int64_t* words, int64_t num_leaves, int64_t k)
      : scratch(words),
        blocks(static_cast<unsigned>(Min<int64_t>(Blocks(num_leaves), kTopBlocks))),
        most(Min(num_leaves, k)),
        search(scratch.Take<Search>(1)),
        counts(scratch.Take<uint64_t>(kPasses * kDigits)),
        num_equal(scratch.Take<Keyed>(NumWarps())),
        found(scratch.Take<Ordered>(most)),
        other(scratch.Take<Ordered>(most)) {}

  int64_t NumWarps() const { return int64_t{blocks} * (kThreads / kWarp); }

  Scratch scratch;
  unsigned blocks;
  int64_t most;  // that are found
  Search* search;
  uint64_t* counts;  // [passes, digits]
  Keyed* num_equal;  // [warps]
  Ordered *found, *other;
};

}  // namespace

int64_t TopKScratch(int64_t num_leaves, int64_t k) {
  return Memory(nullptr, num_leaves, k).scratch.size();
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
  fill(memory.counts, 0, kPasses * kDigits * sizeof(uint64_t));
  // Places without a leaf are sorted after all others, and their leaf is -1.
  fill(memory.found, 0xFF, static_cast<size_t>(memory.most) * sizeof(Ordered));
  BeginKernel<<<1, 1, 0, AsStream(stream)>>>(memory.search, static_cast<uint64_t>(k), first);
  CheckLaunch("TopK");
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = (kPasses - 1 - pass) * kDigitBits;
    uint64_t* counts = memory.counts + pass * kDigits;
    CountDigitsKernel<<<memory.blocks, kThreads, 0, AsStream(stream)>>>(leaves, shift,
                                                                        memory.search, counts);
    CheckLaunch("TopK");
    ChooseDigitKernel<<<1, kWarp, 0, AsStream(stream)>>>(memory.search, shift, counts);
    CheckLaunch("TopK");
  }
  TakeAboveKernel<<<memory.blocks, kThreads, 0, AsStream(stream)>>>(
      leaves, memory.search, memory.found, memory.most, memory.num_equal);
  CheckLaunch("TopK");
  ScanTilesKernel<Sums>
      <<<1, kWarp, 0, AsStream(stream)>>>(InFront{memory.num_equal}, memory.NumWarps());
  CheckLaunch("TopK");
  TakeEqualKernel<<<memory.blocks, kThreads, 0, AsStream(stream)>>>(
      leaves, memory.search, memory.found, memory.most, memory.num_equal);
  CheckLaunch("TopK");
  const Ordered* sorted = Sort(memory.found, memory.other, memory.most, stream);
  WriteItemsKernel<<<Blocks(k), kThreads, 0, AsStream(stream)>>>(sorted, memory.most, k, items);
  CheckLaunch("TopK");
}

}  // namespace gear::cuda
