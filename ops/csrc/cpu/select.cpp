// Draws, the tree of masses, and what a draw resolves to.
#include "common/permutation.h"
#include "common/tree.h"
#include "cpu/ops.h"

namespace gear::cpu {
namespace {

// Draws that go down the tree together, one level after another, so that their cache misses
// overlap.
constexpr int64_t kBlock = 64;
constexpr int kLineWords = 8;

void PrefetchNode(const uint64_t* children) {
  for (int i = 0; i < kFanOut; i += kLineWords) __builtin_prefetch(children + i);
}

}  // namespace

void Draw(uint64_t seed, uint32_t stream, int64_t first, uint64_t total, int64_t count,
          int64_t* coordinates) {
  for (int64_t i = 0; i < count; ++i)
    coordinates[i] = static_cast<int64_t>(
        Coordinate(Philox(seed, static_cast<uint64_t>(first + i), stream, kForCoordinate), total));
}

void Permute(uint64_t seed, uint32_t stream, int64_t epoch, int64_t first, uint64_t size,
             int64_t count, int64_t* coordinates) {
  const Permutation permutation = MakePermutation(seed, stream, static_cast<uint64_t>(epoch), size);
  for (int64_t i = 0; i < count; ++i)
    coordinates[i] =
        static_cast<int64_t>(gear::Permute(permutation, static_cast<uint64_t>(first + i)));
}

void TreeBuild(uint64_t* sums, int64_t num_items) {
  const TreeShape shape = ShapeOfTree(num_items);
  for (int level = 1; level < shape.levels; ++level) {
    const uint64_t* below = sums + shape.offset[level - 1];
    uint64_t* nodes = sums + shape.offset[level];
    const int64_t used = shape.width[level - 1] / kFanOut;
    for (int64_t node = 0; node < shape.width[level]; ++node) {
      uint64_t sum = 0;
      if (node < used)
        for (int child = 0; child < kFanOut; ++child) sum += below[node * kFanOut + child];
      nodes[node] = sum;
    }
  }
}

void TreeUpdate(uint64_t* sums, int64_t num_items, const int64_t* items, const int64_t* masses,
                int64_t count) {
  const TreeShape shape = ShapeOfTree(num_items);
  for (int64_t i = 0; i < count; ++i) {
    int64_t node = items[i];
    const uint64_t change =
        static_cast<uint64_t>(masses[i]) - sums[node];  // modulo 2^64, as the sums
    if (change == 0) continue;
    for (int level = 0; level < shape.levels; ++level) {
      sums[shape.offset[level] + node] += change;
      node >>= kFanOutBits;
    }
  }
}

void Resolve(const uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* coordinates,
             int64_t count, const AnchorRule& rule, int64_t unit, uint64_t seed, uint32_t stream,
             int64_t first, Resolution* resolutions) {
  const TreeShape shape = ShapeOfTree(num_slots);
  Hit hits[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = Min(kBlock, count - begin);
    for (int64_t i = 0; i < n; ++i) hits[i] = {0, static_cast<uint64_t>(coordinates[begin + i])};
    for (int level = shape.levels - 1; level >= 0; --level) {
      for (int64_t i = 0; i < n; ++i) {
        hits[i] = Descend(sums, shape, level, hits[i]);
        if (level > 0)
          PrefetchNode(sums + shape.offset[level - 1] + hits[i].item * kFanOut);
        else
          __builtin_prefetch(slots + hits[i].item);
      }
    }
    for (int64_t i = 0; i < n; ++i) {
      const Hit& hit = hits[i];
      const Slot& slot = slots[hit.item];
      const int64_t number = first + begin + i;
      const int64_t anchor = ChooseAnchor(rule, unit, slot.num_steps, hit.remainder, seed,
                                          static_cast<uint64_t>(number), stream);
      resolutions[begin + i] = {slot.id,
                                hit.item,
                                slot.generation,
                                slot.first_row,
                                slot.num_steps,
                                anchor,
                                static_cast<int64_t>(sums[hit.item]),
                                number};
    }
  }
}

}  // namespace gear::cpu
