// A tree of integer sums. Level 0 holds the masses of the items; a node of level l+1 is the sum of
// kFanOut nodes of level l; the top level has at most kFanOut nodes. Every level is padded with
// zeros to a multiple of kFanOut.
#pragma once
#include "common/host_device.h"

namespace gear {

inline constexpr int kFanOutBits = 5, kFanOut = 1 << kFanOutBits, kMaxLevels = 12;

struct TreeShape {
  int64_t offset[kMaxLevels];  // of each level, in words
  int64_t width[kMaxLevels];   // of each level, padded
  int levels;
  int64_t words;  // of the whole tree
};

GEAR_HOST_DEVICE TreeShape ShapeOfTree(int64_t num_items) {
  TreeShape shape{};
  int64_t nodes = num_items < 1 ? 1 : num_items;
  do {
    const int64_t width = (nodes + kFanOut - 1) / kFanOut * kFanOut;
    shape.offset[shape.levels] = shape.words;
    shape.width[shape.levels++] = width;
    shape.words += width;
    nodes = width / kFanOut;
  } while (shape.width[shape.levels - 1] > kFanOut);
  return shape;
}

struct Hit {
  int64_t item;
  uint64_t remainder;  // in [0, mass of item)
};

// A descent: from the root {0, coordinate}, with coordinate in [0, total), down to level 0 it ends
// at the item that the coordinate hits. Each level takes two steps of few additions: from a node to
// the part of its children that holds the remainder, and from the part to the child.
//
// The sums before each part and child are in arrays, which a count of comparisons indexes:
// compilers make branches of a choice between variables, and each one that is predicted wrongly
// ends the overlap of cache misses between draws. This takes half the time.
inline constexpr int kNodeParts = 4, kPartSize = kFanOut / kNodeParts;

// From a node of the level above to the part of its children, item * kNodeParts + part.
GEAR_HOST_DEVICE void EnterPart(const uint64_t* level, Hit* hit) {
  const uint64_t* children = level + hit->item * kFanOut;
  uint64_t before[kNodeParts] = {0};
  for (int part = 1; part < kNodeParts; ++part) {
    uint64_t sum = 0;
    for (int i = 0; i < kPartSize; ++i) sum += children[(part - 1) * kPartSize + i];
    before[part] = before[part - 1] + sum;
  }
  int part = 0;
  for (int i = 1; i < kNodeParts; ++i) part += hit->remainder >= before[i];
  *hit = {hit->item * kNodeParts + part, hit->remainder - before[part]};
}

// From a part to the child, part * kPartSize + child.
GEAR_HOST_DEVICE void EnterChild(const uint64_t* level, Hit* hit) {
  const uint64_t* children = level + hit->item * kPartSize;
  uint64_t before[kPartSize] = {0};
  for (int i = 1; i < kPartSize; ++i) before[i] = before[i - 1] + children[i - 1];
  int child = 0;
  for (int i = 1; i < kPartSize; ++i) child += hit->remainder >= before[i];
  *hit = {hit->item * kPartSize + child, hit->remainder - before[child]};
}

// Both steps, from a node of level + 1.
GEAR_HOST_DEVICE Hit Descend(const uint64_t* sums, const TreeShape& shape, int level, Hit hit) {
  EnterPart(sums + shape.offset[level], &hit);
  EnterChild(sums + shape.offset[level], &hit);
  return hit;
}

// Sets the mass of an item and repairs the nodes above it.
inline void SetMass(uint64_t* sums, const TreeShape& shape, int64_t item, uint64_t mass) {
  const uint64_t change = mass - sums[item];  // modulo 2^64, as the sums
  if (change == 0) return;
  for (int level = 0; level < shape.levels; ++level) {
    sums[shape.offset[level] + item] += change;
    item >>= kFanOutBits;
  }
}

// The tree of minima: a node is the least non-zero of its children, 0 if there is none. It has the
// levels >= 1 of the tree of sums and shares its leaves. Where a level begins in it:
GEAR_HOST_DEVICE int64_t MinimaOffset(const TreeShape& shape, int level) {
  return shape.offset[level] - shape.width[0];
}

// A level of the minima; level 0 are the leaves of the sums.
template <typename Words>
GEAR_HOST_DEVICE Words MinimaLevel(Words sums, Words minima, const TreeShape& shape, int level) {
  return level == 0 ? sums : minima + MinimaOffset(shape, level);
}

// Whether a is the lesser where zero means "no mass": 0 - 1 wraps round to the greatest.
GEAR_HOST_DEVICE bool IsLess(uint64_t a, uint64_t b) { return a - 1 < b - 1; }

inline uint64_t LeastNonZero(const uint64_t* children) {
  uint64_t least = ~uint64_t{0};  // of the values less 1, as in IsLess
  for (int child = 0; child < kFanOut; ++child) least = Min(least, children[child] - 1);
  return least + 1;
}

// The sum of all masses, and the least one.
inline uint64_t TotalOfTree(const uint64_t* sums, const TreeShape& shape) {
  const uint64_t* top = sums + shape.offset[shape.levels - 1];
  uint64_t total = 0;
  for (int i = 0; i < kFanOut; ++i) total += top[i];
  return total;
}
inline uint64_t LeastOfTree(const uint64_t* sums, const uint64_t* minima, const TreeShape& shape) {
  return LeastNonZero(MinimaLevel(sums, minima, shape, shape.levels - 1));
}

}  // namespace gear
