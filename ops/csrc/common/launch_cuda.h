// Common parts of all kernels: the shape of a launch, the check after it, and the index of a
// thread.
//
// A function of gear::cuda takes what the one of gear::cpu takes, raw pointers and sizes, and a
// stream at the end. Every launch is followed by an error check, which throws std::runtime_error;
// an empty input returns before it. No call waits for the device: indices in device memory are
// checked there, and a wrong one ends the kernel before it reads or writes outside (faults_cuda.h).
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "common/faults_cuda.h"
#include "common/found_fault_cuda.h"
#include "common/host_device.h"

namespace gear::cuda {

inline constexpr int kThreads = 256, kWarpBits = 5, kWarp = 1 << kWarpBits;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;
inline constexpr int64_t kMostBlocks = 4096;  // kernels loop over what is left

inline unsigned Blocks(int64_t threads) {
  return static_cast<unsigned>(Min((threads + kThreads - 1) / kThreads, kMostBlocks));
}

// Threads of the only block of a launch: whole warps.
inline int ThreadsOf(int64_t threads, int most) {
  return static_cast<int>(Min<int64_t>((threads + kWarp - 1) / kWarp * kWarp, most));
}

// Throws an error, which names the fault that has ended a kernel of the process, if there is one.
inline void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  if (const auto fault = FindFault()) throw std::runtime_error(fault->Text());
  throw std::runtime_error(std::string("gear: ") + what + " failed: " + cudaGetErrorString(error));
}

inline cudaStream_t AsStream(void* stream) { return static_cast<cudaStream_t>(stream); }

// Launches a kernel of an op, and checks that it was launched.
template <typename... Parameters, typename... Arguments>
void Launch(const char* op, void (*kernel)(Parameters...), unsigned blocks, int threads,
            void* stream, const Arguments&... arguments) {
  kernel<<<blocks, threads, 0, AsStream(stream)>>>(arguments...);
  Check(cudaGetLastError(), op);
}

__device__ inline int64_t GlobalThread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline int64_t GlobalThreads() { return int64_t{gridDim.x} * blockDim.x; }

__device__ inline int LaneOfWarp() { return static_cast<int>(threadIdx.x) % kWarp; }

// Asks for the line of an address, which the cache has when it is read soon after. Takes no
// register.
__device__ inline void Prefetch(const void* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L1 [%0];" ::"l"(from));
#else
  (void)from;
#endif
}

__device__ inline void AtomicAdd(uint64_t* to, uint64_t amount) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(amount));
}

// The sum of the values of a warp's lanes, in its first lane. All of them take part.
__device__ inline uint64_t SumOfWarp(uint64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_down_sync(kAllLanes, value, step);
  return value;
}

// Counters over all threads of a kernel: one atomic a warp at most. All lanes of the warp take
// part.
__device__ inline void AddToCount(int64_t* counts, int which, uint64_t amount) {
  if (__ballot_sync(kAllLanes, amount != 0) == 0) return;  // as most often
  const uint64_t sum = SumOfWarp(amount);
  if (threadIdx.x % kWarp == 0 && sum != 0)
    AtomicAdd(reinterpret_cast<uint64_t*>(counts + which), sum);
}

// The same for amounts whose sum over a warp is an int, by one instruction.
__device__ inline void AddFewToCount(int64_t* counts, int which, int amount) {
  const int sum = __reduce_add_sync(kAllLanes, amount);
  if (threadIdx.x % kWarp == 0 && sum != 0)
    AtomicAdd(reinterpret_cast<uint64_t*>(counts + which), static_cast<uint64_t>(int64_t{sum}));
}

__device__ inline void RaiseCount(int64_t* counts, int which, int value) {
  const int highest = __reduce_max_sync(kAllLanes, value);
  if (threadIdx.x % kWarp == 0 && highest >= 0)
    atomicMax(reinterpret_cast<long long*>(counts + which), static_cast<long long>(highest));
}

// Sum of the values of the lanes before this one. All lanes of the warp take part.
template <typename T>
__device__ T SumBefore(T value, int lane) {
  T up_to = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T below = __shfl_up_sync(kAllLanes, up_to, step);
    if (lane >= step) up_to += below;
  }
  return up_to - value;
}

// The least of the values of a warp's lanes, in its first lane. All of them take part.
__device__ inline uint64_t LeastOfWarp(uint64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    value = Min(value, __shfl_down_sync(kAllLanes, value, step));
  return value;
}

// The least of the values of a block's threads, in all of them. Once in a kernel.
__device__ inline uint64_t LeastOfBlock(uint64_t value) {
  __shared__ uint64_t of_warps[kWarp];  // a lane for each: a block has at most 1,024 threads
  const int lane = LaneOfWarp();
  value = LeastOfWarp(value);
  if (lane == 0) of_warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = LeastOfWarp(lane < static_cast<int>(blockDim.x) / kWarp ? of_warps[lane] : ~uint64_t{0});
  return __shfl_sync(kAllLanes, value, 0);
}

// Whether this block is the last of its grid to get here; then it sees what all blocks have
// written. All threads call it, once in a kernel. `num_ended`: 0 before the grid, and after it.
__device__ inline bool IsLastBlock(int64_t* num_ended) {
  __shared__ bool is_last;
  __syncthreads();  // what the block's other threads have written is before the fence
  if (threadIdx.x == 0) {
    // Release, pairs with the fence after the count of the last block. Fences are cumulative, so
    // that one of a block's threads suffices.
    __threadfence();
    is_last = atomicAdd(reinterpret_cast<unsigned long long*>(num_ended), 1ull) + 1 == gridDim.x;
    __threadfence();  // acquire
    if (is_last) *num_ended = 0;
  }
  __syncthreads();
  return is_last;
}

}  // namespace gear::cuda
