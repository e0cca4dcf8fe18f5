// The table in the memory of one device, on the host: one trajectory after the other.
#include "common/convert.h"
#include "common/power.h"
#include "gather/gather.h"
#include "priorities/priorities.h"
#include "returns/returns.h"
#include "ring/changes_cpu.h"
#include "ring/ring.h"
#include "select/select.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace gear::cpu {
namespace {

void Fill(const Ring& ring, const RingShape& shape, const RingRule& rule, const Placed& placed,
          uint32_t initial, Changes* changes) {
  ring.slots[placed.slot] = SlotOfPlaced(shape, placed, ring.state[kRingBatch]);
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

uint64_t LeastOf(const Ring& ring, const TreeShape& shape) {
  const bool has_levels = shape.levels > 1;
  const uint64_t* top =
      has_levels ? ring.minima + MinimaOffset(shape, shape.levels - 1) : ring.sums;
  uint64_t least = ~uint64_t{0};  // of the values less 1, as in IsLess
  for (int64_t i = 0; i < shape.width[shape.levels - 1]; ++i) least = Min(least, top[i] - 1);
  return least + 1;
}

}  // namespace

void RingAdd(const Ring& ring, const RingShape& shape, const RingRule& rule, const int64_t* lengths,
             int64_t count, int64_t initial, Placed* placed) {
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
  Changes changes(ring, ItemsOfRing(shape, rule));
  int64_t tail = old_tail;
  for (; tail < old_next && IsEvicted(shape, tail, ring.begins[tail % shape.num_slots], head, next);
       ++tail)
    Clear(ring, shape, rule, tail, &changes);
  for (int64_t i = 0; i < count; ++i)
    if (placed[i].slot >= 0) Fill(ring, shape, rule, placed[i], first, &changes);
  changes.Apply();
  state[kRingHead] = head;
  state[kRingNext] = next;
  state[kRingTail] = tail;
}

uint64_t RingTotal(const uint64_t* sums, int64_t num_items) {
  const TreeShape shape = ShapeOfTree(num_items);
  const uint64_t* top = sums + shape.offset[shape.levels - 1];
  uint64_t total = 0;
  for (int64_t i = 0; i < shape.width[shape.levels - 1]; ++i) total += top[i];
  return total;
}

void Weigh(const Ring& ring, const RingShape& shape, const RingRule& rule, const RingDraw& draw,
           uint64_t total, int64_t count, const Resolution* resolutions, float* weights) {
  const int64_t batch = Min(ring.state[kRingBatch], draw.num_betas - 1);
  const auto beta = static_cast<uint64_t>(draw.betas[batch]);
  uint64_t numerator = total, divisor = 1;
  if (draw.normalize == kByBatch) {
    numerator = ~uint64_t{0};
    for (int64_t i = 0; i < count; ++i)
      numerator = Min(numerator, static_cast<uint64_t>(resolutions[i].mass));
  } else if (draw.normalize == kByTable) {
    numerator = LeastOf(ring, ShapeOfTree(ItemsOfRing(shape, rule)));
  } else {
    divisor = static_cast<uint64_t>(ring.state[kRingCounts + kDrawable]);
  }
  Importance(resolutions, count, numerator, divisor, beta, weights);
}

void Advance(int64_t* state, uint64_t total, int64_t count) {
  state[kRingTotal] = static_cast<int64_t>(total);
  if (total != 0) {
    state[kRingSamples] += count;
    state[kRingBatch] += 1;
  }
  state[kRingEmpty] += total == 0;
  state[kRingInitial] = state[kRingCounts + kHighestPriority];
}

void FillEmpty(const Ring& ring, const RingDraw& draw, int64_t count, Resolution* resolutions,
               float* weights) {
  for (int64_t i = 0; i < count; ++i) resolutions[i] = NoSample(NumberOf(draw, ring.state, i));
  if (weights != nullptr) std::fill(weights, weights + count, 0.0f);
}

namespace {

// Draws a batch from a total above 0, and weighs it.
void DrawBatch(const Ring& ring, const RingShape& shape, const RingRule& rule, const RingDraw& draw,
               uint64_t total, int64_t count, Resolution* resolutions, float* weights) {
  const auto number_of = [&](int64_t i) { return NumberOf(draw, ring.state, i); };
  std::vector<int64_t> points(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const Word128 word =
        Philox(draw.seed, static_cast<uint64_t>(number_of(i)), draw.stream, kForCoordinate);
    uint64_t point = Coordinate(word, total);
    if (draw.stratified)
      point = Stratify(point, total, static_cast<uint64_t>(i), static_cast<uint64_t>(count));
    points[i] = static_cast<int64_t>(point);
  }
  const int64_t run = draw.stride == 1 ? count : 1;  // samples whose numbers follow each other
  for (int64_t i = 0; i < count; i += run) {
    if (rule.by_row)
      ResolveRows(ring.sums, ring.slots, shape.num_slots, ring.row_slots, shape.num_rows,
                  &points[i], run, number_of(i), resolutions + i);
    else
      Resolve(ring.sums, ring.slots, shape.num_slots, &points[i], run, rule.anchors, rule.unit,
              draw.seed, draw.stream, number_of(i), resolutions + i);
  }
  if (weights != nullptr) Weigh(ring, shape, rule, draw, total, count, resolutions, weights);
}

}  // namespace

void RingSelect(const Ring& ring, const RingShape& shape, const RingRule& rule,
                const RingDraw& draw, int64_t count, Resolution* resolutions, float* weights) {
  const uint64_t total = RingTotal(ring.sums, ItemsOfRing(shape, rule));
  if (total > 0)
    DrawBatch(ring, shape, rule, draw, total, count, resolutions, weights);
  else
    FillEmpty(ring, draw, count, resolutions, weights);
  Advance(ring.state, total, count);
}

void RingUpdate(const Ring& ring, const RingShape& shape, const RingRule& rule,
                const Resolution* resolutions, const float* values, int64_t count) {
  int64_t* counts = ring.state + kRingCounts;
  const int64_t unit = rule.by_row ? kStep : kTrajectory;
  Changes changes(ring, ItemsOfRing(shape, rule));
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
    if (!IsCurrent(ring.slots, shape.num_slots, rule.anchors, unit, update)) {
      counts[kStale] += 1;
      continue;
    }
    const Mass mass = MassOfPriority(OrderOf(bits), rule.scale);
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
