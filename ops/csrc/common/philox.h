// Counter-based random words. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC'11.
#pragma once
#include "common/host_device.h"

namespace gear {

// Purpose of a random word: the last word of the counter, so that no two uses share a word.
enum Purpose : uint32_t {
  kForCoordinate = 0,
  kForAnchor = 1,
  kForPermutation = 2,
  kForSplit = 3,
  kForTransform = 4,
  kForRelabelling = 5,  // whether a sample gets another goal
  kForGoal = 6,         // the step that it is from
  kForEviction = 7      // which trajectory is evicted
};

struct Word128 {
  uint64_t high, low;
};

// Philox4x32-10 with key `seed` and counter (number, stream, purpose).
GEAR_HOST_DEVICE Word128 Philox(uint64_t seed, uint64_t number, uint32_t stream, uint32_t purpose) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = static_cast<uint32_t>(number), c1 = static_cast<uint32_t>(number >> 32);
  uint32_t c2 = stream, c3 = purpose;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {(uint64_t{c1} << 32) | c0, (uint64_t{c3} << 32) | c2};
}

// floor(word * total / 2^128): uniform over [0, total) with a relative error below 2^-64 for total
// < 2^64.
GEAR_HOST_DEVICE uint64_t Coordinate(Word128 word, uint64_t total) {
  const uint64_t low = word.high * total, carry = MulHi(word.low, total);
  return MulHi(word.high, total) + (low + carry < low ? 1 : 0);
}

}  // namespace gear
