// Runs kernels on the host, lane by lane, so that a machine without a GPU tests what they compute:
// indices, alignment, padding, the order of sums. It stands in for the toolkit's header; launches
// are rewritten to gear_host::Launch. The lanes of a warp are fibers that meet at its collectives,
// the warps of a block take turns from one barrier to the next, and one block runs at a time, so
// that what it shares is static. Blocks run in a random order, what they share is poisoned before
// each of them, and an access that is not aligned to its type is an error (SANITIZERS of
// host_kernels.py). It shows nothing about speed, races or memory order.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
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

// A kernel that ends itself. The next cudaGetLastError returns it, as on a device.
struct Trap : std::runtime_error {
  Trap() : std::runtime_error("gear: a kernel has ended itself") {}
};
inline int last_error = 0;

struct Warp {
  jmp_buf scheduler, lanes[kLanes];
  std::unique_ptr<char[]> stacks{new char[kLanes * kStackBytes]};
  bool begun[kLanes] = {}, done[kLanes] = {};  // begun: there is a fiber on the lane's stack
  bool waits[kLanes];                          // for the other warps of its block
  uint64_t given[kLanes];                      // what each lane brought to a collective
  int lane, num_lanes, first_thread;
  const void* body;
  void (*call)(const void*);
  bool trapped;
  std::string error;
};
inline Warp* warp = nullptr;  // that runs

// swapcontext would change the signal mask: two system calls for each lane and collective.
inline void Yield() {
  if (_setjmp(warp->lanes[warp->lane]) == 0) _longjmp(warp->scheduler, 1);
}

// A fiber serves its lane in all launches.
inline void RunLane() {
  for (;;) {
    try {
      warp->call(warp->body);
    } catch (const Trap& trap) {
      warp->trapped = true;
    } catch (const std::exception& error) {
      warp->error = error.what();
    }
    warp->done[warp->lane] = true;
    Yield();
  }
}

inline void Resume() {
  if (_setjmp(warp->scheduler) != 0) return;
  const int lane = warp->lane;
  if (warp->begun[lane]) _longjmp(warp->lanes[lane], 1);
  warp->begun[lane] = true;
  ucontext_t fiber;
  getcontext(&fiber);
  fiber.uc_stack.ss_sp = warp->stacks.get() + lane * kStackBytes;
  fiber.uc_stack.ss_size = kStackBytes;
  fiber.uc_link = nullptr;
  makecontext(&fiber, RunLane, 0);
  setcontext(&fiber);
}

template <typename Body>
void Begin(Warp* begun, const Body& body, int first_thread, int num_lanes) {
  begun->first_thread = first_thread;
  begun->num_lanes = num_lanes;
  begun->body = &body;
  begun->call = [](const void* b) { (*static_cast<const Body*>(b))(); };
  begun->error.clear();
  begun->trapped = false;
  for (int i = 0; i < num_lanes; ++i) {
    begun->begun[i] =
        begun->begun[i] && begun->done[i];  // an error has left the others where they were
    begun->done[i] = begun->waits[i] = false;
  }
}

// Runs a warp to its end, or to where it waits for the others of its block: each lane up to its
// next collective, in turn. Returns whether it waits.
inline bool RunWarp(Warp* running) {
  warp = running;
  for (;;) {
    int left = 0, waiting = 0;
    for (warp->lane = warp->num_lanes - 1; warp->lane >= 0; --warp->lane) {
      if (warp->done[warp->lane]) continue;
      threadIdx.x = static_cast<unsigned>(warp->first_thread + warp->lane);
      Resume();
      left += !warp->done[warp->lane];
      waiting += warp->waits[warp->lane];
    }
    if (warp->trapped) throw Trap();
    if (!warp->error.empty()) throw std::runtime_error(warp->error);
    // All lanes take part in a collective, or none: the kernels name all of them in its mask.
    if ((left != 0 && left != warp->num_lanes) || (waiting != 0 && waiting != left))
      throw std::runtime_error("gear: some lanes ended while others wait for them");
    if (left == 0 || waiting != 0) return waiting != 0;
  }
}

// An access through a pointer that is not aligned to its type, as -fsanitize=alignment finds it.
extern "C" __attribute__((used)) inline void __ubsan_handle_type_mismatch_v1(void*, uintptr_t at) {
  char text[80];
  std::snprintf(text, sizeof text, "gear: an access at %#lx is not aligned to its type",
                static_cast<unsigned long>(at));
  throw std::runtime_error(text);
}

// The variables that blocks share: host_kernels.py adds a call of Share after each declaration.
inline constexpr int kPoison = 0xA5;
inline std::map<void*, size_t> shared;

template <typename... Variables>
void Share(Variables&... variables) {
  const auto add = [](auto& variable) {
    if (shared.emplace(&variable, sizeof variable).second)
      std::memset(static_cast<void*>(&variable), kPoison, sizeof variable);
  };
  (add(variables), ...);
}

inline void PoisonShared() {
  for (const auto& [variable, bytes] : shared) std::memset(variable, kPoison, bytes);
}

// The order of the blocks of a launch: another one each time, and the same in each run of a program.
inline std::vector<unsigned> OrderOfBlocks(unsigned blocks) {
  static std::mt19937 random(1);
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned left = blocks; left > 1; --left)
    std::swap(order[left - 1], order[random() % left]);
  return order;
}

inline std::vector<unsigned> launched;  // blocks of each launch, 0 for a memset: nodes of a graph
inline std::vector<unsigned> threads_of_launches;

