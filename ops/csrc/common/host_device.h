// Differences between g++ and nvcc. C++17: DeepSpeed compiles .cpp as C++17 with torch < 2.12.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define GEAR_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GEAR_HOST_DEVICE inline
#endif

#if defined(__FAST_MATH__) || defined(__USE_FAST_MATH__)
#error "gear: build without --use_fast_math / -ffast-math"
#endif

namespace gear {

// High 64 bits of a 64 x 64 product.
GEAR_HOST_DEVICE uint64_t MulHi(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// Position of the highest set bit; x > 0.
GEAR_HOST_DEVICE int HighestBit(uint64_t x) {
#if defined(__CUDA_ARCH__)
  return 63 - __clzll(static_cast<long long>(x));
#else
  return 63 - __builtin_clzll(x);
#endif
}

template <typename T>
GEAR_HOST_DEVICE T Min(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
GEAR_HOST_DEVICE T Max(T a, T b) {
  return a < b ? b : a;
}

template <typename T>
GEAR_HOST_DEVICE T Clamp(T x, T low, T high) {
  return x < low ? low : (x > high ? high : x);
}

}  // namespace gear
