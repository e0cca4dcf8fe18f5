// Powers in integer arithmetic: no floating-point operation, so neither a compiler nor its flags
// can change a bit of a result. Logarithms are Q54: 2^54 is 1. Relative error of a power: below
// 2^-51.
//
// The polynomials interpolate log2(1 + x) / x and 2^x at the Chebyshev nodes of [0, 1], solved with
// 400 bits; 24 and 14 terms, so that what they leave out is below the rounding of Q62.
#pragma once
#include "common/host_device.h"

namespace gear {

inline constexpr int kMassBits = 24;      // the mass of priority 1 is 2^24
inline constexpr int kMostMassBits = 40;  // masses are at most 2^40
inline constexpr uint64_t kOneQ62 = uint64_t{1} << 62;
inline constexpr int kLogBits = 54;

// floor(a * b / 2^62).
GEAR_HOST_DEVICE uint64_t MulQ62(uint64_t a, uint64_t b) {
  return (MulHi(a, b) << 2) | ((a * b) >> 62);
}

// log2(1 + x) in [0, 1], Q62, for x in [0, 1), Q64.
GEAR_HOST_DEVICE uint64_t Log2OnePlus(uint64_t x) {
  uint64_t b = 46074035101920ull;
  b = 601762752287883ull - MulHi(x, b);
  b = 3748520696919467ull - MulHi(x, b);
  b = 14875519595685127ull - MulHi(x, b);
  b = 42451127503677666ull - MulHi(x, b);
  b = 93461211486349017ull - MulHi(x, b);
  b = 166850588777359461ull - MulHi(x, b);
  b = 251716735706291525ull - MulHi(x, b);
  b = 333435986357634187ull - MulHi(x, b);
  b = 402449507931877368ull - MulHi(x, b);
  b = 458080149688211217ull - MulHi(x, b);
  b = 505858848530958726ull - MulHi(x, b);
  b = 552756847791392746ull - MulHi(x, b);
  b = 604455224477465928ull - MulHi(x, b);
  b = 665254739087444757ull - MulHi(x, b);
  b = 739240508818029274ull - MulHi(x, b);
  b = 831655939030131688ull - MulHi(x, b);
  b = 950465128344776614ull - MulHi(x, b);
  b = 1108876086026533557ull - MulHi(x, b);
  b = 1330651309568268484ull - MulHi(x, b);
  b = 1663314137225261404ull - MulHi(x, b);
  b = 2217752182973985048ull - MulHi(x, b);
  b = 3326628274461080266ull - MulHi(x, b);
  b = 6653256548922161246ull - MulHi(x, b);
  return MulHi(x, b);
}

// 2^x in [1, 2), Q62, for x in [0, 1), Q64; exactly 1 for 0.
GEAR_HOST_DEVICE uint64_t Exp2Fraction(uint64_t x) {
  uint64_t b = 8947357ull;
  b = 109701852ull + MulHi(x, b);
  b = 2066648844ull + MulHi(x, b);
  b = 32514840606ull + MulHi(x, b);
  b = 469398239050ull + MulHi(x, b);
  b = 6094557713384ull + MulHi(x, b);
  b = 70340823270806ull + MulHi(x, b);
  b = 710362456341077ull + MulHi(x, b);
  b = 6149018368200791ull + MulHi(x, b);
  b = 44355791529051733ull + MulHi(x, b);
  b = 255967521894834213ull + MulHi(x, b);
  b = 1107849223398934274ull + MulHi(x, b);
  b = 3196577161300663916ull + MulHi(x, b);
  b = 4611686018427387904ull + MulHi(x, b);
  return b;
}

// log2(x), Q54; x > 0. Exact for powers of two.
GEAR_HOST_DEVICE int64_t Log2(uint64_t x) {
  const int top = HighestBit(x);
  const uint64_t behind = x << (63 - top) << 1;  // what follows the highest bit, Q64
  const uint64_t fraction = (Log2OnePlus(behind) + 128) >> (62 - kLogBits);
  return (int64_t{top} << kLogBits) + static_cast<int64_t>(fraction);
}

// log * factor, the factor in [0, 1] as Q62. Rounds towards zero, so that it is odd in the log.
GEAR_HOST_DEVICE int64_t Scale(int64_t log, uint64_t factor) {
  const uint64_t sign = static_cast<uint64_t>(log >> 63);
  const uint64_t magnitude = MulQ62((static_cast<uint64_t>(log) ^ sign) - sign, factor);
  return static_cast<int64_t>((magnitude ^ sign) - sign);
}

// significand / 2^62 * 2^exponent, the significand in [1, 2) as Q62.
struct Power {
  uint64_t significand;
  int exponent;
};

// 2^log.
GEAR_HOST_DEVICE Power Exp2(int64_t log) {
  // Shifting the whole part out leaves the fraction, also of a negative log.
  return {Exp2Fraction(static_cast<uint64_t>(log) << (64 - kLogBits)),
          static_cast<int>(log >> kLogBits)};
}

// Finite and at least 0; -0.0 is 0.
GEAR_HOST_DEVICE bool IsPriority(uint32_t bits) {
  return bits < 0x7F800000u || bits == 0x80000000u;
}

// The bits of a priority without the sign of -0.0: they are ordered as the priorities are.
GEAR_HOST_DEVICE uint32_t OrderOf(uint32_t bits) { return bits & 0x7FFFFFFFu; }

// priority^alpha; alpha in [0, 1] as Q62. `bits`: of a float32 that is finite and above 0.
GEAR_HOST_DEVICE Power PowerOfPriority(uint32_t bits, uint64_t alpha) {
  const uint32_t biased = bits >> 23, low = bits & 0x7FFFFFu;
  const uint64_t mantissa = biased != 0 ? (low | 0x800000u) : low;
  const int exponent = (biased != 0 ? static_cast<int>(biased) : 1) - 150;
  if (alpha == kOneQ62) {  // exact
    const int top = HighestBit(mantissa);
    return {mantissa << (62 - top), top + exponent};
  }
  return Exp2(Scale(Log2(mantissa) + exponent * (int64_t{1} << kLogBits), alpha));
}

struct Mass {
  uint64_t value;
  bool clamped;  // the power is above 2^40, or so small that it would round to 0
};

// round(priority^alpha * 2^24), halves up, clamped to [1, 2^40]; 0 for priority 0. `bits`: of a
// priority, see IsPriority.
GEAR_HOST_DEVICE Mass MassOfPriority(uint32_t bits, uint64_t alpha) {
  if (OrderOf(bits) == 0) return {0, false};
  const Power power = PowerOfPriority(bits, alpha);
  const int shift = 62 - kMassBits - power.exponent;
  if (shift > 63) return {1, true};
  constexpr int kLeastShift = 62 - kMostMassBits;
  if (shift < kLeastShift || (shift == kLeastShift && power.significand > kOneQ62))
    return {uint64_t{1} << kMostMassBits, true};
  return {((power.significand >> (shift - 1)) + 1) >> 1, false};
}

// The float32 nearest to a power, ties to even; the largest one beyond the range, 0 below the
// smallest normal one.
GEAR_HOST_DEVICE uint32_t FloatBits(Power power) {
  constexpr uint32_t kLargest = 0x7F7FFFFFu;
  constexpr int kDrop = 62 - 23;
  if (power.exponent < -126) return 0;
  if (power.exponent > 127) return kLargest;
  const uint64_t rest = power.significand & ((uint64_t{1} << kDrop) - 1);
  const uint64_t half = uint64_t{1} << (kDrop - 1);
  const auto kept = static_cast<uint32_t>(power.significand >> kDrop);  // with the leading one
  const uint32_t up = rest > half || (rest == half && (kept & 1) != 0) ? 1 : 0;
  // A mantissa of ones carries into the exponent, which is then right.
  return Min((static_cast<uint32_t>(power.exponent + 126) << 23) + kept + up, kLargest);
}

// The bits of (ratio / mass)^beta as float32; log_ratio = log2(ratio); mass > 0; beta in [0, 1] as
// Q62.
GEAR_HOST_DEVICE uint32_t ImportanceBits(int64_t log_ratio, uint64_t mass, uint64_t beta) {
  return FloatBits(Exp2(Scale(log_ratio - Log2(mass), beta)));
}

}  // namespace gear
