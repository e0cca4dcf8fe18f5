// The ops that run on the host alone: draws, changes of masses and priorities, goals, and packs.
#pragma once
#include <algorithm>
#include <vector>

#include "bindings/gather_ops.h"
#include "bindings/tensors.h"
#include "pack/plan.h"
#include "priorities/priorities.h"
#include "select/select.h"

namespace gear {

// Whether `count` values are indices below `end`.
inline void CheckIndices(const int64_t* values, int64_t count, const char* name, int64_t end) {
  TORCH_CHECK(std::all_of(values, values + count, [&](int64_t v) { return v >= 0 && v < end; }),
              "gear: ", name, " must lie in [0, ", end, ")");
}

inline void Draw(at::Tensor& coordinates, int64_t seed, int64_t stream, int64_t first,
                 int64_t total) {
  TORCH_CHECK(total > 0, "gear: total must be positive, got ", total);
  cpu::Draw(static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), first,
            static_cast<uint64_t>(total), coordinates.numel(),
            Values<int64_t>(coordinates, "coordinates"));
}

inline void Permute(at::Tensor& coordinates, int64_t seed, int64_t stream, int64_t epoch,
                    int64_t first, int64_t size) {
  const int64_t count = coordinates.numel();
  TORCH_CHECK(first >= 0 && size >= 0 && first <= size - count, "gear: ", count, " indices from ",
              first, " must lie in [0, ", size, ")");
  cpu::Permute(static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), epoch, first,
               static_cast<uint64_t>(size), count, Values<int64_t>(coordinates, "coordinates"));
}

inline const int64_t* ItemsIn(const at::Tensor& items, int64_t num_items) {
  const int64_t* values = Values<int64_t>(items, "items");
  CheckIndices(values, items.numel(), "items", num_items);
  return values;
}

inline void TreeUpdate(at::Tensor& sums, int64_t num_items, const at::Tensor& items,
                       const at::Tensor& masses) {
  cpu::TreeUpdate(TreeOf(sums, num_items), num_items, ItemsIn(items, num_items),
                  Values<int64_t>(masses, "masses", items.numel()), items.numel());
}

inline void MinimaUpdate(at::Tensor& minima, const at::Tensor& sums, int64_t num_items,
                         const at::Tensor& items) {
  cpu::MinimaUpdate(TreeOf(sums, num_items), num_items, ItemsIn(items, num_items), items.numel(),
                    MinimaOf(minima, num_items));
}

// A ring of changed slots, of which entries [first, last) are read.
inline const int64_t* LogOf(const at::Tensor& log, int64_t first, int64_t last, int64_t num_slots) {
  const int64_t* entries = Values<int64_t>(log, "log");
  const int64_t size = log.numel();
  TORCH_CHECK(0 <= first && first <= last && last - first <= size,
              "gear: entries must be in a log of ", size, ", got [", first, ", ", last, ")");
  for (int64_t i = first; i < last; ++i) CheckIndices(&entries[i % size], 1, "items", num_slots);
  return entries;
}

inline void SlotMasses(at::Tensor& sums, const at::Tensor& slots, const at::Tensor& log,
                       int64_t first, int64_t last, at::IntArrayRef rule, int64_t unit) {
  const auto [records, num_slots] = CountedRows<Slot>(slots, "slots");
  uint64_t* tree = TreeOf(sums, num_slots);
  const AnchorRule anchors = AnchorsOf(rule);
  cpu::SlotMasses(tree, records, num_slots, LogOf(log, first, last, num_slots), log.numel(), first,
                  last, anchors, unit);
}

// A coordinate below the total hits an item with a mass, so never the padding after the last slot.
inline const int64_t* CoordinatesOf(const at::Tensor& coordinates, const uint64_t* sums,
                                    int64_t num_items) {
  const uint64_t total = TotalOfTree(sums, ShapeOfTree(num_items));
  const int64_t* values = Values<int64_t>(coordinates, "coordinates");
  CheckIndices(values, coordinates.numel(), "coordinates", static_cast<int64_t>(total));
  return values;
}

