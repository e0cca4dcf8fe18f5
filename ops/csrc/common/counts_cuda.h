// Counters over all threads of a kernel: one atomic a warp at most. All lanes of the warp take
// part.
#pragma once
#include "common/launch_cuda.h"

namespace gear::cuda {

__device__ inline void AddToCount(int64_t* counts, int which, uint64_t amount) {
  if (__ballot_sync(kAllLanes, amount != 0) == 0) return;  // as most often
  const uint64_t sum = SumOfWarp(amount);
  if (threadIdx.x % kWarp == 0 && sum != 0)
    AtomicAdd(reinterpret_cast<uint64_t*>(counts + which), sum);
}

__device__ inline void RaiseCount(int64_t* counts, int which, int64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    value = Max(value, __shfl_down_sync(kAllLanes, value, step));
  if (threadIdx.x % kWarp == 0 && value >= 0)
    atomicMax(reinterpret_cast<long long*>(counts + which), static_cast<long long>(value));
}

}  // namespace gear::cuda
