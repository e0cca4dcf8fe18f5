// The thin binding: schemas (op_table.h), checks of what the kernels rely on, pointers. The
// definition of every op, with shapes and dtypes, is in deepspeed_gear/ops/reference.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <thread>
#include <vector>

#include "bindings/check_priorities.h"
#include "bindings/checks.h"
#include "bindings/op_table.h"
#include "bindings/ops.h"
#include "common/convert.h"
#include "draws/draws.h"
#include "gather/gather.h"
#include "priorities/priorities.h"
#include "returns/returns.h"
#include "rows/rows.h"
#include "select/select.h"

namespace gear {

void Draw(at::Tensor& coordinates, int64_t seed, int64_t stream, int64_t first, int64_t total) {
  CheckTensor(coordinates, "coordinates", at::kLong);
  TORCH_CHECK(total > 0, "gear: total must be positive, got ", total);
  cpu::Draw(static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), first,
            static_cast<uint64_t>(total), coordinates.numel(),
            coordinates.mutable_data_ptr<int64_t>());
}

void Permute(at::Tensor& coordinates, int64_t seed, int64_t stream, int64_t epoch, int64_t first,
             int64_t size) {
  CheckTensor(coordinates, "coordinates", at::kLong);
  CheckIndices(coordinates, first, size);
  cpu::Permute(static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), epoch, first,
               static_cast<uint64_t>(size), coordinates.numel(),
               coordinates.mutable_data_ptr<int64_t>());
}

void TreeBuild(at::Tensor& sums, int64_t num_items) {
  CheckTree(sums, num_items);
  cpu::TreeBuild(Unsigned(sums), num_items);
}

static const int64_t* ItemsIn(const at::Tensor& items, int64_t num_items) {
  CheckTensor(items, "items", at::kLong);
  const int64_t* data = items.const_data_ptr<int64_t>();
  TORCH_CHECK(
      std::all_of(data, data + items.numel(), [&](int64_t i) { return i >= 0 && i < num_items; }),
      "gear: items must lie in [0, ", num_items, ")");
  return data;
}

void TreeUpdate(at::Tensor& sums, int64_t num_items, const at::Tensor& items,
                const at::Tensor& masses) {
  CheckTree(sums, num_items);
  CheckTensor(masses, "masses", at::kLong);
  TORCH_CHECK(items.numel() == masses.numel(), "gear: items and masses must have equal sizes");
  cpu::TreeUpdate(Unsigned(sums), num_items, ItemsIn(items, num_items),
                  masses.const_data_ptr<int64_t>(), items.numel());
}

void SlotMasses(at::Tensor& sums, const at::Tensor& slots, const at::Tensor& log, int64_t first,
                int64_t last, at::IntArrayRef rule, int64_t unit) {
  CheckSlotMasses(sums, slots, log, first, last, rule);
  const int64_t size = log.numel(), num_slots = slots.size(0);
  const int64_t* ring = log.const_data_ptr<int64_t>();
  for (int64_t i = first; i < last; ++i) {
    const int64_t slot = ring[i % size];
    TORCH_CHECK(slot >= 0 && slot < num_slots, "gear: items must lie in [0, ", num_slots, ")");
  }
  cpu::SlotMasses(Unsigned(sums), Records<Slot>(slots), num_slots, ring, size, first, last,
                  AnchorsOf(rule), unit);
}

// A coordinate below the total hits an item with a mass, so never the padding after the last slot.
static void CheckCoordinates(const at::Tensor& sums, int64_t num_items,
                             const at::Tensor& coordinates) {
  const TreeShape shape = ShapeOfTree(num_items);
  const int64_t* top = sums.const_data_ptr<int64_t>() + shape.offset[shape.levels - 1];
  const int64_t total = std::accumulate(top, top + shape.width[shape.levels - 1], int64_t{0});
  const int64_t* data = coordinates.const_data_ptr<int64_t>();
  TORCH_CHECK(
      std::all_of(data, data + coordinates.numel(), [&](int64_t c) { return c >= 0 && c < total; }),
      "gear: coordinates must lie in [0, ", total, ")");
}

