// A step of every environment on the host: one environment after the other.
#include "ring/open_steps.h"

#include "common/convert.h"
#include "common/power.h"
#include "ring/changes_cpu.h"

namespace gear::cpu {
namespace {

// Items whose mass a longer trajectory changes: steps that become anchors, or are none any more.
void Grow(const Ring& ring, const RingRule& rule, const PlacedStep& place, uint32_t initial,
          Changes* changes) {
  const int64_t before = place.step, steps = before + 1;
  const uint64_t first = rule.has_priorities ? MassOfPriority(initial, rule.scale).value : 0;
  const auto set = [&](int64_t item, bool has_mass) {
    changes->Set(item, has_mass ? first : 0, has_mass ? BitCast<float>(initial) : 0.0f);
  };
  if (rule.by_row) {
    const StepRun run = ChangedAnchors(rule.anchors, steps);
    for (int64_t step = run.first; step < run.first + run.count; ++step)
      if (AnchorChanges(rule.anchors, steps, step))
        set(place.first_row + step, IsAnchor(rule.anchors, steps, step));
    return;
  }
  const auto own = static_cast<uint64_t>(MassOfSlot(rule.anchors, rule.unit, steps));
  if (!rule.has_priorities)
    changes->Set(place.slot, own, 0.0f);
  else if (own == 0 || MassOfSlot(rule.anchors, rule.unit, before) == 0)
    set(place.slot, own > 0);
}

}  // namespace

void RingExtend(const Ring& ring, const OpenRing& open, const RingShape& shape,
                const RingRule& rule, const EnvSteps& steps, int64_t initial, PlacedStep* placed,
                int64_t* begun) {
  int64_t* state = ring.state;
  const auto priority = static_cast<uint32_t>(initial < 0 ? state[kRingInitial] : initial);
  const int64_t part = shape.num_rows / steps.num_envs;
  int64_t next = state[kRingNext], stays = state[kRingTail];
  for (int64_t env = 0; env < steps.num_envs; ++env) {
    OpenTrajectory& opened = open.opened[env];
    placed[env] = kNoStep;
    begun[3 * env] = -1, begun[3 * env + 1] = begun[3 * env + 2] = 0;
    if (!HasStep(steps, opened, env)) {
      if (steps.Given(env)) opened.ended = 0;
      continue;
    }
    const int64_t number = opened.id, at = number % shape.num_slots;
    const Slot& slot = ring.slots[at];
    const bool is_open = IsOpen(opened, slot);
    const auto need = [&](int64_t row) {
      stays = Max(stays, AfterOwner(ring.slots[open.owners[row]], row));
    };
    if (is_open && opened.num_steps < shape.most_steps) {
      placed[env] = {
          at, slot.first_row + opened.num_steps, 1, number, slot.first_row, opened.num_steps};
    } else {
      if (is_open && open.truncations != nullptr)
        open.truncations[slot.first_row + opened.num_steps - 1] = true;
      const int64_t first = BeginInPart(shape, opened, env, part);
      placed[env] = {next % shape.num_slots, first, 1, next, first, 0};
      ++next;
      need(first);
    }
    need(placed[env].row + shape.final_row);
  }
  stays = Max(stays, OldestInSlots(shape, next, steps.num_envs));
  Changes changes(ring, ItemsOfRing(shape, rule));
  for (int64_t id = state[kRingTail]; id < stays; ++id) Clear(ring, shape, rule, id, &changes);
  for (int64_t env = 0; env < steps.num_envs; ++env) {
    const PlacedStep place = placed[env];
    if (place.slot < 0) continue;
    OpenTrajectory& opened = open.opened[env];
    const int64_t ends = steps.Ends(env) ? 1 : 0;
    if (place.id < stays) {
      placed[env] = kNoStep;
      opened.num_steps = 0, opened.ended = ends;
      state[kRingDropped] += 1;
      continue;
    }
    const int64_t num_steps = place.step + 1;
    Slot& slot = ring.slots[place.slot];
    if (place.step == 0) {
      begun[3 * env] = place.slot, begun[3 * env + 1] = place.row, begun[3 * env + 2] = 1;
      slot = {kCommitted, place.id / shape.num_slots, place.id, place.row, 0, 0,
              0,          state[kRingBatch]};
      open.owners[place.row] = static_cast<int32_t>(place.slot);
    }
    open.owners[place.row + shape.final_row] = static_cast<int32_t>(place.slot);
    slot.num_steps = num_steps, slot.num_rows = num_steps + shape.final_row;
    state[kRingSteps] += 1;
    Grow(ring, rule, place, priority, &changes);
    opened = {ends != 0 ? 0 : num_steps, place.id,
              place.first_row - env * part + num_steps + shape.final_row, ends};
  }
  changes.Apply();
  state[kRingNext] = next;
  state[kRingTail] = stays;
}

}  // namespace gear::cpu
