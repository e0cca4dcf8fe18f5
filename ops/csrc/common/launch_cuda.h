// Common parts of all kernels: the shape of a launch, the check after it, and the index of a
// thread.
#pragma once
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "common/host_device.h"

namespace gear::cuda {

inline constexpr int kThreads = 256, kWarp = 32;
inline constexpr int64_t kMostBlocks = 4096;  // kernels loop over what is left

inline unsigned Blocks(int64_t threads) {
  return static_cast<unsigned>(Min((threads + kThreads - 1) / kThreads, kMostBlocks));
}

inline void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string("gear: ") + what +
                             " failed: " + cudaGetErrorString(error));
}

inline void CheckLaunch(const char* kernel) { Check(cudaGetLastError(), kernel); }

inline cudaStream_t AsStream(void* stream) { return static_cast<cudaStream_t>(stream); }

__device__ inline int64_t GlobalThread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ inline int64_t GlobalThreads() { return int64_t{gridDim.x} * blockDim.x; }

// Ends the kernel with an error where an index in memory is out of range.
__device__ inline void Require(bool condition) {
  if (!condition) __trap();
}

__device__ inline void AtomicAdd(uint64_t* to, uint64_t amount) {
  atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(amount));
}

// The sum of the values of a warp's lanes, in its first lane. All of them take part.
__device__ inline uint64_t SumOfWarp(uint64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    value += __shfl_down_sync(0xFFFFFFFFu, value, step);
  return value;
}

}  // namespace gear::cuda