void Resolve(at::Tensor& resolutions, const at::Tensor& sums, const at::Tensor& slots,
             const at::Tensor& coordinates, at::IntArrayRef rule, int64_t unit, int64_t seed,
             int64_t stream, int64_t first) {
  CheckResolve(resolutions, sums, slots, coordinates, rule);
  CheckCoordinates(sums, slots.size(0), coordinates);
  cpu::Resolve(reinterpret_cast<const uint64_t*>(sums.const_data_ptr<int64_t>()),
               reinterpret_cast<const Slot*>(slots.const_data_ptr<int64_t>()), slots.size(0),
               coordinates.const_data_ptr<int64_t>(), coordinates.numel(), AnchorsOf(rule), unit,
               static_cast<uint64_t>(seed), static_cast<uint32_t>(stream), first,
               reinterpret_cast<Resolution*>(resolutions.mutable_data_ptr<int64_t>()));
}

void ResolveRows(at::Tensor& resolutions, const at::Tensor& sums, const at::Tensor& slots,
                 const at::Tensor& row_slots, const at::Tensor& coordinates, int64_t first) {
  CheckResolveRows(resolutions, sums, slots, row_slots, coordinates);
  CheckCoordinates(sums, row_slots.numel(), coordinates);
  const int64_t resolved = cpu::ResolveRows(
      Unsigned(sums), Records<Slot>(slots), slots.size(0), row_slots.const_data_ptr<int32_t>(),
      row_slots.numel(), coordinates.const_data_ptr<int64_t>(), coordinates.numel(), first,
      reinterpret_cast<Resolution*>(resolutions.mutable_data_ptr<int64_t>()));
  TORCH_CHECK(resolved == coordinates.numel(), "gear: coordinate ", resolved,
              " must hit a row that is a step of its slot");
}

static void CheckPriority(uint32_t bits, int64_t index) {
  TORCH_CHECK(IsPriority(bits), "gear: priority ", index, " must be finite and at least 0, got ",
              BitCast<float>(bits));
}

void MassOf(at::Tensor& masses, const at::Tensor& priorities, int64_t alpha, int64_t most_bits) {
  const MassScale scale = ScaleOf(alpha, most_bits);
  CheckMass(masses, priorities);
  const float* data = priorities.const_data_ptr<float>();
  for (int64_t i = 0; i < priorities.numel(); ++i) CheckPriority(BitCast<uint32_t>(data[i]), i);
  cpu::MassOf(data, priorities.numel(), scale, masses.mutable_data_ptr<int64_t>());
}

void Importance(at::Tensor& weights, const at::Tensor& resolutions, int64_t numerator,
                int64_t count, int64_t beta) {
  CheckImportance(weights, resolutions, numerator, count, beta);
  const Resolution* records = Resolutions(resolutions);
  for (int64_t i = 0; i < resolutions.size(0); ++i)
    TORCH_CHECK(records[i].mass > 0, "gear: the mass of resolution ", i, " must be positive, got ",
                records[i].mass);
  cpu::Importance(records, resolutions.size(0), static_cast<uint64_t>(numerator),
                  static_cast<uint64_t>(count), static_cast<uint64_t>(beta),
                  weights.mutable_data_ptr<float>());
}

void MinimaBuild(at::Tensor& minima, const at::Tensor& sums, int64_t num_items) {
  CheckMinima(minima, sums, num_items);
  cpu::MinimaBuild(Unsigned(sums), num_items, Unsigned(minima));
}

void MinimaUpdate(at::Tensor& minima, const at::Tensor& sums, int64_t num_items,
                  const at::Tensor& items) {
  CheckMinima(minima, sums, num_items);
  cpu::MinimaUpdate(Unsigned(sums), num_items, ItemsIn(items, num_items), items.numel(),
                    Unsigned(minima));
}

void TopK(at::Tensor& items, const at::Tensor& priorities, const at::Tensor& sums) {
  CheckTopK(items, priorities, sums);
  cpu::TopK(priorities.const_data_ptr<float>(), Unsigned(sums), priorities.numel(), items.numel(),
            items.mutable_data_ptr<int64_t>());
}

void AppendReports(at::Tensor& log, const at::Tensor& resolutions, const at::Tensor& priorities,
                   int64_t tail, int64_t batch) {
  CheckReport(log, resolutions, priorities, tail);
  const int64_t count = priorities.numel();
  const float* data = priorities.const_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) CheckPriority(BitCast<uint32_t>(data[i]), i);
  if (count == 0) return;
  cpu::AppendReports(reinterpret_cast<Report*>(log.mutable_data_ptr<int64_t>()), log.size(0),
                     Resolutions(resolutions), data, count, tail, batch);
}

