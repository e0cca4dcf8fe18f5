// The table in the memory of one device, on the host: one trajectory, environment or sample after
// the other.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/convert.h"
#include "common/power.h"
#include "gather/gather.h"
#include "priorities/priorities.h"
#include "ring/ring.h"
#include "select/select.h"

namespace gear::cpu {
namespace {

// Items whose masses change, applied together; the last of equal ones wins.
class Changes {
 public:
  explicit Changes(const Ring& ring) : ring_(ring) {}

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
    TreeUpdate(ring_.sums, ring_.NumItems(), items_.data(), masses_.data(), count);
    if (ring_.minima != nullptr)
      MinimaUpdate(ring_.sums, ring_.NumItems(), items_.data(), count, ring_.minima);
    ring_.state[kRingCounts + kDrawable] += drawable() - before;
  }

 private:
  const Ring& ring_;
  std::vector<int64_t> items_, masses_;
};

// Evicts a trajectory: its items lose their masses.
void Clear(const Ring& ring, int64_t id, Changes* changes) {
  Slot& slot = ring.slots[id % ring.shape.num_slots];
  if (!ring.rule.by_row) changes->Set(id % ring.shape.num_slots, 0, 0);
  for (int64_t step = 0; ring.rule.by_row && step < slot.num_steps; ++step)
    changes->Set(slot.first_row + step, 0, 0);
  ring.state[kRingSteps] -= slot.num_steps;
  slot.state = 0;
}

// Items whose mass a longer trajectory changes: steps that become anchors, or are none any more.
void Grow(const Ring& ring, const PlacedStep& place, uint32_t initial, Changes* changes) {
  const RingRule& rule = ring.rule;
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

void Fill(const Ring& ring, const Placed& placed, uint32_t initial, Changes* changes) {
  const RingRule& rule = ring.rule;
  ring.slots[placed.slot] = SlotOfPlaced(ring.shape, placed, ring.state[kRingBatch]);
  ring.begins[placed.slot] = placed.begin;
  ring.state[kRingSteps] += placed.num_steps;
  const uint64_t mass = rule.has_priorities ? MassOfPriority(initial, rule.scale).value : 0;
  if (!rule.by_row) {
    const auto own = static_cast<uint64_t>(MassOfSlot(rule.anchors, rule.unit, placed.num_steps));
    changes->Set(placed.slot, rule.has_priorities && own > 0 ? mass : own,
                 own > 0 ? BitCast<float>(initial) : 0);
    return;
  }
  for (int64_t step = 0; step < placed.num_steps; ++step) {
    const int64_t row = placed.first_row + step;
    const bool is_anchor = IsAnchor(rule.anchors, placed.num_steps, step);
    ring.row_slots[row] = static_cast<int32_t>(placed.slot);
    changes->Set(row, is_anchor ? mass : 0, is_anchor ? BitCast<float>(initial) : 0);
  }
}

// The weights of a batch of samples.
void Weigh(const Ring& ring, const RingDraw& draw, uint64_t total, int64_t count,
           const Resolution* resolutions, float* weights) {
  const int64_t batch = Min(ring.state[kRingBatch], draw.num_betas - 1);
  const auto beta = static_cast<uint64_t>(draw.betas[batch]);
  uint64_t numerator = total, divisor = 1;
  if (draw.normalize == kByBatch) {
    numerator = ~uint64_t{0};
    for (int64_t i = 0; i < count; ++i)
      numerator = Min(numerator, static_cast<uint64_t>(resolutions[i].mass));
  } else if (draw.normalize == kByTable) {
    numerator = LeastOfTree(ring.sums, ring.minima, ShapeOfTree(ring.NumItems()));
  } else {
    divisor = static_cast<uint64_t>(ring.state[kRingCounts + kDrawable]);
  }
  Importance(resolutions, count, numerator, divisor, beta, weights);
}

// A batch without samples.
void FillEmpty(const Ring& ring, const RingDraw& draw, int64_t count, Resolution* resolutions,
               float* weights) {
  for (int64_t i = 0; i < count; ++i) resolutions[i] = NoSample(NumberOf(draw, ring.state, i));
  if (weights != nullptr) std::fill(weights, weights + count, 0.0f);
}

// Draws a batch from a total above 0, and weighs it.
void DrawBatch(const Ring& ring, const RingDraw& draw, uint64_t total, int64_t count,
               Resolution* resolutions, float* weights) {
  const auto number_of = [&](int64_t i) { return NumberOf(draw, ring.state, i); };
  std::vector<int64_t> points(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    points[i] = static_cast<int64_t>(PointOf(draw, number_of(i), total, i, count));
  const int64_t run = draw.stride == 1 ? count : 1;  // samples whose numbers follow each other
  for (int64_t i = 0; i < count; i += run) {
    if (ring.rule.by_row)
      ResolveRows(ring.sums, ring.slots, ring.shape.num_slots, ring.row_slots, ring.shape.num_rows,
                  &points[i], run, number_of(i), resolutions + i);
    else
      Resolve(ring.sums, ring.slots, ring.shape.num_slots, &points[i], run, ring.rule.anchors,
              ring.rule.unit, draw.seed, draw.stream, number_of(i), resolutions + i);
  }
  if (weights != nullptr) Weigh(ring, draw, total, count, resolutions, weights);
}

// Whether `count` draws are left.
bool HasDraws(const Ring& ring, int64_t count, int64_t most) {
  int64_t left = 0;
  for (int64_t id = ring.state[kRingTail]; id < ring.state[kRingNext] && left < count; ++id) {
    const int64_t slot = id % ring.shape.num_slots;
    if (ring.sums[slot] > 0) left += most - TimesSampled(ring.slots[slot]);
  }
  return left >= count;
}

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

void RingAdd(const Ring& ring, const int64_t* lengths, int64_t count, int64_t initial,
             Placed* placed) {
  const RingShape& shape = ring.shape;
  int64_t* state = ring.state;
  const auto first = static_cast<uint32_t>(initial < 0 ? state[kRingInitial] : initial);
  const int64_t old_tail = state[kRingTail], old_next = state[kRingNext];
  int64_t head = state[kRingHead], next = old_next;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t steps = lengths[i];
    placed[i] = {-1, 0, 0, -1, 0};
    if (steps < 0 || steps > shape.most_steps) state[kRingRefused] += 1;
    if (steps <= 0 || steps > shape.most_steps) continue;
    const int64_t rows = steps + shape.final_row, begin = BeginInRing(head, rows, shape.num_rows);
    placed[i] = {next % shape.num_slots, begin % shape.num_rows, steps, next, begin};
    head = begin + rows;
    ++next;
  }
  Changes changes(ring);
  int64_t tail = old_tail;
  for (; tail < old_next && IsEvicted(shape, tail, ring.begins[tail % shape.num_slots], head, next);
       ++tail)
    Clear(ring, tail, &changes);
  for (int64_t i = 0; i < count; ++i)
    if (placed[i].slot >= 0) Fill(ring, placed[i], first, &changes);
  changes.Apply();
  state[kRingHead] = head;
  state[kRingNext] = next;
  state[kRingTail] = tail;
}

void RingExtend(const Ring& ring, const OpenRing& open, const EnvSteps& steps, int64_t initial,
                PlacedStep* placed, int64_t* begun) {
  const RingShape& shape = ring.shape;
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
  Changes changes(ring);
  for (int64_t id = state[kRingTail]; id < stays; ++id) Clear(ring, id, &changes);
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
    Grow(ring, place, priority, &changes);
    opened = {ends != 0 ? 0 : num_steps, place.id,
              place.first_row - env * part + num_steps + shape.final_row, ends};
  }
  changes.Apply();
  state[kRingNext] = next;
  state[kRingTail] = stays;
}

void RingRemove(const Ring& ring, const int64_t* ids, int64_t count, int64_t* removed) {
  Changes changes(ring);
  for (int64_t i = 0; i < count; ++i) {
    removed[i] = -1;
    if (ids[i] < 0) continue;
    const int64_t at = ids[i] % ring.shape.num_slots;
    Slot& slot = ring.slots[at];
    if (slot.state != kCommitted || slot.id != ids[i]) continue;
    Clear(ring, ids[i], &changes);
    slot.num_steps = 0;  // its eviction frees nothing more
    removed[i] = at;
  }
  changes.Apply();
}

void RingSelect(const Ring& ring, const RingDraw& draw, int64_t count, Resolution* resolutions,
                float* weights) {
  const uint64_t total = TotalOfTree(ring.sums, ShapeOfTree(ring.NumItems()));
  if (total > 0)
    DrawBatch(ring, draw, total, count, resolutions, weights);
  else
    FillEmpty(ring, draw, count, resolutions, weights);
  Advance(ring.state, total, count);
}

void RingSelectLimited(const Ring& ring, const RingDraw& draw, int64_t count, int64_t most,
                       Resolution* resolutions, float* weights) {
  const TreeShape tree = ShapeOfTree(ring.NumItems());
  uint64_t total = TotalOfTree(ring.sums, tree);
  const uint64_t first_total = total;
  if (total == 0 || !HasDraws(ring, count, most)) {
    FillEmpty(ring, draw, count, resolutions, weights);
    Advance(ring.state, 0, count);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t number = NumberOf(draw, ring.state, i);
    Hit hit{0, PointOf(draw, number, total, i, count)};
    for (int level = tree.levels - 1; level >= 0; --level)
      hit = Descend(ring.sums, tree, level, hit);
    ResolveItem(ring, draw, hit, number, &resolutions[i]);
    int64_t& times = TimesSampled(ring.slots[hit.item]);
    times += 1;
    if (times < most || i + 1 == count) continue;  // weights are of the masses at the last draw
    Changes used_up(ring);
    used_up.Set(hit.item, 0, 0);
    used_up.Apply();
    total -= static_cast<uint64_t>(resolutions[i].mass);
  }
  if (weights != nullptr) Weigh(ring, draw, first_total, count, resolutions, weights);
  Advance(ring.state, first_total, count);
}

void RingTopK(const Ring& ring, const RingDraw& draw, int64_t count, bool counts,
              Resolution* resolutions, float* weights) {
  const int64_t num_items = ring.NumItems();
  const int64_t oldest = OldestItem(ring.state, ring.slots, ring.shape, ring.rule);
  const std::vector<int64_t> items = Highest(ring, num_items, oldest, count);
  if (static_cast<int64_t>(items.size()) < count) {
    FillEmpty(ring, draw, count, resolutions, weights);
    Advance(ring.state, 0, count);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    ResolveItem(ring, draw, {items[static_cast<size_t>(i)], 0}, NumberOf(draw, ring.state, i),
                &resolutions[i]);
    if (counts) TimesSampled(ring.slots[resolutions[i].slot]) += 1;
  }
  if (weights != nullptr) std::fill(weights, weights + count, 1.0f);
  Advance(ring.state, TotalOfTree(ring.sums, ShapeOfTree(num_items)), count);
}

void RingUpdate(const Ring& ring, const Resolution* resolutions, const float* values,
                int64_t count) {
  int64_t* counts = ring.state + kRingCounts;
  const int64_t unit = ring.rule.by_row ? kStep : kTrajectory;
  Changes changes(ring);
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = BitCast<uint32_t>(values[i]);
    const Resolution& r = resolutions[i];
    if (!IsPriority(bits)) {
      ring.state[kRingRefused] += 1;
      continue;
    }
    const PriorityUpdate update{r.slot, r.generation, r.anchor, bits};
    if (r.slot >= 0)  // also of evicted trajectories, but not of records that are no samples
      counts[kHighestPriority] = Max(counts[kHighestPriority], int64_t{OrderOf(bits)});
    if (!IsCurrent(ring.slots, ring.shape.num_slots, ring.rule.anchors, unit, update)) {
      counts[kStale] += 1;
      continue;
    }
    const Mass mass = MassOfPriority(OrderOf(bits), ring.rule.scale);
    changes.Set(ItemOf(ring.slots, unit, update), mass.value, BitCast<float>(OrderOf(bits)));
    counts[kApplied] += 1;
    counts[kClamped] += mass.clamped;
  }
  changes.Apply();
}

