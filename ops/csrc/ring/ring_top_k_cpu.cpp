// The items of highest priority of a ring, on the host.
#include "ring/ring_top_k.h"

#include <algorithm>
#include <vector>

#include "priorities/priorities.h"

namespace gear::cpu {
namespace {

// The `count` items, by falling priority and then in the order of ids; fewer if there are fewer.
std::vector<int64_t> Highest(const Ring& ring, int64_t num_items, int64_t oldest, int64_t count) {
  std::vector<int64_t> items(static_cast<size_t>(count));
  TopK(ring.priorities, ring.sums, num_items, count, items.data());
  items.erase(std::find(items.begin(), items.end(), -1), items.end());
  if (items.empty()) return items;
  // TopK takes equal ones by number: those of the least priority are taken again.
  const auto wanted = items.size();
  const float least = ring.priorities[items.back()];
  while (!items.empty() && ring.priorities[items.back()] == least) items.pop_back();
  for (int64_t k = 0; k < num_items && items.size() < wanted; ++k) {
    const int64_t item = (oldest + k) % num_items;
    if (ring.sums[item] > 0 && ring.priorities[item] == least) items.push_back(item);
  }
  const auto age = [&](int64_t item) { return item < oldest ? item + num_items : item; };
  std::sort(items.begin(), items.end(), [&](int64_t a, int64_t b) {
    const float of_a = ring.priorities[a], of_b = ring.priorities[b];
    return of_a != of_b ? of_a > of_b : age(a) < age(b);
  });
  return items;
}

}  // namespace

void RingTopK(const Ring& ring, const RingShape& shape, const RingRule& rule, const RingDraw& draw,
              int64_t count, bool counts, Resolution* resolutions, float* weights) {
  const int64_t num_items = ItemsOfRing(shape, rule);
  const int64_t oldest = OldestItem(ring.state, ring.slots, shape, rule);
  const std::vector<int64_t> items = Highest(ring, num_items, oldest, count);
  if (static_cast<int64_t>(items.size()) < count) {
    FillEmpty(ring, draw, count, resolutions, weights);
    Advance(ring.state, 0, count);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    ResolveItem(ring, shape, rule, draw, {items[static_cast<size_t>(i)], 0},
                NumberOf(draw, ring.state, i), &resolutions[i]);
    if (counts) TimesSampled(ring.slots[resolutions[i].slot]) += 1;
  }
  if (weights != nullptr) std::fill(weights, weights + count, 1.0f);
  Advance(ring.state, RingTotal(ring.sums, num_items), count);
}

}  // namespace gear::cpu