void Prioritize(at::Tensor& sums, at::Tensor& minima, at::Tensor& priorities, at::Tensor& counts,
                const at::Tensor& slots, const at::Tensor& updates, at::IntArrayRef rule,
                int64_t alpha, int64_t unit, int64_t most_bits) {
  const MassScale scale = ScaleOf(alpha, most_bits);
  const AnchorRule anchors = AnchorsOf(rule);
  CheckPrioritize(sums, minima, priorities, counts, slots, updates, unit);
  cpu::Updates records{updates.const_data_ptr<int64_t>(), updates.size(1)};
  const int64_t count = updates.size(0), num_items = priorities.numel();
  for (int64_t i = 0; i < count; ++i) CheckPriority(static_cast<uint32_t>(records[i].priority), i);
  std::vector<Report> sorted;
  if (records.row_words == kReportWords)
    records.rows =
        reinterpret_cast<const int64_t*>(cpu::InOrder(Records<Report>(updates), count, &sorted));
  std::vector<int64_t> items(static_cast<size_t>(count));
  const int64_t found = cpu::ItemsOf(Records<Slot>(slots), slots.size(0), anchors, unit, records,
                                     count, num_items, items.data());
  TORCH_CHECK(found == count, "gear: update ", found, " must be of an item in [0, ", num_items,
              ")");
  const cpu::Priorities target{Unsigned(sums), minima.numel() > 0 ? Unsigned(minima) : nullptr,
                               priorities.mutable_data_ptr<float>(), num_items};
  cpu::Prioritize(target, records, items.data(), count, scale, counts.mutable_data_ptr<int64_t>());
}

// Empty steps and row_slots: items are trajectories.
void SlotPriorities(at::Tensor& sums, at::Tensor& minima, at::Tensor& priorities,
                    at::Tensor& counts, at::Tensor& bases, at::Tensor& generations,
                    at::Tensor& steps, at::Tensor& row_slots, const at::Tensor& slots,
                    const at::Tensor& log, int64_t first, int64_t last, at::IntArrayRef rule,
                    int64_t unit, int64_t initial, int64_t alpha, int64_t most_bits) {
  const MassScale scale = ScaleOf(alpha, most_bits);
  CheckPriority(static_cast<uint32_t>(initial), 0);
  CheckPriorityArrays(sums, minima, priorities, counts, slots);
  CheckEntries(log, first, last);
  CheckRule(rule);
  const int64_t num_slots = slots.size(0), size = log.numel(), num_items = priorities.numel();
  const bool by_step = row_slots.numel() > 0;
  CheckLongs(bases, "bases", num_slots);
  CheckLongs(generations, "generations", num_slots);
  CheckLongs(steps, "steps", by_step ? num_slots : 0);
  CheckTensor(row_slots, "row_slots", at::kInt);
  TORCH_CHECK(num_items == (by_step ? row_slots.numel() : num_slots),
              "gear: priorities must have a value per item");
  const int64_t* ring = log.const_data_ptr<int64_t>();
  for (int64_t i = first; i < last; ++i) {
    const int64_t slot = ring[i % size];
    TORCH_CHECK(slot >= 0 && slot < num_slots, "gear: items must lie in [0, ", num_slots, ")");
  }
  const cpu::Priorities target{Unsigned(sums), minima.numel() > 0 ? Unsigned(minima) : nullptr,
                               priorities.mutable_data_ptr<float>(), num_items};
  const cpu::PrioritizedSlots known{bases.mutable_data_ptr<int64_t>(),
                                    generations.mutable_data_ptr<int64_t>(),
                                    by_step ? steps.mutable_data_ptr<int64_t>() : nullptr,
                                    by_step ? row_slots.mutable_data_ptr<int32_t>() : nullptr};
  const int64_t done = cpu::SlotPriorities(
      target, known, Records<Slot>(slots), ring, size, first, last, AnchorsOf(rule), unit,
      static_cast<uint32_t>(initial), scale, counts.mutable_data_ptr<int64_t>());
  TORCH_CHECK(done == last, "gear: rows must lie in [0, ", num_items, ")");
}

