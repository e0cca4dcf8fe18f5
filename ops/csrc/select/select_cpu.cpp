// Random draws, the sum tree of masses, the resolution of draws, and hindsight goals, on the host.
#include "common/permutation.h"
#include "common/prefetch.h"
#include "common/tree.h"
#include "select/select.h"
#include "select/tree_descent.h"

namespace gear::cpu {
void Draw(uint64_t seed, uint32_t stream, int64_t first, uint64_t total, int64_t count,
          int64_t* coordinates) {
  Word128 words[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = Min(kBlock, count - begin);
    // A loop of its own, so that it runs in vector registers: half the time.
    for (int64_t i = 0; i < n; ++i)
      words[i] = Philox(seed, static_cast<uint64_t>(first + begin + i), stream, kForCoordinate);
    for (int64_t i = 0; i < n; ++i)
      coordinates[begin + i] = static_cast<int64_t>(Coordinate(words[i], total));
  }
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
  for (int64_t i = 0; i < count; ++i)
    SetMass(sums, shape, items[i], static_cast<uint64_t>(masses[i]));
}

void SlotMasses(uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* log,
                int64_t log_size, int64_t first, int64_t last, const AnchorRule& rule,
                int64_t unit) {
  const TreeShape shape = ShapeOfTree(num_slots);
  for (int64_t i = first; i < last; ++i) {
    const int64_t item = log[i % log_size];
    const Slot& slot = slots[item];
    const int64_t mass = slot.state == kCommitted ? MassOfSlot(rule, unit, slot.num_steps) : 0;
    SetMass(sums, shape, item, static_cast<uint64_t>(mass));
  }
}

void Resolve(const uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* coordinates,
             int64_t count, const AnchorRule& rule, int64_t unit, uint64_t seed, uint32_t stream,
             int64_t first, Resolution* resolutions) {
  const TreeShape shape = ShapeOfTree(num_slots);
  Hit hits[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = Min(kBlock, count - begin);
    DescendTogether(sums, shape, coordinates + begin, n, hits,
                    [&](int64_t item) { __builtin_prefetch(slots + item); });
    for (int64_t i = 0; i < n; ++i) {
      const Hit& hit = hits[i];
      const Slot& slot = slots[hit.item];
      const int64_t number = first + begin + i;
      const int64_t anchor = ChooseAnchor(rule, unit, slot.num_steps, hit.remainder, seed,
                                          static_cast<uint64_t>(number), stream);
      resolutions[begin + i] = ResolutionOf(slot, hit.item, anchor, sums[hit.item], number);
    }
  }
}

int64_t ResolveRows(const uint64_t* sums, const Slot* slots, int64_t num_slots,
                    const int32_t* row_slots, int64_t num_rows, const int64_t* coordinates,
                    int64_t count, int64_t first, Resolution* resolutions) {
  const TreeShape shape = ShapeOfTree(num_rows);
  Hit hits[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = Min(kBlock, count - begin);
    DescendTogether(sums, shape, coordinates + begin, n, hits,
                    [&](int64_t row) { __builtin_prefetch(row_slots + row); });
    for (int64_t i = 0; i < n; ++i) Prefetch(slots, row_slots[hits[i].item]);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = hits[i].item;
      const bool good = ResolveRow(slots, num_slots, row_slots[row], row, sums[row],
                                   first + begin + i, &resolutions[begin + i]);
      if (!good) return begin + i;
    }
  }
  return count;
}

void DrawGoals(const Resolution* resolutions, int64_t count, uint64_t seed, uint32_t stream,
               int64_t strategy, uint64_t fraction, int64_t final_row, int64_t* goal_step) {
  for (int64_t i = 0; i < count; ++i) {
    const Resolution& r = resolutions[i];
    const auto number = static_cast<uint64_t>(r.sample_number);
    const int64_t rows = r.num_steps + final_row;
    // The first row that may be drawn.
    const int64_t first = strategy == kFuture ? r.anchor + 1 : strategy == kFinal ? rows - 1 : 0;
    const bool is_chosen = Philox(seed, number, stream, kForRelabelling).high >> 2 < fraction;
    goal_step[i] = -1;
    if (!is_chosen || first >= rows) continue;
    const Word128 word = Philox(seed, number, stream, kForGoal);
    goal_step[i] = first + static_cast<int64_t>(Coordinate(word, uint64_t(rows - first)));
  }
}

}  // namespace gear::cpu
