// Runs of 32 by rank, then merged by rank: every item computes its own place, so the threads of a
// block share nothing, and the sort is stable.
#include "common/sort_cuda.h"

namespace gear::cuda {
namespace {

inline constexpr int64_t kRun = 32;

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

}  // namespace

Ordered* Sort(Ordered* items, Ordered* other, int64_t count, void* stream) {
  if (count < 2) return items;
  SortRunsKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(items, other, count);
  CheckLaunch("Sort");
  for (int64_t run = kRun; run < count; run *= 2) {
    Ordered* sorted = other;
    other = items;
    items = sorted;
    MergeKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(items, other, count, run);
    CheckLaunch("Sort");
  }
  return other;
}

}  // namespace gear::cuda