void DrawGoals(at::Tensor& goal_step, const at::Tensor& resolutions, int64_t seed, int64_t stream,
               int64_t strategy, int64_t fraction, int64_t final_row) {
  const Resolution* records = Resolutions(resolutions);
  const int64_t count = resolutions.size(0);
  CheckLongs(goal_step, "goal_step", count);
  CheckExponent("fraction", fraction);
  TORCH_CHECK(strategy >= 0 && strategy <= cpu::kEpisode, "gear: strategy must be 0 to 2, got ",
              strategy);
  cpu::DrawGoals(records, count, static_cast<uint64_t>(seed), static_cast<uint32_t>(stream),
                 strategy, static_cast<uint64_t>(fraction), final_row,
                 goal_step.mutable_data_ptr<int64_t>());
}

void SuffixSum(at::Tensor& out, const at::Tensor& reward, const at::Tensor& extents) {
  CheckTensor(out, "out", at::kFloat);
  CheckRecords(extents, "extents", 2);
  CheckReward(reward, out.numel());
  const int64_t* data = extents.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < extents.size(0); ++i)
    TORCH_CHECK(
        data[2 * i] >= 0 && data[2 * i + 1] >= 0 && data[2 * i + 1] <= out.numel() - data[2 * i],
        "gear: extent ", i, " must lie in the reward's rows");
  cpu::SuffixSum(reward.const_data_ptr(), CodeOf(reward), data, extents.size(0),
                 out.mutable_data_ptr<float>());
}

// One pass over the resolutions protects every column. `is_inside(i)`: whether the rows that are
// read of resolution i, which has an anchor, lie in them. Of one that is no sample nothing is read.
template <typename IsInsideAt>
static void CheckRows(const Resolution* resolutions, int64_t count, int64_t rows, int64_t slots,
                      const IsInsideAt& is_inside) {
  for (int64_t i = 0; i < count; ++i) {
    const Resolution& r = resolutions[i];
    const bool is_good =
        IsNoSample(r) || (IsAnchored(r) && r.slot >= 0 && r.slot < slots && is_inside(i));
    TORCH_CHECK(is_good, "gear: resolution ", i, " must lie in the columns: rows [", r.first_row,
                ", +", r.num_steps, ") anchor ", r.anchor, " slot ", r.slot, " of ", rows,
                " rows and ", slots, " slots");
  }
}

void NStepReturn(at::Tensor& returns, at::Tensor& discount, at::Tensor& steps,
                 const at::Tensor& reward, const at::Tensor& terminated,
                 const std::optional<at::Tensor>& truncated, const at::Tensor& powers,
                 const at::Tensor& resolutions, int64_t n) {
  const Resolution* records = Resolutions(resolutions);
  const int64_t count = resolutions.size(0);
  const cpu::NStep n_step =
      NStepOf(returns, discount, steps, reward, terminated, truncated, powers, resolutions, n);
  const int64_t rows = NumRows(reward, terminated, truncated);
  CheckRows(records, count, rows, std::numeric_limits<int64_t>::max(), [&](int64_t i) {
    const Resolution& r = records[i];
    const int64_t most = Min(n, r.num_steps - r.anchor);
    return IsInside(r.first_row, r.anchor, r.anchor + most, rows);
  });
  cpu::NStepReturn(n_step, records, count, returns.mutable_data_ptr<float>(),
                   discount.mutable_data_ptr<float>(), steps.mutable_data_ptr<int64_t>());
}

// Splits [0, count) over threads of its own: torch's pool would need OpenMP's runtime of the same
// torch build.
template <typename Work>
static void InThreads(int64_t count, int64_t threads, const Work& work) {
  const int64_t part = (count + threads - 1) / threads;
  std::vector<std::thread> others;
  for (int64_t begin = part; begin < count; begin += part)
    others.emplace_back(work, begin, std::min(begin + part, count));
  work(0, std::min(part, count));
  for (std::thread& other : others) other.join();
}

