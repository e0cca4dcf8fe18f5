// The tables of powers in a block's shared memory. In memory each kernel finds them in the L2 cache
// alone, and a fence empties the L1 cache, so that two loads of 0.15 us lie in front of a power.
#pragma once
#include "common/launch_cuda.h"
#include "common/power.h"

namespace gear::cuda {

inline constexpr int kTableWords = 1 << kTableBits, kPowerWords = 3 * kTableWords;

// Begins to copy 16 bytes into shared memory, without a register and without waiting for them.
__device__ inline void BeginCopy(uint64_t* to, const uint64_t* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from))
               : "memory");
#else
  to[0] = from[0], to[1] = from[1];
#endif
}

// The thread's copies are complete; for the other threads of its block after a barrier.
__device__ inline void EndCopies() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Begins to copy the tables. By all threads of a block; `shared`: [kPowerWords], aligned to 16
// bytes.
__device__ inline PowerTables BeginTables(uint64_t* shared) {
  const PowerTables from = TablesInMemory();
  for (int i = 2 * static_cast<int>(threadIdx.x); i < kPowerWords;
       i += 2 * static_cast<int>(blockDim.x)) {
    const int entry = i % kTableWords;
    const uint64_t* table = i < kTableWords       ? from.inverse
                            : i < 2 * kTableWords ? from.logs
                                                  : from.powers;
    BeginCopy(shared + i, table + entry);
  }
  return {shared, shared + kTableWords, shared + 2 * kTableWords};
}

}  // namespace gear::cuda
