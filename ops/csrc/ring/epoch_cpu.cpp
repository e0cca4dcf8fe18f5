// Epochs over the table in the memory of one device, on the host.
#include "ring/epoch_plan.h"

namespace gear::cpu {

void RingEpoch(const Ring& ring, const EpochDraw& draw, int64_t count, Resolution* resolutions,
               int64_t* epochs) {
  if (count == 0) return;
  const TreeShape tree = ShapeOfTree(ring.NumItems());
  const uint64_t total = TotalOfTree(ring.sums, tree);
  const EpochPlan plan = PlanEpoch(draw, ring.state, total, count);
  const EqualMasses equal = EqualMassesOf(ring, total);
  for (int64_t i = 0; i < count; ++i) {
    const EpochSample sample = SampleOfEpoch(draw, plan, i);
    epochs[i] = sample.epoch;
    resolutions[i] = NoSample(sample.number);
    if (!plan.has_samples) continue;
    const uint64_t coordinate = CoordinateOfEpoch(draw, sample, plan.size);
    Hit hit{0, coordinate};
    if (equal.mass > 0) {
      hit = HitOf(equal, coordinate);
    } else {
      for (int level = tree.levels - 1; level >= 0; --level)
        hit = Descend(ring.sums, tree, level, hit);
    }
    ResolveItem(ring, draw.base, hit, sample.number, &resolutions[i]);
  }
  AdvanceEpoch(ring.state, plan, total);
}

}  // namespace gear::cpu
