// Where a batch lies in the epochs over a table, and which items its samples take, by replica.
#pragma once
#include "common/permutation.h"
#include "ring/epoch.h"

namespace gear::cpu {

// Where a batch lies in the epochs. Of shared items all numbers count the samples of all replicas.
struct EpochPlan {
  int64_t epoch, first, size;  // of its first sample: epoch, its first sample number and its items
  int64_t samples;             // number of the batch's first sample
  int64_t span;                // sample numbers that the batch takes
  bool has_samples;
  bool cuts;  // an epoch ends early, because the table has changed
};

// The plan of the next batch, from the state and the sum of all masses.
GEAR_HOST_DEVICE EpochPlan PlanEpoch(const EpochDraw& draw, const int64_t* state, uint64_t total,
                                     int64_t count) {
  EpochPlan plan{state[kRingEpoch],
                 state[kRingEpochFirst],
                 state[kRingEpochSize],
                 state[kRingSamples],
                 draw.is_shared ? count * draw.base.stride : count,
                 true,
                 false};
  const int64_t left = plan.size == 0 ? 0 : plan.first + plan.size - plan.samples;
  const bool fills = left >= (draw.drops_tail ? plan.span : 1);
  const bool is_same =
      plan.size == static_cast<int64_t>(total) && state[kRingEpochNext] == state[kRingNext] &&
      state[kRingEpochTail] == state[kRingTail] && state[kRingEpochSteps] == state[kRingSteps];
  if (fills && is_same) return plan;
  const auto items = static_cast<int64_t>(total);
  plan.has_samples = items >= (draw.drops_tail ? plan.span : 1);
  if (!plan.has_samples) return plan;
  plan.cuts = fills;
  if (!fills && left > 0) plan.samples += left;  // the tail that is left out has numbers, too
  plan.epoch += plan.size > 0 ? 1 : 0;
  plan.first = plan.samples;
  plan.size = items;
  return plan;
}

// A sample's number, its epoch, and its index in it.
struct EpochSample {
  int64_t number, epoch, index;
};

GEAR_HOST_DEVICE EpochSample SampleOfEpoch(const EpochDraw& draw, const EpochPlan& plan,
                                           int64_t i) {
  const RingDraw& base = draw.base;
  const int64_t every = i * base.stride + base.offset;
  const int64_t at = plan.samples - plan.first + (draw.is_shared ? every : i);
  const int64_t turns = !plan.has_samples || at < plan.size ? 0 : at / plan.size;
  return {draw.is_shared ? plan.samples + every : plan.samples * base.stride + every,
          plan.epoch + turns, at - turns * plan.size};
}

// The item that a sample of an epoch of `size` items takes, as a coordinate in [0, size).
GEAR_HOST_DEVICE uint64_t CoordinateOfEpoch(const EpochDraw& draw, const EpochSample& sample,
                                            int64_t size) {
  const RingDraw& base = draw.base;
  // Replicas with items of their own never share an order: epoch e of replica r has the key
  // e * replicas + r.
  const int64_t key = draw.is_shared ? sample.epoch : sample.epoch * base.stride + base.offset;
  const Permutation order = MakePermutation(base.seed, base.stream, static_cast<uint64_t>(key),
                                            static_cast<uint64_t>(size));
  return Permute(order, static_cast<uint64_t>(sample.index));
}

// Stored trajectories that all have the same mass, so that no tree is needed to find an item.
struct EqualMasses {
  uint64_t mass;  // of each trajectory; 0: they may differ
  int64_t low;    // trajectories in the first slots, where the stored ones go on round the end
  int64_t gap;    // empty slots between these and the others
};

GEAR_HOST_DEVICE EqualMasses EqualMassesOf(const Ring& ring, uint64_t total) {
  const RingShape& shape = ring.shape;
  const int64_t tail = ring.state[kRingTail], stored = ring.state[kRingNext] - tail;
  // No trajectory has more than the longest.
  const auto most =
      static_cast<uint64_t>(MassOfSlot(ring.rule.anchors, ring.rule.unit, shape.most_steps));
  const auto count = static_cast<uint64_t>(stored);
  if (most == 0 || MulHi(most, count) != 0 || most * count != total) return {0, 0, 0};
  const int64_t first = tail % shape.num_slots;
  const int64_t low = Max(first + stored - shape.num_slots, int64_t{0});
  return {most, low, first - low};
}

// The item of a coordinate. Where the slots 3, 4 and 0 of 5 hold trajectories of 2 anchors each,
// the coordinates [0, 2, 5] hit the slots [0, 3, 4] with the remainders [0, 0, 1].
GEAR_HOST_DEVICE Hit HitOf(const EqualMasses& equal, uint64_t coordinate) {
  const auto place = static_cast<int64_t>(coordinate / equal.mass);
  return {place < equal.low ? place : place + equal.gap, coordinate % equal.mass};
}

// The state after the batch. By one thread.
GEAR_HOST_DEVICE void AdvanceEpoch(int64_t* state, const EpochPlan& plan, uint64_t total) {
  if (plan.has_samples) {
    const int64_t last = plan.samples - plan.first + plan.span - 1;
    const int64_t turns = last < plan.size ? 0 : last / plan.size;
    state[kRingSamples] = plan.samples;
    state[kRingEpoch] = plan.epoch + turns;
    state[kRingEpochFirst] = plan.first + turns * plan.size;
    state[kRingEpochSize] = plan.size;
    state[kRingEpochNext] = state[kRingNext];
    state[kRingEpochTail] = state[kRingTail];
    state[kRingEpochSteps] = state[kRingSteps];
    state[kRingEpochsCut] += plan.cuts ? 1 : 0;
  }
  Advance(state, plan.has_samples ? total : 0, plan.span);
}

}  // namespace gear::cpu
