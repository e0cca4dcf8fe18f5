// Tests whether writers may add, by samples per insert or by the quota of this node.
#include "store/rate_limiter.h"

#include <algorithm>
#include <cmath>

#include "select/stream.h"

namespace gear::cpu {

bool MayInsert(const Store& store, int64_t num_steps) {
  const Rate& rate = store.rate;
  if (!rate.limited) return true;
  int64_t* control = store.control;
  const bool by_step = rate.unit == kSteps;
  const int64_t added = by_step ? num_steps : 1;
  // Of groups: each trajectory that is being written may complete one.
  const int64_t pending = by_step ? control[kStepsPending] : control[kPending];
  int64_t size = by_step ? control[kStepsCommitted] : control[kNumCommitted];
  int64_t inserted = by_step ? control[kStepsInserted] : control[kInserted];
  if (rate.unit == kGroups) {
    size = store.group_counts[kGroupsHeld];
    inserted = store.group_counts[kGroupsInserted];
  }
  inserted += pending;
  if (store.id_count > 1 && std::isfinite(rate.most)) {
    if (inserted + added <= control[kQuota]) return true;
    control[kWanted] = std::max(control[kWanted], added);
    return false;
  }
  if (size + pending + added <= rate.min_size) return true;
  const double ahead = static_cast<double>(inserted + added) * rate.samples_per_insert;
  const int64_t sampled = store.position == nullptr ? 0 : store.position[kSamples];
  return ahead - static_cast<double>(sampled) <= rate.most;
}

}  // namespace gear::cpu