bool Scatter(const ScatterColumn* columns, int64_t num_columns, const int64_t* placed,
             int64_t place_words, int64_t count) {
  const auto rows_of = [](const ScatterColumn& column, int64_t steps) {
    if (column.source == kTrajectoryRow) return int64_t{1};
    return steps + (column.source == kStepRowsPlusOne ? 1 : 0);
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* place = placed + i * place_words;
    if (place[0] < 0) continue;
    for (int64_t c = 0; c < num_columns; ++c) {
      const int64_t rows = rows_of(columns[c], place[2]);
      const int64_t first = columns[c].source == kTrajectoryRow ? place[0] : place[1];
      if (place[2] < 0 || rows > columns[c].most_rows || first < 0 ||
          first > columns[c].num_rows - rows)
        return false;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* place = placed + i * place_words;
    if (place[0] < 0) continue;
    for (int64_t c = 0; c < num_columns; ++c) {
      const ScatterColumn& column = columns[c];
      const int64_t first = column.source == kTrajectoryRow ? place[0] : place[1];
      std::memcpy(column.rows + first * column.row_bytes,
                  column.values + i * column.most_rows * column.row_bytes,
                  static_cast<size_t>(rows_of(column, place[2]) * column.row_bytes));
    }
  }
  return true;
}

}  // namespace gear::cpu
