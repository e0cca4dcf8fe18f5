// Element types and the conversion while gathering: (x - shift) * gain in double, one rounding an
// operation, in a fixed order. A shift in float would be off by much of the spread of values such
// as time stamps; a gain in float overflows for values below 2^-128.
#pragma once
#include <cstring>
#include <type_traits>

#include "common/host_device.h"

namespace gear {

// Codes of the dtypes, in the order of deepspeed_gear.schema.DTYPES.
enum Dtype : int64_t {
  kBool = 0,
  kUint8,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64
};

// To any floating type, or to a wider integer.
GEAR_HOST_DEVICE bool IsConversion(int64_t from, int64_t to) {
  return to >= kFloat16 || (to == kInt64 && from <= kInt32) || (to == kInt32 && from <= kInt16);
}

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

template <typename To, typename From>
GEAR_HOST_DEVICE To BitCast(From x) {
  static_assert(sizeof(To) == sizeof(From), "sizes differ");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

GEAR_HOST_DEVICE float ToFloat(Bfloat x) {
  return BitCast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// Exact: every half is a float.
GEAR_HOST_DEVICE float ToFloat(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 31u, fraction = x.bits & 1023u;
  if (exponent == 31) return BitCast<float>(sign | 0x7F800000u | (fraction << 13));
  if (exponent != 0) return BitCast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-08f;  // 2^-24
  return BitCast<float>(BitCast<uint32_t>(magnitude) | sign);
}

// Round to nearest, ties to even.
GEAR_HOST_DEVICE Bfloat ToBfloat(float x) {
  const uint32_t bits = BitCast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {0x7FC0};
  return {static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

// Round to nearest, ties to even.
GEAR_HOST_DEVICE Half ToHalf(float x) {
  const uint32_t bits = BitCast<uint32_t>(x), sign = (bits >> 16) & 0x8000u,
                 magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<uint16_t>(0x7E00)};
  if (magnitude >= 0x477FF000u)
    return {static_cast<uint16_t>(sign | 0x7C00u)};                   // rounds to 2^16 or more
  if (magnitude < 0x33000001u) return {static_cast<uint16_t>(sign)};  // at most half of 2^-24
  const uint32_t exponent = magnitude >> 23;
  const uint32_t mantissa = (magnitude & 0x7FFFFFu) | 0x800000u;
  const uint32_t shift = exponent >= 113 ? 13 : 126 - exponent;  // bits that a half does not have
  const uint32_t base = exponent >= 113 ? ((exponent - 113) << 10) : 0;
  const uint32_t kept = mantissa >> shift, rest = mantissa & ((1u << shift) - 1),
                 tie = 1u << (shift - 1);
  const uint32_t rounded = kept + ((rest > tie || (rest == tie && (kept & 1u))) ? 1 : 0);
  return {static_cast<uint16_t>(sign | (base + rounded))};
}

// Whether a dtype changes by way of double: float would lose bits of the source or of the target.
template <typename T>
inline constexpr bool kNeedsDouble =
    std::is_same_v<T, double> || std::is_same_v<T, int64_t> || std::is_same_v<T, int32_t>;

template <typename C, typename T>
GEAR_HOST_DEVICE C Load(T x) {
  if constexpr (std::is_class_v<T>)  // Half and Bfloat
    return ToFloat(x);
  else
    return static_cast<C>(x);
}

// A NaN that arithmetic yields is stored as the one quiet NaN, because processors differ in its
// payload.
template <typename T, typename C>
GEAR_HOST_DEVICE T Store(C x) {
  if constexpr (std::is_same_v<T, Half>)
    return ToHalf(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, Bfloat>)
    return ToBfloat(static_cast<float>(x));
  else if constexpr (std::is_same_v<T, float>)
    return x == x ? static_cast<float>(x) : BitCast<float>(0x7FC00000u);
  else if constexpr (std::is_same_v<T, double>)
    return x == x ? x : BitCast<double>(uint64_t{0x7FF8000000000000u});
  else
    return static_cast<T>(x);
}

// Calls `visit(one)` with an element of a dtype's type; those of bool are uint8.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename Visit>
GEAR_HOST_DEVICE auto WithType(int64_t dtype, const Visit& visit) {
  switch (dtype) {
    case kBool:
    case kUint8:
      return visit(uint8_t{});
    case kInt8:
      return visit(int8_t{});
    case kInt16:
      return visit(int16_t{});
    case kInt32:
      return visit(int32_t{});
    case kInt64:
      return visit(int64_t{});
    case kFloat16:
      return visit(Half{});
    case kBfloat16:
      return visit(Bfloat{});
    case kFloat32:
      return visit(float{});
    default:
      return visit(double{});
  }
}

// Bytes of one element.
GEAR_HOST_DEVICE int64_t SizeOf(int64_t dtype) {
  return WithType(dtype, [](auto one) { return static_cast<int64_t>(sizeof one); });
}

// Calls `visit(to)` with an element of the type that elements of From are converted to: the pair is
// one that IsConversion admits.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <typename From, typename Visit>
GEAR_HOST_DEVICE auto WithTarget(int64_t dtype, const Visit& visit) {
  if constexpr (std::is_integral_v<From> && sizeof(From) <= 4) {
    if (dtype == kInt64) return visit(int64_t{});
  }
  if constexpr (std::is_integral_v<From> && sizeof(From) <= 2) {
    if (dtype == kInt32) return visit(int32_t{});
  }
  switch (dtype) {
    case kFloat16:
      return visit(Half{});
    case kBfloat16:
      return visit(Bfloat{});
    case kFloat32:
      return visit(float{});
    default:
      return visit(double{});
  }
}

}  // namespace gear