// Whether the rows that a window of steps reads lie in its column. A wrong offset is an error
// before its sum overflows.
static bool ReadsInside(const cpu::Field& field, int64_t rows, const Resolution& r,
                        const int64_t* n_step) {
  Window window = field.window;
  if (field.after_n_step) {
    if (*n_step < -kMostSteps || *n_step > kMostSteps) return false;
    window.offset += *n_step;
  }
  const int64_t held = r.num_steps + (field.source == cpu::kStepRowsPlusOne ? 1 : 0);
  const Span span = Cut(Bounds(window, r.anchor, held), field.part);
  return IsInside(r.first_row, span, field.part.count, field.pad, rows);
}

// A trajectory that lies in the shortest column as a whole needs no check of the windows.
static void CheckWindows(const FieldList& fields, at::TensorList columns, const Resolution* records,
                         int64_t count, const int64_t* n_steps) {
  const auto rows_of = [&](size_t f) { return columns[f].numel() / fields[f].elements; };
  int64_t rows = std::numeric_limits<int64_t>::max(), slots = rows, final_row = 0;
  for (size_t f = 0; f < fields.size(); ++f) {
    if (cpu::IsComputed(fields[f].source)) continue;
    int64_t& least = fields[f].source == cpu::kTrajectoryRow ? slots : rows;
    least = std::min(least, rows_of(f));
    if (fields[f].source == cpu::kStepRowsPlusOne) final_row = 1;
  }
  CheckRows(records, count, rows, slots, [&](int64_t i) {
    const Resolution& r = records[i];
    if (r.first_row >= 0 && r.first_row <= rows - final_row - r.num_steps) return true;
    for (size_t f = 0; f < fields.size(); ++f)
      if (cpu::IsStepRow(fields[f].source) &&
          !ReadsInside(fields[f], rows_of(f), r, n_steps ? n_steps + i : nullptr))
        return false;
    return true;
  });
}

// Here samples are gathered in their own order: their rows are in the caches anyway.
static void CheckOrder(const std::optional<at::Tensor>& order, int64_t count) {
  const int64_t* samples = OrderOf(order, count);
  if (samples == nullptr) return;
  std::vector<bool> is_there(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t sample = samples[i];
    TORCH_CHECK(sample >= 0 && sample < count && !is_there[static_cast<size_t>(sample)],
                "gear: order must have every index of [0, ", count, ") once");
    is_there[static_cast<size_t>(sample)] = true;
  }
}

void Gather(at::TensorList outs, at::TensorList masks, at::Tensor& counters, at::TensorList columns,
            at::TensorList shifts, at::TensorList gains, const at::Tensor& resolutions,
            const std::optional<at::Tensor>& n_steps, at::IntArrayRef spec,
            at::ArrayRef<double> pad_values, int64_t threads,
            const std::optional<at::Tensor>& order) {
  const Resolution* records = Resolutions(resolutions);
  const int64_t count = resolutions.size(0);
  CheckOrder(order, count);
  const FieldList fields = FieldsOf(outs, masks, counters, columns, shifts, gains, resolutions,
                                    n_steps, spec, pad_values);
  const int64_t* offsets = n_steps ? n_steps->const_data_ptr<int64_t>() : nullptr;
  CheckWindows(fields, columns, records, count, offsets);
  int64_t real = 0, all = 0, bytes = 0;
  if (count > 0) {
    std::atomic<int64_t> real_rows{0};
    const auto work = [&](int64_t begin, int64_t end) {
      const int64_t mine = cpu::Gather(fields.data(), static_cast<int64_t>(fields.size()), records,
                                       offsets, begin, end);
      real_rows.fetch_add(mine, std::memory_order_relaxed);
    };
    if (threads <= 1)
      work(0, count);
    else
      InThreads(count, threads, work);
    real = real_rows.load(std::memory_order_relaxed);
    for (const cpu::Field& field : fields) {
      all += count * field.part.count;
      bytes += count * field.part.count * field.elements * field.to_bytes;
    }
  }
  int64_t* counter = counters.mutable_data_ptr<int64_t>();
  counter[0] += real;
  counter[1] += all;
  counter[2] += bytes;
}

}  // namespace gear

TORCH_LIBRARY(gear, m){GEAR_OPS(GEAR_DEFINE) GEAR_HOST_OPS(GEAR_DEFINE) GEAR_RING_OPS(GEAR_DEFINE)}

TORCH_LIBRARY_IMPL(gear, CPU, m) {
  GEAR_OPS(GEAR_IMPLEMENT)
  GEAR_HOST_OPS(GEAR_IMPLEMENT)
}
