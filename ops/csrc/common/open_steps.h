// Open trajectories in the memory of one device: each environment owns a part of the rows, in which
// its trajectories lie one after the other, and every call adds a step to each.
// deepspeed_gear/ops/reference/ring_table.py defines it; ops/records.py has these records too.
#pragma once
#include "common/ring_layout.h"

namespace gear {

// The open trajectory of an environment.
struct OpenTrajectory {
  int64_t num_steps;  // 0: there is none
  int64_t id;
  int64_t next_row;  // row after it, counted from the environment's first row
  int64_t ended;     // 1: the latest step was the last one of an episode
};
static_assert(sizeof(OpenTrajectory) == 32, "an open trajectory is a row of 4 int64");

// A row of `placed`: a step that is added. Slot -1: none is.
struct PlacedStep {
  int64_t slot, row, num_steps, id, first_row;
  int64_t step;  // its number in the trajectory; 0: it begins one
};
static_assert(sizeof(PlacedStep) == 48, "a placed step is a row of 6 int64");

inline constexpr PlacedStep kNoStep{-1, 0, 0, -1, 0, 0};

// What one call of the environments brings. Null: no such column, or every environment.
struct EnvSteps {
  const bool* terminated;  // [num_envs]
  const bool* truncated;
  const bool* mask;  // which environments have a step
  bool next_step;    // the step after an end resets its environment, and is none
  int64_t num_envs;

  GEAR_HOST_DEVICE bool Given(int64_t env) const { return mask == nullptr || mask[env]; }
  GEAR_HOST_DEVICE bool Ends(int64_t env) const {
    return terminated[env] || (truncated != nullptr && truncated[env]);
  }
};

GEAR_HOST_DEVICE bool HasStep(const EnvSteps& steps, const OpenTrajectory& open, int64_t env) {
  return steps.Given(env) && !(steps.next_step && open.ended != 0);
}

// Whether an environment has an open trajectory that is still stored, in `slot`.
GEAR_HOST_DEVICE bool IsOpen(const OpenTrajectory& open, const Slot& slot) {
  return open.num_steps > 0 && slot.state == kCommitted && slot.id == open.id;
}

// Where the next trajectory of an environment begins: after the latest one, or at the first of its
// rows if the longest might not fit.
GEAR_HOST_DEVICE int64_t BeginInPart(const RingShape& shape, const OpenTrajectory& open,
                                     int64_t env, int64_t part) {
  const bool fits = open.next_row + shape.most_steps + shape.final_row <= part;
  return env * part + (fits ? open.next_row : 0);
}

// The id after the trajectory that a row belongs to; 0: no stored one.
GEAR_HOST_DEVICE int64_t AfterOwner(const Slot& owner, int64_t row) {
  const bool owns =
      owner.state == kCommitted && row >= owner.first_row && row < owner.first_row + owner.num_rows;
  return owns ? owner.id + 1 : 0;
}

// A run of steps.
struct StepRun {
  int64_t first, count;
};

// The steps that may become anchors, or be none any more, when a trajectory gets its `steps`-th
// step: all of them where anchors count from the end, else the last anchor if there is one more.
GEAR_HOST_DEVICE StepRun ChangedAnchors(const AnchorRule& rule, int64_t steps) {
  if (rule.from_end) return {0, steps};
  const int64_t anchors = NumAnchors(rule, steps);
  if (anchors == NumAnchors(rule, steps - 1)) return {0, 0};
  return {AnchorAt(rule, steps, anchors - 1), 1};
}

// Whether a step changes so.
GEAR_HOST_DEVICE bool AnchorChanges(const AnchorRule& rule, int64_t steps, int64_t step) {
  return IsAnchor(rule, steps, step) != (step < steps - 1 && IsAnchor(rule, steps - 1, step));
}

// The oldest id that slots suffice for. One more for each environment stays free, so that no slot
// is freed and used by the same call.
GEAR_HOST_DEVICE int64_t OldestInSlots(const RingShape& shape, int64_t next, int64_t num_envs) {
  return next - (shape.num_slots - num_envs);
}

}  // namespace gear
