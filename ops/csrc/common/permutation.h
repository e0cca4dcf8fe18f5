// A keyed permutation of [0, size) without an array: a Feistel network over the next power of two,
// walked along its cycles until it lands inside (Black and Rogaway, "Ciphers with arbitrary finite
// domains", CT-RSA 2002).
#pragma once
#include "common/philox.h"

namespace gear {

inline constexpr int kFeistelRounds = 8;
// Smaller networks do not mix in 8 rounds: with 3 bits, one place was 2% likelier than another.
inline constexpr int kLeastBits = 8;

struct Permutation {
  uint64_t size;
  int left_bits, right_bits;  // together the bits of size - 1, at least kLeastBits
  uint64_t keys[kFeistelRounds];
};

// The permutation of one epoch of a stream.
GEAR_HOST_DEVICE Permutation MakePermutation(uint64_t seed, uint32_t stream, uint64_t epoch,
                                             uint64_t size) {
  Permutation p{};
  p.size = size;
  int bits = kLeastBits;
  while (bits < 64 && ((size - 1) >> bits) != 0) ++bits;
  p.left_bits = bits / 2;
  p.right_bits = bits - p.left_bits;
  for (int i = 0; i < kFeistelRounds / 2; ++i) {
    const Word128 word =
        Philox(seed, epoch, stream, kForPermutation + (static_cast<uint32_t>(i + 1) << 8));
    p.keys[2 * i] = word.high;
    p.keys[2 * i + 1] = word.low;
  }
  return p;
}

// SplitMix64's finalizer. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number
// generators", OOPSLA 2014.
GEAR_HOST_DEVICE uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// The image of `index` in [0, size). Cost: 2^bits / size passes of the network on average: fewer
// than 2, for tiny sizes up to 256.
GEAR_HOST_DEVICE uint64_t Permute(const Permutation& p, uint64_t index) {
  const uint64_t left_mask = (uint64_t{1} << p.left_bits) - 1,
                 right_mask = (uint64_t{1} << p.right_bits) - 1;
  do {
    uint64_t left = index >> p.right_bits, right = index & right_mask;
    for (int i = 0; i < kFeistelRounds; i += 2) {
      left ^= Mix(right + p.keys[i]) & left_mask;
      right ^= Mix(left + p.keys[i + 1]) & right_mask;
    }
    index = (left << p.right_bits) | right;
  } while (index >= p.size);
  return index;
}

}  // namespace gear