inline void Resolve(at::Tensor& resolutions, const at::Tensor& sums, const at::Tensor& slots,
                    const at::Tensor& coordinates, at::IntArrayRef rule, int64_t unit, int64_t seed,
                    int64_t stream, int64_t first) {
  const auto [records, num_slots] = CountedRows<Slot>(slots, "slots");
  const int64_t count = coordinates.numel();
  const uint64_t* tree = TreeOf(sums, num_slots);
  cpu::Resolve(tree, records, num_slots, CoordinatesOf(coordinates, tree, num_slots), count,
               AnchorsOf(rule), unit, static_cast<uint64_t>(seed), static_cast<uint32_t>(stream),
               first, Rows<Resolution>(resolutions, "resolutions", count));
}

inline void ResolveRows(at::Tensor& resolutions, const at::Tensor& sums, const at::Tensor& slots,
                        const at::Tensor& row_slots, const at::Tensor& coordinates, int64_t first) {
  const Slot* records = Rows<Slot>(slots, "slots");
  const int32_t* slot_of = Values<int32_t>(row_slots, "row_slots");
  const int64_t num_rows = row_slots.numel(), count = coordinates.numel();
  const uint64_t* tree = TreeOf(sums, num_rows);
  const int64_t resolved = cpu::ResolveRows(
      tree, records, slots.size(0), slot_of, num_rows, CoordinatesOf(coordinates, tree, num_rows),
      count, first, Rows<Resolution>(resolutions, "resolutions", count));
  TORCH_CHECK(resolved == count, "gear: coordinate ", resolved,
              " must hit a row that is a step of its slot");
}

inline void Importance(at::Tensor& weights, const at::Tensor& resolutions, int64_t numerator,
                       int64_t count, int64_t beta) {
  const auto [records, size] = CountedRows<Resolution>(resolutions, "resolutions");
  CheckExponent("beta", beta);
  TORCH_CHECK(numerator > 0 && count > 0, "gear: numerator and count must be positive, got ",
              numerator, " and ", count);
  for (int64_t i = 0; i < size; ++i)
    TORCH_CHECK(records[i].mass > 0, "gear: the mass of resolution ", i, " must be positive, got ",
                records[i].mass);
  cpu::Importance(records, size, static_cast<uint64_t>(numerator), static_cast<uint64_t>(count),
                  static_cast<uint64_t>(beta), Values<float>(weights, "weights", size));
}

inline void TopK(at::Tensor& items, const at::Tensor& priorities, const at::Tensor& sums) {
  const uint64_t* masses = Values<uint64_t>(sums, "sums");
  TORCH_CHECK(priorities.numel() <= sums.numel(), "gear: sums must have a mass per priority");
  cpu::TopK(Values<float>(priorities, "priorities"), masses, priorities.numel(), items.numel(),
            Values<int64_t>(items, "items"));
}

inline void AppendReports(at::Tensor& log, const at::Tensor& resolutions,
                          const at::Tensor& priorities, int64_t tail, int64_t batch) {
  Report* reports = Rows<Report>(log, "log");
  const int64_t count = priorities.numel(), size = log.size(0);
  const Resolution* records = Rows<Resolution>(resolutions, "resolutions", count);
  const float* values = Values<float>(priorities, "priorities");
  TORCH_CHECK(count <= size, "gear: the log must hold ", count, " reports, got ", size, " rows");
  TORCH_CHECK(tail >= 0, "gear: tail must be at least 0, got ", tail);
  CheckPriorities(values, count);
  if (count > 0) cpu::AppendReports(reports, size, records, values, count, tail, batch);
}

