// Runs kernels on the host, lane by lane, so that a machine without a GPU tests what they compute:
// indices, alignment, padding, the order of sums. It stands in for the toolkit's header; launches
// are rewritten to gear_host::Launch. The lanes of a warp are fibers that meet at its collectives.
// It shows nothing about speed, races or memory order.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct Dimensions {
  unsigned x = 0;
};
inline Dimensions threadIdx, blockIdx, blockDim, gridDim;

namespace gear_host {

inline constexpr int kLanes = 32;
inline constexpr size_t kStackBytes = 64 << 10;

struct Trap : std::runtime_error {
  Trap() : std::runtime_error("gear: a kernel found an index that leads outside") {}
};

struct Warp {
  ucontext_t scheduler, lanes[kLanes];
  std::unique_ptr<char[]> stacks{new char[kLanes * kStackBytes]};
  bool done[kLanes];
  uint64_t given[kLanes];  // what each lane brought to a collective
  int lane = 0, first_thread = 0;
  const void* body;
  void (*call)(const void*);
  std::string error;
};
inline Warp warp;

inline void Yield() { swapcontext(&warp.lanes[warp.lane], &warp.scheduler); }

inline void RunLane() {
  try {
    warp.call(warp.body);
  } catch (const std::exception& error) {
    warp.error = error.what();
  }
  warp.done[warp.lane] = true;
}

// Runs the body on every lane of one warp: each up to its next collective, in turn.
template <typename Body>
void RunWarp(const Body& body, int num_lanes) {
  warp.body = &body;
  warp.call = [](const void* b) { (*static_cast<const Body*>(b))(); };
  warp.error.clear();
  for (int i = 0; i < num_lanes; ++i) {
    warp.done[i] = false;
    getcontext(&warp.lanes[i]);
    warp.lanes[i].uc_stack.ss_sp = warp.stacks.get() + i * kStackBytes;
    warp.lanes[i].uc_stack.ss_size = kStackBytes;
    warp.lanes[i].uc_link = &warp.scheduler;
    makecontext(&warp.lanes[i], RunLane, 0);
  }
  for (int running = num_lanes; running > 0 && warp.error.empty();) {
    running = 0;
    for (warp.lane = num_lanes - 1; warp.lane >= 0; --warp.lane) {
      if (warp.done[warp.lane]) continue;
      threadIdx.x = static_cast<unsigned>(warp.first_thread + warp.lane);
      swapcontext(&warp.scheduler, &warp.lanes[warp.lane]);
      running += !warp.done[warp.lane];
    }
    // All lanes take part in a collective, or none: the kernels name all of them in its mask.
    if (running != 0 && running != num_lanes && warp.error.empty())
      warp.error = "gear: some lanes ended while others wait for them";
  }
  if (!warp.error.empty()) throw std::runtime_error(warp.error);
}

// Blocks, warps and lanes run from the last to the first: what relies on their order shows.
template <typename Body>
void Launch(unsigned blocks, int threads, const Body& body) {
  gridDim.x = blocks;
  blockDim.x = static_cast<unsigned>(threads);
  for (unsigned block = blocks; block-- > 0;) {
    blockIdx.x = block;
    for (int first = (threads - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
      warp.first_thread = first;
      RunWarp(body, threads - first < kLanes ? threads - first : kLanes);
    }
  }
}

// Gives every lane what all of them brought.
template <typename T, typename Choose>
auto Exchange(T value, const Choose& choose) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "");
  std::memcpy(&warp.given[warp.lane], &value, sizeof value);
  Yield();
  const auto result = choose([](int lane) {
    T other;
    std::memcpy(&other, &warp.given[lane], sizeof other);
    return other;
  });
  Yield();
  return result;
}

}  // namespace gear_host

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return gear_host::Exchange(value, [&](auto of) { return of(lane); });
}

template <typename T>
T __shfl_up_sync(unsigned, T value, int by) {
  const int self = gear_host::warp.lane;
  return gear_host::Exchange(value, [&](auto of) { return of(self < by ? self : self - by); });
}

template <typename T>
T __shfl_down_sync(unsigned, T value, int by) {
  const int self = gear_host::warp.lane;
  return gear_host::Exchange(
      value, [&](auto of) { return of(self + by < gear_host::kLanes ? self + by : self); });
}

inline unsigned __ballot_sync(unsigned, bool value) {
  return gear_host::Exchange(value, [](auto of) {
    unsigned bits = 0;
    for (int i = 0; i < gear_host::kLanes; ++i) bits |= unsigned{of(i)} << i;
    return bits;
  });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
[[noreturn]] inline void __trap() { throw gear_host::Trap(); }

template <typename T>
T __ldcs(const T* from) {
  return *from;
}

inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned bits) {
  return static_cast<uint32_t>(((uint64_t{high} << 32) | low) >> (bits & 31));
}

template <typename T>
T atomicAdd(T* to, T x) {
  const T old = *to;
  *to += x;
  return old;
}

template <typename T>
T atomicExch(T* to, T x) {
  const T old = *to;
  *to = x;
  return old;
}

template <typename T>
T atomicMax(T* to, T x) {
  const T old = *to;
  if (old < x) *to = x;
  return old;
}

template <typename T>
T atomicCAS(T* to, T expected, T x) {
  const T old = *to;
  if (old == expected) *to = x;
  return old;
}

using cudaStream_t = void*;
using cudaError_t = int;
inline constexpr cudaError_t cudaSuccess = 0;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