// Gives the blocks of the first `most` launches since the last call. Returns how many there were.
extern "C" __attribute__((used)) inline size_t gear_host_launched(unsigned* blocks, size_t most) {
  const size_t count = launched.size();
  for (size_t i = 0; i < count && i < most; ++i) blocks[i] = launched[i];
  launched.clear();
  threads_of_launches.clear();
  return count;
}

// Gives the threads of a block of the first `most` launches since gear_host_launched; it clears them.
extern "C" __attribute__((used)) inline size_t gear_host_threads(unsigned* threads, size_t most) {
  const size_t count = threads_of_launches.size();
  for (size_t i = 0; i < count && i < most; ++i) threads[i] = threads_of_launches[i];
  return count;
}

// Vectors that lanes have streamed, and those of them that do not lie in their line of 128 bytes as
// the lane among its eight neighbours.
inline size_t streamed = 0, astray = 0;

inline void NoteVector(const void* from) {
  ++streamed;
  astray += (reinterpret_cast<uintptr_t>(from) / 16 - threadIdx.x) % 8 != 0;
}

// Gives both, since the last call.
extern "C" __attribute__((used)) inline void gear_host_streamed(size_t* vectors) {
  vectors[0] = streamed, vectors[1] = astray;
  streamed = astray = 0;
}

template <typename Body>
void RunBlocks(unsigned blocks, int threads, const Body& body) {
  static std::vector<std::unique_ptr<Warp>> warps;  // kept: their stacks are large
  const size_t num_warps = static_cast<size_t>((threads + kLanes - 1) / kLanes);
  gridDim.x = blocks;
  blockDim.x = static_cast<unsigned>(threads);
  for (const unsigned block : OrderOfBlocks(blocks)) {
    blockIdx.x = block;
    PoisonShared();
    size_t waiting = 0;  // warps, which lie in front; one that does not wait leaves its place
    for (int first = (threads - 1) / kLanes * kLanes; first >= 0; first -= kLanes) {
      if (warps.size() == waiting) warps.push_back(std::make_unique<Warp>());
      Begin(warps[waiting].get(), body, first, threads - first < kLanes ? threads - first : kLanes);
      waiting += RunWarp(warps[waiting].get());
    }
    while (waiting != 0) {
      if (waiting != num_warps)
        throw std::runtime_error("gear: some warps ended while others wait for them");
      waiting = 0;
      for (size_t i = 0; i < num_warps; ++i) waiting += RunWarp(warps[i].get());
    }
  }
}

// Warps and lanes run from the last to the first, blocks in any order: what relies on it shows.
template <typename Body>
void Launch(unsigned blocks, int threads, const Body& body) {
  launched.push_back(blocks);
  threads_of_launches.push_back(static_cast<unsigned>(threads));
  try {
    RunBlocks(blocks, threads, body);
  } catch (const Trap&) {
    last_error = 719;  // cudaErrorLaunchFailure
  }
}

// Gives every lane what all of them brought.
template <typename T, typename Choose>
auto Exchange(T value, const Choose& choose) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "");
  std::memcpy(&warp->given[warp->lane], &value, sizeof value);
  Yield();
  const auto result = choose([](int lane) {
    T other;
    std::memcpy(&other, &warp->given[lane], sizeof other);
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
  const int self = gear_host::warp->lane;
  return gear_host::Exchange(value, [&](auto of) { return of(self < by ? self : self - by); });
}

template <typename T>
T __shfl_down_sync(unsigned, T value, int by) {
  const int self = gear_host::warp->lane;
  return gear_host::Exchange(
      value, [&](auto of) { return of(self + by < gear_host::kLanes ? self + by : self); });
}

inline int __reduce_add_sync(unsigned, int value) {
  return gear_host::Exchange(value, [](auto of) {
    int sum = 0;
    for (int i = 0; i < gear_host::kLanes; ++i) sum += of(i);
    return sum;
  });
}

inline int __reduce_max_sync(unsigned, int value) {
  return gear_host::Exchange(value, [](auto of) {
    int highest = of(0);
    for (int i = 1; i < gear_host::kLanes; ++i) highest = of(i) > highest ? of(i) : highest;
    return highest;
  });
}

inline unsigned __ballot_sync(unsigned, bool value) {
  return gear_host::Exchange(value, [](auto of) {
    unsigned bits = 0;
    for (int i = 0; i < gear_host::kLanes; ++i) bits |= unsigned{of(i)} << i;
    return bits;
  });
}

// Meets the other warps of the block.
inline void __syncthreads() {
  gear_host::Warp* own = gear_host::warp;
  own->waits[own->lane] = true;
  gear_host::Yield();
  own->waits[own->lane] = false;
}

// Meets the other lanes of the warp.
inline void __syncwarp() { gear_host::Yield(); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline void __threadfence() {}
inline void __threadfence_system() {}
[[noreturn]] inline void __trap() { throw gear_host::Trap(); }

template <typename T>
T __ldg(const T* from) {
  return *from;
}

template <typename T>
T __ldcs(const T* from) {
  if (sizeof(T) == 16) gear_host::NoteVector(from);
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
// A device keeps an error that ends its context; here the next launch runs again.
inline cudaError_t cudaGetLastError() { return std::exchange(gear_host::last_error, cudaSuccess); }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "unspecified launch failure";
}
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
inline constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = ::operator new(bytes, std::align_val_t(4096));  // whole pages, as the driver's
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  gear_host::launched.push_back(0);
  gear_host::threads_of_launches.push_back(0);
  return cudaSuccess;
}