inline void Prioritize(at::Tensor& sums, at::Tensor& minima, at::Tensor& priorities,
                       at::Tensor& counts, const at::Tensor& slots, const at::Tensor& updates,
                       at::IntArrayRef rule, int64_t alpha, int64_t unit, int64_t most_bits) {
  const MassScale scale = ScaleOf(alpha, most_bits);
  const int64_t num_items = priorities.numel();
  const cpu::Priorities target{TreeOf(sums, num_items), MinimaOrNull(minima, num_items),
                               Values<float>(priorities, "priorities"), num_items};
  int64_t* counters = Values<int64_t>(counts, "counts", kNumUpdateCounts);
  const Slot* records = Rows<Slot>(slots, "slots");
  TORCH_CHECK(unit == kTrajectory || unit == kStep, "gear: unit must be 0 or 1, got ", unit);
  CheckTensor(updates, "updates", at::kLong);
  constexpr int64_t kUpdateWords = sizeof(PriorityUpdate) / sizeof(int64_t);
  constexpr int64_t kReportWords = sizeof(Report) / sizeof(int64_t);
  TORCH_CHECK(
      updates.dim() == 2 && (updates.size(1) == kUpdateWords || updates.size(1) == kReportWords),
      "gear: updates must be [n, ", kUpdateWords, "], or reports [n, ", kReportWords, "], got ",
      updates.sizes());
  cpu::Updates given{Data<int64_t>(updates), updates.size(1)};
  const int64_t count = updates.size(0);
  for (int64_t i = 0; i < count; ++i) CheckPriority(static_cast<uint32_t>(given[i].priority), i);
  std::vector<Report> sorted;
  if (given.row_words == kReportWords)
    given.rows =
        reinterpret_cast<const int64_t*>(cpu::InOrder(Data<Report>(updates), count, &sorted));
  std::vector<int64_t> items(static_cast<size_t>(count));
  const int64_t found = cpu::ItemsOf(records, slots.size(0), AnchorsOf(rule), unit, given, count,
                                     num_items, items.data());
  TORCH_CHECK(found == count, "gear: update ", found, " must be of an item in [0, ", num_items,
              ")");
  cpu::Prioritize(target, given, items.data(), count, scale, counters);
}

// Empty steps and row_slots: items are trajectories.
inline void SlotPriorities(at::Tensor& sums, at::Tensor& minima, at::Tensor& priorities,
                           at::Tensor& counts, at::Tensor& bases, at::Tensor& generations,
                           at::Tensor& steps, at::Tensor& row_slots, const at::Tensor& slots,
                           const at::Tensor& log, int64_t first, int64_t last, at::IntArrayRef rule,
                           int64_t unit, int64_t initial, int64_t alpha, int64_t most_bits) {
  const MassScale scale = ScaleOf(alpha, most_bits);
  const AnchorRule anchors = AnchorsOf(rule);
  CheckPriority(static_cast<uint32_t>(initial), 0);
  const auto [records, num_slots] = CountedRows<Slot>(slots, "slots");
  const bool by_step = row_slots.numel() > 0;
  const int64_t num_items = by_step ? row_slots.numel() : num_slots;
  const cpu::Priorities target{TreeOf(sums, num_items), MinimaOrNull(minima, num_items),
                               Values<float>(priorities, "priorities", num_items), num_items};
  int64_t* known_steps = Values<int64_t>(steps, "steps", by_step ? num_slots : 0);
  int32_t* slot_of = Values<int32_t>(row_slots, "row_slots");
  const cpu::PrioritizedSlots known{Values<int64_t>(bases, "bases", num_slots),
                                    Values<int64_t>(generations, "generations", num_slots),
                                    by_step ? known_steps : nullptr, by_step ? slot_of : nullptr};
  const int64_t done =
      cpu::SlotPriorities(target, known, records, LogOf(log, first, last, num_slots), log.numel(),
                          first, last, anchors, unit, static_cast<uint32_t>(initial), scale,
                          Values<int64_t>(counts, "counts", kNumUpdateCounts));
  TORCH_CHECK(done == last, "gear: rows must lie in [0, ", num_items, ")");
}

inline void DrawGoals(at::Tensor& goal_step, const at::Tensor& resolutions, int64_t seed,
                      int64_t stream, int64_t strategy, int64_t fraction, int64_t final_row) {
  const auto [records, count] = CountedRows<Resolution>(resolutions, "resolutions");
  CheckExponent("fraction", fraction);
  TORCH_CHECK(strategy >= 0 && strategy <= cpu::kEpisode, "gear: strategy must be 0 to 2, got ",
              strategy);
  cpu::DrawGoals(records, count, static_cast<uint64_t>(seed), static_cast<uint32_t>(stream),
                 strategy, static_cast<uint64_t>(fraction), final_row,
                 Values<int64_t>(goal_step, "goal_step", count));
}

// Whether the rows of a whole trajectory lie in its column.
inline bool LiesInside(const cpu::Field& field, int64_t held_rows, const Resolution& r) {
  if (field.source == cpu::kTrajectoryRow) return r.slot >= 0 && r.slot < held_rows;
  const int64_t held = r.num_steps + (field.source == cpu::kStepRowsPlusOne ? 1 : 0);
  const int64_t begin = Clamp<int64_t>(field.window.offset, 0, held);
  const int64_t end = Clamp<int64_t>(field.window.offset + r.num_steps, 0, held);
  return IsInside(r.first_row, begin, end, held_rows);
}

