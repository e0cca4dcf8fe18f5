// Draws that are limited by trajectory, on the host.
#include "ring/limited.h"

#include "priorities/priorities.h"
#include "ring/changes_cpu.h"
#include "select/select.h"

namespace gear::cpu {
namespace {

// Whether `count` draws are left.
bool HasDraws(const Ring& ring, const RingShape& shape, int64_t count, int64_t most) {
  int64_t left = 0;
  for (int64_t id = ring.state[kRingTail]; id < ring.state[kRingNext] && left < count; ++id) {
    const int64_t slot = id % shape.num_slots;
    if (ring.sums[slot] > 0) left += most - TimesSampled(ring.slots[slot]);
  }
  return left >= count;
}

}  // namespace

void RingSelectLimited(const Ring& ring, const RingShape& shape, const RingRule& rule,
                       const RingDraw& draw, int64_t count, int64_t most, Resolution* resolutions,
                       float* weights) {
  const int64_t num_items = ItemsOfRing(shape, rule);
  uint64_t total = RingTotal(ring.sums, num_items);
  const uint64_t first_total = total;
  if (total == 0 || !HasDraws(ring, shape, count, most)) {
    FillEmpty(ring, draw, count, resolutions, weights);
    Advance(ring.state, 0, count);
    return;
  }
  const TreeShape tree = ShapeOfTree(num_items);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = NumberOf(draw, ring.state, i);
    const Word128 word =
        Philox(draw.seed, static_cast<uint64_t>(number), draw.stream, kForCoordinate);
    Hit hit{0, Coordinate(word, total)};
    for (int level = tree.levels - 1; level >= 0; --level)
      hit = Descend(ring.sums, tree, level, hit);
    ResolveItem(ring, shape, rule, draw, hit, number, &resolutions[i]);
    int64_t& times = TimesSampled(ring.slots[hit.item]);
    times += 1;
    if (times < most || i + 1 == count) continue;  // weights are of the masses at the last draw
    Changes used_up(ring, num_items);
    used_up.Set(hit.item, 0, 0);
    used_up.Apply();
    total -= static_cast<uint64_t>(resolutions[i].mass);
  }
  if (weights != nullptr) Weigh(ring, shape, rule, draw, first_total, count, resolutions, weights);
  Advance(ring.state, first_total, count);
}

}  // namespace gear::cpu
