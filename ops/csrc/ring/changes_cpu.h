// Changes of the items of a ring on the host.
#pragma once
#include <algorithm>
#include <vector>

#include "priorities/priorities.h"
#include "ring/ring.h"
#include "select/select.h"

namespace gear::cpu {

// Items whose masses change, applied together; the last of equal ones wins.
class Changes {
 public:
  Changes(const Ring& ring, int64_t num_items) : ring_(ring), num_items_(num_items) {}

  void Set(int64_t item, uint64_t mass, float priority) {
    items_.push_back(item);
    masses_.push_back(static_cast<int64_t>(mass));
    if (ring_.priorities != nullptr) ring_.priorities[item] = priority;
  }

  void Apply() {
    const auto count = static_cast<int64_t>(items_.size());
    std::vector<int64_t> distinct = items_;
    std::sort(distinct.begin(), distinct.end());
    distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
    const auto drawable = [&] {
      return std::count_if(distinct.begin(), distinct.end(),
                           [&](int64_t item) { return ring_.sums[item] > 0; });
    };
    const int64_t before = drawable();
    TreeUpdate(ring_.sums, num_items_, items_.data(), masses_.data(), count);
    if (ring_.minima != nullptr)
      MinimaUpdate(ring_.sums, num_items_, items_.data(), count, ring_.minima);
    ring_.state[kRingCounts + kDrawable] += drawable() - before;
  }

 private:
  const Ring& ring_;
  int64_t num_items_;
  std::vector<int64_t> items_, masses_;
};

// Evicts a trajectory: its items lose their masses.
inline void Clear(const Ring& ring, const RingShape& shape, const RingRule& rule, int64_t id,
                  Changes* changes) {
  Slot& slot = ring.slots[id % shape.num_slots];
  if (!rule.by_row) changes->Set(id % shape.num_slots, 0, 0);
  for (int64_t step = 0; rule.by_row && step < slot.num_steps; ++step)
    changes->Set(slot.first_row + step, 0, 0);
  ring.state[kRingSteps] -= slot.num_steps;
  slot.state = 0;
}

}  // namespace gear::cpu