inline void Pack(at::TensorList outs, at::TensorList columns, at::TensorList shifts,
                 at::TensorList gains, const at::Tensor& resolutions, const at::Tensor& places,
                 at::IntArrayRef spec, at::ArrayRef<double> pad_values, int64_t first,
                 int64_t rows) {
  const auto [records, count] = CountedRows<Resolution>(resolutions, "resolutions");
  const int64_t* at = Values<int64_t>(places, "places", count);
  TORCH_CHECK(first >= 0 && rows >= 0 && first <= kMostSteps && rows <= kMostSteps,
              "gear: first and rows must be in [0, 2^40]");
  const FieldList fields = FieldsOf(outs, nullptr, columns, shifts, gains, spec, pad_values, rows);
  for (const cpu::Field& field : fields)
    TORCH_CHECK(field.window.length == 1 && field.pad == kPadValue && !field.follows &&
                    field.source != cpu::kPosition,
                "gear: a packed field must be of single steps, padded by a value");
  for (int64_t i = 0; i < count; ++i) {
    const Resolution& r = records[i];
    bool is_inside =
        r.num_steps >= 1 && r.num_steps <= kMostSteps && at[i] >= 0 && at[i] <= kMostSteps;
    for (size_t f = 0; is_inside && f < fields.size(); ++f)
      is_inside = cpu::IsComputed(fields[f].source) ||
                  LiesInside(fields[f], columns[f].numel() / fields[f].elements, r);
    TORCH_CHECK(is_inside, "gear: resolution ", i,
                " must lie in the columns, and its place in [0, 2^40]");
  }
  if (rows == 0) return;
  const cpu::ReadAhead ahead(fields.data(), static_cast<int64_t>(fields.size()), 1);
  if (ahead.IsNeeded()) ahead.RequestWhole(records, count);
  cpu::Pack(fields.data(), static_cast<int64_t>(fields.size()), records, at, count, first, rows);
}

inline void PlanPacks(at::Tensor& micro_step, at::Tensor& rank, at::Tensor& num_micro_steps,
                      const at::Tensor& lengths, int64_t tokens, int64_t linear, int64_t quadratic,
                      int64_t width, int64_t trajectories) {
  const int64_t count = lengths.numel();
  const int64_t* values = Values<int64_t>(lengths, "lengths");
  int64_t* step_of = Values<int64_t>(micro_step, "micro_step", count);
  int64_t* rank_of = Values<int64_t>(rank, "rank", count);
  int64_t* found = Values<int64_t>(num_micro_steps, "num_micro_steps", 1);
  TORCH_CHECK(tokens >= 1 && tokens <= cpu::kMostPackTokens,
              "gear: tokens must be in [1, 2^31), got ", tokens);
  TORCH_CHECK(width >= 1 && width <= cpu::kMostPackWidth, "gear: width must be in [1, 2^20], got ",
              width);
  TORCH_CHECK(trajectories >= 1 && trajectories <= cpu::kMostPackTokens,
              "gear: trajectories must be in [1, 2^31), got ", trajectories);
  constexpr int64_t kEnd = int64_t{1} << 62;  // of the cost of all trajectories
  TORCH_CHECK(
      linear >= 0 && quadratic >= 0 && linear < kEnd && quadratic < kEnd && linear + quadratic > 0,
      "gear: linear and quadratic must be in [0, 2^62), and not both 0");
  unsigned __int128 cost = 0;
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(values[i] >= 1 && values[i] <= tokens, "gear: length ", i, " must be in [1, ",
                tokens, "], got ", values[i]);
    const auto length = static_cast<unsigned __int128>(values[i]);
    cost += (static_cast<unsigned __int128>(linear) + quadratic * length) * length;
    TORCH_CHECK(cost < static_cast<unsigned __int128>(kEnd),
                "gear: the cost of all trajectories must be below 2^62");
  }
  *found = cpu::PlanPacks(values, count, {tokens, linear, quadratic, trajectories}, width, step_of,
                          rank_of);
}

}  // namespace gear
