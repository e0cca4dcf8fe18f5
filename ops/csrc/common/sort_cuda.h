// Sorting and running sums, of as much as fits into scratch memory, without host synchronisation.
#pragma once
#include "common/launch_cuda.h"

namespace gear::cuda {

// Sort key: by `high`, then by `low`; the sort is stable.
struct Ordered {
  uint64_t high;
  int64_t low, value;
};

__device__ inline bool Precedes(const Ordered& a, const Ordered& b) {
  return a.high != b.high ? a.high < b.high : a.low < b.low;
}

// Sorts by merging runs. Returns `items` or `other`, whichever holds the result; both have `count`.
// Cost: log2(count / 32) + 1 launches, in each of which an item is moved once, to a place found by
// bisection.
Ordered* Sort(Ordered* items, Ordered* other, int64_t count, void* stream);

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

// An element of a scan: a value that belongs to a key.
struct Keyed {
  uint64_t key;
  int64_t value;
};

// Sums of all values; keys do not matter.
struct Sums {
  __device__ static Keyed Nothing() { return {0, 0}; }
  __device__ static Keyed Join(const Keyed& a, const Keyed& b) { return {0, a.value + b.value}; }
};

// The greatest value, at least 0, of neighbours that have the same key.
struct Maxima {
  __device__ static Keyed Nothing() { return {~uint64_t{0}, 0}; }
  __device__ static Keyed Join(const Keyed& a, const Keyed& b) {
    return {b.key, a.key == b.key ? Max(a.value, b.value) : b.value};
  }
};

inline constexpr int64_t kScanTile = 1024;  // values of a warp

inline int64_t NumScanTiles(int64_t count) { return (count + kScanTile - 1) / kScanTile; }

__device__ inline Keyed FromAhead(const Keyed& own, int step) {
  return {__shfl_up_sync(kAllLanes, own.key, step), __shfl_up_sync(kAllLanes, own.value, step)};
}

__device__ inline Keyed FromLast(const Keyed& own) {
  return {__shfl_sync(kAllLanes, own.key, kWarp - 1), __shfl_sync(kAllLanes, own.value, kWarp - 1)};
}

// The join of a warp's lanes up to each lane.
template <typename Op>
__device__ Keyed JoinUpTo(Keyed own, int lane) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Keyed ahead = FromAhead(own, step);
    if (lane >= step) own = Op::Join(ahead, own);
  }
  return own;
}

// Joins a warp's tile, and stores every value's exclusive and inclusive prefix. Returns the total.
template <bool kStores, typename Op, typename Scan>
__device__ Keyed ScanTile(const Scan& scan, int64_t first, int64_t end, Keyed joined) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t begin = first; begin < end; begin += kWarp) {
    const int64_t i = begin + lane;
    const Keyed own = JoinUpTo<Op>(i < end ? scan.Load(i) : Op::Nothing(), lane);
    const Keyed ahead = FromAhead(own, 1);
    const Keyed before = lane == 0 ? joined : Op::Join(joined, ahead);
    if (kStores && i < end) scan.Store(i, before, Op::Join(joined, own));
    joined = Op::Join(joined, FromLast(own));
  }
  return joined;
}

template <typename Op, typename Scan>
__global__ void ScanTotalsKernel(const Scan scan, int64_t count, Keyed* __restrict__ totals) {
  const int64_t warps = GlobalThreads() / kWarp;
  for (int64_t tile = GlobalThread() / kWarp; tile * kScanTile < count; tile += warps) {
    const int64_t first = tile * kScanTile, end = Min(first + kScanTile, count);
    const Keyed total = ScanTile<false, Op>(scan, first, end, Op::Nothing());
    if (threadIdx.x % kWarp == 0) totals[tile] = total;
  }
}

// Replaces each tile's total by its exclusive prefix.
struct InFront {
  Keyed* totals;
  __device__ Keyed Load(int64_t i) const { return totals[i]; }
  __device__ void Store(int64_t i, const Keyed& before, const Keyed&) const { totals[i] = before; }
};

template <typename Op>
__global__ void ScanTilesKernel(const InFront scan, int64_t tiles) {  // by one warp
  ScanTile<true, Op>(scan, 0, tiles, Op::Nothing());
}

template <typename Op, typename Scan>
__global__ void ScanKernel(const Scan scan, int64_t count, const Keyed* __restrict__ totals) {
  const int64_t warps = GlobalThreads() / kWarp;
  for (int64_t tile = GlobalThread() / kWarp; tile * kScanTile < count; tile += warps) {
    const int64_t first = tile * kScanTile, end = Min(first + kScanTile, count);
    ScanTile<true, Op>(scan, first, end, count <= kScanTile ? Op::Nothing() : totals[tile]);
  }
}

// Calls scan.Store(i, exclusive prefix of i, inclusive prefix of i) for every scan.Load(i).
// `totals`: scratch of NumScanTiles(count).
template <typename Op, typename Scan>
void RunScan(const Scan& scan, int64_t count, Keyed* totals, void* stream) {
  if (count == 0) return;
  const int64_t tiles = NumScanTiles(count);
  if (tiles > 1) {
    ScanTotalsKernel<Op, Scan>
        <<<Blocks(tiles * kWarp), kThreads, 0, AsStream(stream)>>>(scan, count, totals);
    CheckLaunch("Scan");
    ScanTilesKernel<Op><<<1, kWarp, 0, AsStream(stream)>>>(InFront{totals}, tiles);
    CheckLaunch("Scan");
  }
  ScanKernel<Op, Scan>
      <<<Blocks(tiles * kWarp), kThreads, 0, AsStream(stream)>>>(scan, count, totals);
  CheckLaunch("Scan");
}

// Arrays one after the other in scratch memory of int64 words; without memory it only counts them.
class Scratch {
 public:
  explicit Scratch(int64_t* words) : words_(words) {}

  template <typename T>
  T* Take(int64_t count) {
    static_assert(alignof(T) <= sizeof(int64_t), "scratch is aligned to words");
    int64_t* taken = words_ == nullptr ? nullptr : words_ + size_;
    size_ += (count * static_cast<int64_t>(sizeof(T)) + 7) / 8;
    return reinterpret_cast<T*>(taken);
  }

  int64_t size() const { return size_; }

 private:
  int64_t* words_;
  int64_t size_ = 0;
};

}  // namespace gear::cuda
