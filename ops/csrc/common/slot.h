// Slots, resolutions, priority updates and reports: records that layers pass to each other as rows
// of int64 tensors; anchor rules, and how a draw is resolved to a step of a trajectory.
#pragma once
#include "common/philox.h"

namespace gear {

// A row of the slot table: state, id and extent of a trajectory.
struct Slot {
  int64_t state, generation, id;
  int64_t first_row, num_steps, num_rows;
  int64_t owner;  // the process that has reserved it (on a device: see TimesSampled of ring.h)
  int64_t born;   // the global batch that was selected next when it was committed
};
static_assert(sizeof(Slot) == 64, "a slot is a row of 8 int64");

inline constexpr int64_t kCommitted = 2;  // the state of a slot whose trajectory can be drawn

// The record that a draw resolves to; a row of the resolutions of a selection.
struct Resolution {
  int64_t id, slot, generation;
  int64_t first_row, num_steps, anchor;
  int64_t mass, sample_number;
};
static_assert(sizeof(Resolution) == 64, "a resolution is a row of 8 int64");

// The record of a sample of a slot's trajectory.
GEAR_HOST_DEVICE Resolution ResolutionOf(const Slot& slot, int64_t slot_index, int64_t anchor,
                                         uint64_t mass, int64_t number) {
  return {slot.id,
          slot_index,
          slot.generation,
          slot.first_row,
          slot.num_steps,
          anchor,
          static_cast<int64_t>(mass),
          number};
}

// The record of a draw from a table without masses: no sample. Its gathered rows are all padding.
GEAR_HOST_DEVICE Resolution NoSample(int64_t number) { return {-1, -1, 0, 0, 0, 0, 0, number}; }

GEAR_HOST_DEVICE bool IsNoSample(const Resolution& r) {
  return r.num_steps == 0 && r.id == -1 && r.slot == -1 &&
         (r.generation | r.first_row | r.anchor | r.mass) == 0;
}

// Rows and slots of a table on a device, whose numbers are stored in 32 bits.
inline constexpr int64_t kMostIndices = 2147483646;  // 2^31 - 2

// Of trajectories, offsets and lengths, so that no sum of them overflows.
inline constexpr int64_t kMostSteps = int64_t{1} << 40;

GEAR_HOST_DEVICE bool IsAnchored(int64_t num_steps, int64_t anchor) {
  return num_steps >= 1 && num_steps <= kMostSteps && anchor >= 0 && anchor < num_steps;
}

GEAR_HOST_DEVICE bool IsAnchored(const Resolution& r) { return IsAnchored(r.num_steps, r.anchor); }

// The new priority of a trajectory, or of one of its steps.
struct PriorityUpdate {
  int64_t slot, generation, anchor;
  uint64_t priority;  // float32 bits in the low half; the high half is ignored
};
static_assert(sizeof(PriorityUpdate) == 32, "an update is a row of 4 int64");

// Counts of updates by effect.
enum UpdateCount {
  kApplied = 0,          // += updates that were applied
  kStale = 1,            // += updates of evicted trajectories, and of steps that are no anchors
  kClamped = 2,          // += masses that were clamped
  kHighestPriority = 3,  // float32 bits of the highest priority so far
  kDrawable = 4,         // += items that got a mass, less those that lost it
  kNumUpdateCounts = 5
};

// A row of a rank's log of reports: an update, the global batch it belongs to, its sample number.
struct Report {
  PriorityUpdate update;
  int64_t batch, number;
};
static_assert(sizeof(Report) == 48, "a report is a row of 6 int64");

// The order in which reports are applied; reports of equal order keep their order.
GEAR_HOST_DEVICE bool Precedes(const Report& a, const Report& b) {
  return a.batch != b.batch ? a.batch < b.batch : a.number < b.number;
}

// The anchors that a trajectory admits: an arithmetic progression of steps, from the front or from
// the end.
struct AnchorRule {
  int64_t first;     // the first admissible step (distance from the last step when from_end)
  int64_t trim;      // steps at the other side that are never anchors
  int64_t stride;    // every stride-th step
  int64_t most;      // at most this many
  int64_t from_end;  // count from the last step backwards
};

GEAR_HOST_DEVICE int64_t NumAnchors(const AnchorRule& rule, int64_t num_steps) {
  const int64_t room = num_steps - rule.first - rule.trim;
  return room <= 0 ? 0 : Min((room + rule.stride - 1) / rule.stride, rule.most);
}

GEAR_HOST_DEVICE int64_t AnchorAt(const AnchorRule& rule, int64_t num_steps, int64_t index) {
  const int64_t distance = rule.first + index * rule.stride;
  return rule.from_end ? num_steps - 1 - distance : distance;
}

// Whether a step of a trajectory is an anchor.
GEAR_HOST_DEVICE bool IsAnchor(const AnchorRule& rule, int64_t num_steps, int64_t step) {
  const int64_t distance = (rule.from_end ? num_steps - 1 - step : step) - rule.first;
  if (distance < 0 || distance >= num_steps - rule.first - rule.trim) return false;
  if (rule.stride == 1) return distance < rule.most;  // most rules: without a division
  return distance % rule.stride == 0 && distance / rule.stride < rule.most;
}

// The unit of an item of a tree over slots: a trajectory whose anchor is a second draw, or one of
// its anchors. Of masses only: a trajectory by its length.
enum Unit : int64_t { kTrajectory = 0, kStep = 1, kByLength = 2 };

// Whether an update applies: its trajectory is still stored and, where items are steps, its step is
// an anchor of the trajectory as it is. Anchors that count from the end move while it grows; a step
// that is none has no mass; reports do not change that.
GEAR_HOST_DEVICE bool IsCurrent(const Slot& slot, const AnchorRule& rule, int64_t unit,
                                const PriorityUpdate& update) {
  return slot.state == kCommitted && slot.generation == update.generation && update.anchor >= 0 &&
         update.anchor < slot.num_steps &&
         (unit != kStep || IsAnchor(rule, slot.num_steps, update.anchor));
}

GEAR_HOST_DEVICE bool IsCurrent(const Slot* slots, int64_t num_slots, const AnchorRule& rule,
                                int64_t unit, const PriorityUpdate& update) {
  return update.slot >= 0 && update.slot < num_slots &&
         IsCurrent(slots[update.slot], rule, unit, update);
}

// The item of an update that is current.
GEAR_HOST_DEVICE int64_t ItemOf(const Slot* slots, int64_t unit, const PriorityUpdate& update) {
  return unit == kStep ? slots[update.slot].first_row + update.anchor : update.slot;
}

// The mass of a committed trajectory: one for each anchor, or one (by length: one a step) if it has
// an anchor at all.
GEAR_HOST_DEVICE int64_t MassOfSlot(const AnchorRule& rule, int64_t unit, int64_t num_steps) {
  const int64_t anchors = NumAnchors(rule, num_steps);
  if (unit == kStep) return anchors;
  if (anchors == 0) return 0;
  return unit == kByLength ? num_steps : 1;
}

// The anchor of a hit. A step item has one unit of mass per anchor, so the remainder is its index.
GEAR_HOST_DEVICE int64_t ChooseAnchor(const AnchorRule& rule, int64_t unit, int64_t num_steps,
                                      uint64_t remainder, uint64_t seed, uint64_t number,
                                      uint32_t stream) {
  if (unit == kStep) return AnchorAt(rule, num_steps, static_cast<int64_t>(remainder));
  const uint64_t anchors = static_cast<uint64_t>(NumAnchors(rule, num_steps));
  const uint64_t index = Coordinate(Philox(seed, number, stream, kForAnchor), anchors);
  return AnchorAt(rule, num_steps, static_cast<int64_t>(index));
}

// Resolves a draw of the store's row `row`, which belongs to `slot`.
GEAR_HOST_DEVICE bool ResolveRow(const Slot& slot, int64_t slot_index, int64_t row, uint64_t mass,
                                 int64_t number, Resolution* resolution) {
  const int64_t anchor = row - slot.first_row;
  if (slot.first_row < 0 || anchor < 0 || anchor >= slot.num_steps) return false;
  *resolution = ResolutionOf(slot, slot_index, anchor, mass, number);
  return true;
}

// Resolves a draw of the store's row `row`; false, and nothing written, if the row is not a step of
// its slot.
GEAR_HOST_DEVICE bool ResolveRow(const Slot* slots, int64_t num_slots, int64_t slot_index,
                                 int64_t row, uint64_t mass, int64_t number,
                                 Resolution* resolution) {
  if (slot_index < 0 || slot_index >= num_slots) return false;
  return ResolveRow(slots[slot_index], slot_index, row, mass, number, resolution);
}

}  // namespace gear
