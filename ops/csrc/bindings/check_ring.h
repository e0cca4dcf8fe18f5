// Checks of the bindings of both devices before an op of the ring runs.
#pragma once
#include <optional>
#include <vector>

#include "bindings/check_priorities.h"
#include "ring/limited.h"
#include "ring/open_steps.h"
#include "ring/remove.h"
#include "ring/ring.h"
#include "ring/ring_top_k.h"

namespace gear {

inline constexpr int64_t kPlacedWords = sizeof(Placed) / sizeof(int64_t);

inline RingShape ShapeOfRing(at::IntArrayRef shape) {
  TORCH_CHECK(shape.size() == 4 && shape[0] > 0 && shape[1] > 0 &&
                  (shape[2] == 0 || shape[2] == 1) && shape[3] > 0 && shape[3] <= kMostSteps,
              "gear: shape must be rows, slots, final row (0 or 1) and most steps, got ", shape);
  return {shape[0], shape[1], shape[2], shape[3]};
}

inline RingRule RuleOfRing(at::IntArrayRef rule, int64_t unit, bool has_priorities, int64_t alpha,
                           int64_t most_bits = kMostMassBits) {
  const AnchorRule anchors = AnchorsOf(rule);
  const MassScale scale = ScaleOf(alpha, most_bits);
  TORCH_CHECK(unit == kTrajectory || unit == kStep || unit == kByLength,
              "gear: unit must be 0, 1 or 2, got ", unit);
  return {anchors, unit, has_priorities, has_priorities && unit == kStep, scale};
}

inline void CheckState(const at::Tensor& state) {
  CheckTensor(state, "state", at::kLong);
  TORCH_CHECK(state.numel() == kRingWords, "gear: state must have ",
              static_cast<int64_t>(kRingWords), " words, got ", state.numel());
}

// Slots, tree and minima; empty minima are not maintained.
inline void CheckRing(const at::Tensor& slots, const at::Tensor& sums, const at::Tensor& minima,
                      const RingShape& shape, const RingRule& rule) {
  CheckRecords(slots, "slots", kSlotWords);
  TORCH_CHECK(slots.size(0) == shape.num_slots, "gear: slots must be ", shape.num_slots, ", got ",
              slots.size(0));
  const int64_t num_items = ItemsOfRing(shape, rule);
  CheckTree(sums, num_items);
  CheckTensor(minima, "minima", at::kLong);
  if (minima.numel() > 0) CheckMinima(minima, sums, num_items);
}

inline void CheckRowSlots(const at::Tensor& row_slots, const RingShape& shape,
                          const RingRule& rule) {
  CheckTensor(row_slots, "row_slots", at::kInt);
  TORCH_CHECK(row_slots.numel() == (rule.by_row ? shape.num_rows : 0),
              "gear: row_slots must have a value per row where items are rows, else none; got ",
              row_slots.numel());
}

inline void CheckRingAdd(const at::Tensor& state, const at::Tensor& slots, const at::Tensor& begins,
                         const at::Tensor& sums, const at::Tensor& minima,
                         const at::Tensor& priorities, const at::Tensor& row_slots,
                         const at::Tensor& placed, const at::Tensor& lengths,
                         const RingShape& shape, const RingRule& rule, int64_t initial) {
  CheckState(state);
  CheckRing(slots, sums, minima, shape, rule);
  CheckRowSlots(row_slots, shape, rule);
  CheckTensor(begins, "begins", at::kLong);
  CheckTensor(priorities, "priorities", at::kFloat);
  CheckRecords(placed, "placed", kPlacedWords);
  CheckTensor(lengths, "lengths", at::kLong);
  const int64_t count = lengths.numel();
  TORCH_CHECK(begins.numel() == shape.num_slots, "gear: begins must have a value per slot");
  TORCH_CHECK(!rule.has_priorities || priorities.numel() == ItemsOfRing(shape, rule),
              "gear: priorities must have a value per item");
  TORCH_CHECK(placed.size(0) == count, "gear: placed must have a row per length");
  // So that added trajectories never overwrite each other, and at most one run of rows is left out.
  TORCH_CHECK(
      count <= shape.num_slots && count < shape.num_rows / (shape.most_steps + shape.final_row),
      "gear: ", count, " trajectories of up to ", shape.most_steps,
      " steps must fit, and one more, into ", shape.num_rows, " rows and ", shape.num_slots,
      " slots");
  TORCH_CHECK(initial < 0 || (initial > 0 && initial < 0x7F800000),
              "gear: initial must be the bits of a positive float32, or below 0, got ", initial);
}

inline void CheckRingRemove(const at::Tensor& state, const at::Tensor& slots,
                            const at::Tensor& sums, const at::Tensor& minima,
                            const at::Tensor& priorities, const at::Tensor& removed,
                            const at::Tensor& ids, const RingShape& shape, const RingRule& rule) {
  CheckState(state);
  CheckRing(slots, sums, minima, shape, rule);
  CheckTensor(priorities, "priorities", at::kFloat);
  CheckTensor(removed, "removed", at::kLong);
  CheckTensor(ids, "ids", at::kLong);
  TORCH_CHECK(!rule.has_priorities || priorities.numel() == ItemsOfRing(shape, rule),
              "gear: priorities must have a value per item");
  TORCH_CHECK(removed.numel() == ids.numel(), "gear: removed must have a value per id");
}

// A column of flags of the environments.
inline const bool* EnvFlags(const at::Tensor& flags, const char* name, int64_t num_envs) {
  CheckTensor(flags, name, at::kBool);
  TORCH_CHECK(flags.numel() == num_envs, "gear: ", name, " must have a value per environment");
  return flags.const_data_ptr<bool>();
}

inline EnvSteps CheckRingExtend(const at::Tensor& state, const at::Tensor& slots,
                                const at::Tensor& opened, const at::Tensor& owners,
                                const at::Tensor& sums, const at::Tensor& minima,
                                const at::Tensor& priorities, const at::Tensor& placed,
                                const at::Tensor& begun, const at::Tensor& truncations,
                                const at::Tensor& terminated,
                                const std::optional<at::Tensor>& truncated,
                                const std::optional<at::Tensor>& mask, const RingShape& shape,
                                const RingRule& rule, int64_t initial, bool next_step) {
  CheckState(state);
  CheckRing(slots, sums, minima, shape, rule);
  CheckRecords(opened, "opened", sizeof(OpenTrajectory) / sizeof(int64_t));
  CheckRecords(placed, "placed", sizeof(PlacedStep) / sizeof(int64_t));
  CheckRecords(begun, "begun", 3);
  CheckTensor(owners, "owners", at::kInt);
  CheckTensor(priorities, "priorities", at::kFloat);
  CheckTensor(truncations, "truncations", at::kBool);
  const int64_t num_envs = opened.size(0);
  TORCH_CHECK(
      num_envs > 0 && shape.num_rows % num_envs == 0 &&
          shape.num_rows / num_envs >= 2 * (shape.most_steps + shape.final_row) &&
          shape.num_slots >= 2 * num_envs,
      "gear: a ring must have rows for two longest trajectories, and two slots, of each of ",
      num_envs, " environments, got ", shape.num_rows, " rows and ", shape.num_slots, " slots");
  TORCH_CHECK(owners.numel() == shape.num_rows &&
                  (truncations.numel() == 0 || truncations.numel() == shape.num_rows),
              "gear: owners and truncations must have a value per row");
  TORCH_CHECK(!rule.has_priorities || priorities.numel() == ItemsOfRing(shape, rule),
              "gear: priorities must have a value per item");
  TORCH_CHECK(placed.size(0) == num_envs && begun.size(0) == num_envs,
              "gear: placed and begun must have a row per environment");
  TORCH_CHECK(initial < 0 || (initial > 0 && initial < 0x7F800000),
              "gear: initial must be the bits of a positive float32, or below 0, got ", initial);
  return {EnvFlags(terminated, "terminated", num_envs),
          truncated ? EnvFlags(*truncated, "truncated", num_envs) : nullptr,
          mask ? EnvFlags(*mask, "mask", num_envs) : nullptr, next_step, num_envs};
}

inline cpu::OpenRing OpenRingOf(at::Tensor& opened, at::Tensor& owners, at::Tensor& truncations) {
  return {reinterpret_cast<OpenTrajectory*>(opened.mutable_data_ptr<int64_t>()),
          owners.mutable_data_ptr<int32_t>(),
          truncations.numel() > 0 ? truncations.mutable_data_ptr<bool>() : nullptr};
}

// What every selection reads and writes.
inline cpu::RingDraw CheckDraw(const at::Tensor& state, const at::Tensor& resolutions,
                               const at::Tensor& weights, const at::Tensor& slots,
                               const at::Tensor& sums, const RingShape& shape, const RingRule& rule,
                               at::IntArrayRef draw) {
  CheckState(state);
  CheckRecords(slots, "slots", kSlotWords);
  TORCH_CHECK(slots.size(0) == shape.num_slots, "gear: slots must be ", shape.num_slots, ", got ",
              slots.size(0));
  CheckTree(sums, ItemsOfRing(shape, rule));
  CheckRecords(resolutions, "resolutions", kResolutionWords);
  CheckTensor(weights, "weights", at::kFloat);
  TORCH_CHECK(weights.numel() == 0 || weights.numel() == resolutions.size(0),
              "gear: weights must have a value per resolution, or none");
  TORCH_CHECK(draw.size() == 6 && draw[2] > 0 && draw[3] >= 0 && draw[5] >= kNotNormalized &&
                  draw[5] <= kByTable,
              "gear: draw must be seed, stream, stride, offset, stratified and normalize, got ",
              draw);
  return {static_cast<uint64_t>(draw[0]),
          static_cast<uint32_t>(draw[1]),
          draw[2],
          draw[3],
          draw[4] != 0,
          draw[5],
          nullptr,
          0};
}

// Draws that are weighed: with the least masses and the exponents of the weights.
inline cpu::RingDraw CheckWeighedDraw(const at::Tensor& state, const at::Tensor& resolutions,
                                      const at::Tensor& weights, const at::Tensor& slots,
                                      const at::Tensor& sums, const at::Tensor& minima,
                                      const at::Tensor& betas, const RingShape& shape,
                                      const RingRule& rule, at::IntArrayRef draw) {
  cpu::RingDraw found = CheckDraw(state, resolutions, weights, slots, sums, shape, rule, draw);
  CheckRing(slots, sums, minima, shape, rule);
  CheckTensor(betas, "betas", at::kLong);
  if (weights.numel() == 0) return found;
  TORCH_CHECK(betas.numel() > 0, "gear: betas must have a value at least");
  TORCH_CHECK(found.normalize != kByTable || minima.numel() > 0 ||
                  MinimaWords(ItemsOfRing(shape, rule)) == 0,
              "gear: weights that are normalized by the table need its minima");
  found.betas = betas.const_data_ptr<int64_t>();
  found.num_betas = betas.numel();
  return found;
}

inline cpu::RingDraw CheckRingSelect(const at::Tensor& state, const at::Tensor& resolutions,
                                     const at::Tensor& weights, const at::Tensor& slots,
                                     const at::Tensor& sums, const at::Tensor& minima,
                                     const at::Tensor& row_slots, const at::Tensor& betas,
                                     const RingShape& shape, const RingRule& rule,
                                     at::IntArrayRef draw) {
  CheckRowSlots(row_slots, shape, rule);
  return CheckWeighedDraw(state, resolutions, weights, slots, sums, minima, betas, shape, rule,
                          draw);
}

inline cpu::RingDraw CheckRingSelectLimited(const at::Tensor& state, const at::Tensor& resolutions,
                                            const at::Tensor& weights, const at::Tensor& slots,
                                            const at::Tensor& sums, const at::Tensor& minima,
                                            const at::Tensor& betas, const RingShape& shape,
                                            const RingRule& rule, at::IntArrayRef draw,
                                            int64_t most) {
  const cpu::RingDraw found =
      CheckWeighedDraw(state, resolutions, weights, slots, sums, minima, betas, shape, rule, draw);
  TORCH_CHECK(!found.stratified, "gear: limited draws must not be stratified");
  TORCH_CHECK(most > 0, "gear: most must be at least 1, got ", most);
  return found;
}

inline cpu::RingDraw CheckRingTopK(const at::Tensor& state, const at::Tensor& resolutions,
                                   const at::Tensor& weights, const at::Tensor& slots,
                                   const at::Tensor& sums, const at::Tensor& priorities,
                                   const at::Tensor& row_slots, const RingShape& shape,
                                   const RingRule& rule, at::IntArrayRef draw, bool counts) {
  CheckRowSlots(row_slots, shape, rule);
  CheckTensor(priorities, "priorities", at::kFloat);
  TORCH_CHECK(priorities.numel() == ItemsOfRing(shape, rule),
              "gear: priorities must have a value per item");
  TORCH_CHECK(!counts || !rule.by_row, "gear: draws of steps must not be counted");
  return CheckDraw(state, resolutions, weights, slots, sums, shape, rule, draw);
}

inline void CheckRingUpdate(const at::Tensor& state, const at::Tensor& sums,
                            const at::Tensor& minima, const at::Tensor& priorities,
                            const at::Tensor& slots, const at::Tensor& resolutions,
                            const at::Tensor& values, const RingShape& shape,
                            const RingRule& rule) {
  CheckState(state);
  CheckRing(slots, sums, minima, shape, rule);
  CheckTensor(priorities, "priorities", at::kFloat);
  CheckRecords(resolutions, "resolutions", kResolutionWords);
  CheckTensor(values, "values", at::kFloat);
  TORCH_CHECK(priorities.numel() == ItemsOfRing(shape, rule),
              "gear: priorities must have a value per item");
  TORCH_CHECK(values.numel() == resolutions.size(0), "gear: values must have one per resolution");
}

// The columns that rows are written to. `values` holds rows for `count` trajectories.
inline std::vector<cpu::ScatterColumn> ScatterColumns(at::TensorList columns, at::TensorList values,
                                                      const at::Tensor& placed,
                                                      at::IntArrayRef sources) {
  CheckTensor(placed, "placed", at::kLong);
  TORCH_CHECK(placed.dim() == 2 && placed.size(1) >= 3, "gear: placed must be [n, 3 or more], got ",
              placed.sizes());
  TORCH_CHECK(columns.size() == values.size() && columns.size() == sources.size(),
              "gear: there must be as many values and sources as columns");
  const int64_t count = placed.size(0);
  std::vector<cpu::ScatterColumn> found;
  for (size_t c = 0; c < columns.size(); ++c) {
    const at::Tensor& column = columns[c];
    const at::Tensor& from = values[c];
    TORCH_CHECK(sources[c] >= cpu::kStepRows && sources[c] <= cpu::kTrajectoryRow, "gear: source ",
                c, " must be that of a column, got ", sources[c]);
    const bool is_single = sources[c] == cpu::kTrajectoryRow;
    TORCH_CHECK(column.is_contiguous() && from.is_contiguous() && column.dim() >= 1 &&
                    column.scalar_type() == from.scalar_type(),
                "gear: column ", c, " and its values must be contiguous and of one dtype, got ",
                column.scalar_type(), " and ", from.scalar_type());
    const int64_t more = is_single ? 1 : 2;
    TORCH_CHECK(from.dim() == column.dim() - 1 + more && from.size(0) == count &&
                    from.sizes().slice(more) == column.sizes().slice(1),
                "gear: values ", c, " must be [", count, is_single ? "" : ", steps",
                ", *shape of a row], got ", from.sizes());
    int64_t row = column.element_size();
    for (int64_t d = 1; d < column.dim(); ++d) row *= column.size(d);
    found.push_back({static_cast<char*>(column.mutable_data_ptr()),
                     static_cast<const char*>(from.const_data_ptr()), column.size(0), row,
                     is_single ? 1 : from.size(1), sources[c]});
  }
  return found;
}

}  // namespace gear
