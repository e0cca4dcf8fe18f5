// Descents of many draws through a tree of sums, level by level, so that their cache misses
// overlap.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "common/prefetch.h"
#include "common/tree.h"

namespace gear::cpu {

#if defined(__AVX2__)

inline __m256i LoadFour(const uint64_t* words) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
}

inline void StoreFour(uint64_t* words, __m256i values) {
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), values);
}

// The sum of each part of a node's children.
inline __m256i SumsOfParts(const uint64_t* children) {
  const auto halves = [&](int part) {  // their sum, lane by lane
    const uint64_t* first = children + part * kPartSize;
    return _mm256_add_epi64(LoadFour(first), LoadFour(first + kPartSize / 2));
  };
  const auto pairs = [](__m256i a, __m256i b) {  // [a0 + a1, b0 + b1, a2 + a3, b2 + b3]
    return _mm256_add_epi64(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  };
  const __m256i first = pairs(halves(0), halves(1)), second = pairs(halves(2), halves(3));
  return _mm256_add_epi64(_mm256_permute2x128_si256(first, second, 0x20),
                          _mm256_permute2x128_si256(first, second, 0x31));
}

// Of [a, b, c, d]: [a, a + b, a + b + c, a + b + c + d].
inline __m256i RunningSums(__m256i x) {
  x = _mm256_add_epi64(x, _mm256_slli_si256(x, 8));           // [a, a + b, c, c + d]
  const __m256i of_half = _mm256_permute4x64_epi64(x, 0x50);  // [a, a, a + b, a + b]
  return _mm256_add_epi64(x, _mm256_blend_epi32(_mm256_setzero_si256(), of_half, 0xF0));
}

// A bit for each sum that is above the remainder. Sums are below 2^62, so that they are compared as
// signed numbers.
inline unsigned Above(__m256i sums, uint64_t remainder) {
  const __m256i least = _mm256_set1_epi64x(static_cast<int64_t>(remainder));
  const __m256i above = _mm256_cmpgt_epi64(sums, least);
  return static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(above)));
}

// EnterPart and EnterChild of common/tree.h in vector registers: two thirds of their time. The last
// part, and the last child, take what no other holds.
inline void StepToPart(const uint64_t* level, Hit* hit) {
  alignas(32) uint64_t before[kNodeParts];
  const __m256i parts = SumsOfParts(level + hit->item * kFanOut);
  const __m256i ends = RunningSums(parts);
  StoreFour(before, _mm256_sub_epi64(ends, parts));
  const int part = __builtin_ctz(Above(ends, hit->remainder) | 1u << (kNodeParts - 1));
  *hit = {hit->item * kNodeParts + part, hit->remainder - before[part]};
}

inline void StepToChild(const uint64_t* level, Hit* hit) {
  alignas(32) uint64_t before[kPartSize];
  const uint64_t* children = level + hit->item * kPartSize;
  const __m256i low = LoadFour(children), high = LoadFour(children + 4);
  const __m256i low_ends = RunningSums(low);
  const __m256i of_low = _mm256_permute4x64_epi64(low_ends, 0xFF);  // its last one, in all lanes
  const __m256i high_ends = _mm256_add_epi64(RunningSums(high), of_low);
  StoreFour(before, _mm256_sub_epi64(low_ends, low));
  StoreFour(before + 4, _mm256_sub_epi64(high_ends, high));
  const unsigned above = Above(low_ends, hit->remainder) | Above(high_ends, hit->remainder) << 4;
  const int child = __builtin_ctz(above | 1u << (kPartSize - 1));
  *hit = {hit->item * kPartSize + child, hit->remainder - before[child]};
}

#else

inline void StepToPart(const uint64_t* level, Hit* hit) { EnterPart(level, hit); }
inline void StepToChild(const uint64_t* level, Hit* hit) { EnterChild(level, hit); }

#endif

// Finds the items that up to kBlock coordinates hit; `prefetch` starts the load of what follows an
// item.
//
// All draws take one step before the first takes the next one. The instructions of a step wait for
// each other, and a processor looks only some hundred ahead: with both steps of a level in one
// iteration it works at half as many draws at once, and takes twice the time.
template <typename Prefetch>
void DescendTogether(const uint64_t* sums, const TreeShape& shape, const int64_t* coordinates,
                     int64_t count, Hit* hits, const Prefetch& prefetch) {
  for (int64_t i = 0; i < count; ++i) hits[i] = {0, static_cast<uint64_t>(coordinates[i])};
  for (int level = shape.levels - 1; level >= 0; --level) {
    const uint64_t* nodes = sums + shape.offset[level];
    for (int64_t i = 0; i < count; ++i) StepToPart(nodes, &hits[i]);
    for (int64_t i = 0; i < count; ++i) {
      StepToChild(nodes, &hits[i]);
      if (level > 0)
        PrefetchNode(sums + shape.offset[level - 1] + hits[i].item * kFanOut);
      else
        prefetch(hits[i].item);
    }
  }
}

}  // namespace gear::cpu
