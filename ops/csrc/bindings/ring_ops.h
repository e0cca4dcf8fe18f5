// The ops of a table in the memory of one device, a ring: on the host and on devices.
//
// They are defined in deepspeed_gear/ops/reference/ring_table.py.
#pragma once
#include <vector>

#include "bindings/device.h"
#include "bindings/tensors.h"
#include "gather/gather.h"
#include "ring/epoch.h"
#include "ring/ring.h"

namespace gear {

inline constexpr const char* kOfRing = "every tensor of a ring";

// A ring without memory. `alpha`, `most_bits`: of ops that set priorities.
inline cpu::Ring RingOf(at::IntArrayRef shape, at::IntArrayRef rule, int64_t unit,
                        bool has_priorities, int64_t alpha = 0, int64_t most_bits = kMostMassBits) {
  TORCH_CHECK(shape.size() == 4 && shape[0] > 0 && shape[1] > 0 &&
                  (shape[2] == 0 || shape[2] == 1) && shape[3] > 0 && shape[3] <= kMostSteps,
              "gear: shape must be rows, slots, final row (0 or 1) and most steps, got ", shape);
  TORCH_CHECK(shape[0] <= kMostIndices && shape[1] <= kMostIndices,
              "gear: rows and slots must be fewer than 2^31 - 1, got ", shape[0], " and ",
              shape[1]);
  TORCH_CHECK(unit == kTrajectory || unit == kStep || unit == kByLength,
              "gear: unit must be 0, 1 or 2, got ", unit);
  cpu::Ring ring{};
  ring.shape = {shape[0], shape[1], shape[2], shape[3]};
  ring.rule = {AnchorsOf(rule), unit, has_priorities, has_priorities && unit == kStep,
               ScaleOf(alpha, most_bits)};
  return ring;
}

// An op gets as const what it does not write to.
template <typename Slots, typename Sums>
void SetMemory(cpu::Ring* ring, at::Tensor& state, Slots& slots, Sums& sums) {
  ring->state = Values<int64_t>(state, "state", kRingWords);
  ring->slots = const_cast<Slot*>(Rows<Slot>(slots, "slots", ring->shape.num_slots));
  ring->sums = const_cast<uint64_t*>(TreeOf(sums, ring->NumItems()));
}

template <typename Slots, typename Sums, typename Minima>
void SetMemory(cpu::Ring* ring, at::Tensor& state, Slots& slots, Sums& sums, Minima& minima) {
  SetMemory(ring, state, slots, sums);
  ring->minima = const_cast<uint64_t*>(MinimaOrNull(minima, ring->NumItems()));
}

inline float* PrioritiesOf(const cpu::Ring& ring, at::Tensor& priorities) {
  const bool has_priorities = ring.rule.has_priorities;
  auto* values = Values<float>(priorities, "priorities", has_priorities ? ring.NumItems() : kAny);
  return has_priorities ? values : nullptr;
}

template <typename RowSlots>
int32_t* RowSlotsOf(const cpu::Ring& ring, RowSlots& row_slots) {
  const int64_t count = ring.rule.by_row ? ring.shape.num_rows : 0;
  return const_cast<int32_t*>(Values<int32_t>(row_slots, "row_slots", count));
}

inline void CheckInitial(int64_t initial) {
  TORCH_CHECK(initial < 0 || (initial > 0 && initial < 0x7F800000),
              "gear: initial must be the bits of a positive float32, or below 0, got ", initial);
}

inline void RingAdd(at::Tensor& state, at::Tensor& slots, at::Tensor& begins, at::Tensor& sums,
                    at::Tensor& minima, at::Tensor& priorities, at::Tensor& row_slots,
                    at::Tensor& placed, const at::Tensor& lengths, at::IntArrayRef rule,
                    at::IntArrayRef shape, int64_t unit, int64_t alpha, int64_t initial,
                    int64_t most_bits) {
  cpu::Ring ring = RingOf(shape, rule, unit, priorities.numel() > 0, alpha, most_bits);
  SetMemory(&ring, state, slots, sums, minima);
  ring.priorities = PrioritiesOf(ring, priorities);
  ring.row_slots = RowSlotsOf(ring, row_slots);
  ring.begins = Values<int64_t>(begins, "begins", ring.shape.num_slots);
  const int64_t count = lengths.numel(), longest = ring.shape.most_steps + ring.shape.final_row;
  const int64_t* steps = Values<int64_t>(lengths, "lengths");
  // So that added trajectories never overwrite each other, and at most one run of rows is left out.
  TORCH_CHECK(count <= ring.shape.num_slots && count < ring.shape.num_rows / longest,
              "gear: ", count, " trajectories of up to ", ring.shape.most_steps,
              " steps must fit, and one more, into ", ring.shape.num_rows, " rows and ",
              ring.shape.num_slots, " slots");
  CheckInitial(initial);
  const Device device(state, kOfRing, slots, begins, sums, minima, priorities, row_slots, placed,
                      lengths);
  device.Run(on::RingAdd, ring, steps, count, initial, Rows<Placed>(placed, "placed", count));
}

// A column of flags of the environments.
inline const bool* FlagsOf(const std::optional<at::Tensor>& flags, const char* name,
                           int64_t num_envs) {
  return flags ? Values<bool>(*flags, name, num_envs) : nullptr;
}

struct BegunStep {
  int64_t slot, row, is_begun;
};

inline void RingExtend(at::Tensor& state, at::Tensor& slots, at::Tensor& opened, at::Tensor& owners,
                       at::Tensor& sums, at::Tensor& minima, at::Tensor& priorities,
                       at::Tensor& placed, at::Tensor& begun, at::Tensor& truncations,
                       const at::Tensor& terminated, const std::optional<at::Tensor>& truncated,
                       const std::optional<at::Tensor>& mask, at::IntArrayRef rule,
                       at::IntArrayRef shape, int64_t unit, int64_t alpha, int64_t initial,
                       int64_t most_bits, bool next_step) {
  cpu::Ring ring = RingOf(shape, rule, unit, priorities.numel() > 0, alpha, most_bits);
  SetMemory(&ring, state, slots, sums, minima);
  ring.priorities = PrioritiesOf(ring, priorities);
  const int64_t num_rows = ring.shape.num_rows, num_slots = ring.shape.num_slots;
  const cpu::OpenRing open{Rows<OpenTrajectory>(opened, "opened"),
                           Values<int32_t>(owners, "owners", num_rows),
                           ValuesOrNull<bool>(truncations, "truncations", num_rows)};
  const int64_t num_envs = opened.size(0);
  TORCH_CHECK(num_envs > 0 && num_rows % num_envs == 0 &&
                  num_rows / num_envs >= 2 * (ring.shape.most_steps + ring.shape.final_row) &&
                  num_slots >= 2 * num_envs,
              "gear: a ring must have rows for two longest trajectories, and two slots, of each "
              "of ",
              num_envs, " environments, got ", num_rows, " rows and ", num_slots, " slots");
  CheckInitial(initial);
  const EnvSteps steps{Values<bool>(terminated, "terminated", num_envs),
                       FlagsOf(truncated, "truncated", num_envs), FlagsOf(mask, "mask", num_envs),
                       next_step, num_envs};
  auto* begins = Rows<BegunStep>(begun, "begun", num_envs);
  const Device device(state, kOfRing, slots, opened, owners, sums, minima, priorities, placed,
                      begun, truncations, terminated, truncated, mask);
  device.Run(on::RingExtend, ring, open, steps, initial,
             Rows<PlacedStep>(placed, "placed", num_envs), &begins->slot);
}

inline void RingRemove(at::Tensor& state, at::Tensor& slots, at::Tensor& sums, at::Tensor& minima,
                       at::Tensor& priorities, at::Tensor& removed, const at::Tensor& ids,
                       at::IntArrayRef shape, int64_t unit) {
  cpu::Ring ring = RingOf(shape, {0, 0, 1, 1, 0}, unit, priorities.numel() > 0);
  SetMemory(&ring, state, slots, sums, minima);
  ring.priorities = PrioritiesOf(ring, priorities);
  const int64_t count = ids.numel();
  const Device device(state, kOfRing, slots, sums, minima, priorities, removed, ids);
  device.Run(on::RingRemove, ring, Values<int64_t>(ids, "ids"), count,
             Values<int64_t>(removed, "removed", count));
}

// How a batch is drawn; of one that is not weighed.
inline cpu::RingDraw DrawOf(at::IntArrayRef draw) {
  TORCH_CHECK(draw.size() == 6 && draw[2] > 0 && draw[3] >= 0 && draw[5] >= kNotNormalized &&
                  draw[5] <= kByTable,
              "gear: draw must be seed, stream, stride, offset, stratified and normalize, got ",
              draw);
  cpu::RingDraw found{};
  found.seed = static_cast<uint64_t>(draw[0]);
  found.stream = static_cast<uint32_t>(draw[1]);
  found.stride = draw[2];
  found.offset = draw[3];
  found.stratified = draw[4] != 0;
  found.normalize = draw[5];
  return found;
}

// With what the weights need, if there are any: their exponents, and by the table its least masses.
inline cpu::RingDraw WeighedDrawOf(at::IntArrayRef draw, const cpu::Ring& ring, bool has_weights,
                                   const at::Tensor& betas) {
  cpu::RingDraw found = DrawOf(draw);
  const int64_t* exponents = Values<int64_t>(betas, "betas");
  if (!has_weights) return found;
  TORCH_CHECK(betas.numel() > 0, "gear: betas must have a value at least");
  TORCH_CHECK(
      found.normalize != kByTable || ring.minima != nullptr || MinimaWords(ring.NumItems()) == 0,
      "gear: weights that are normalized by the table need its minima");
  found.betas = exponents;
  found.num_betas = betas.numel();
  return found;
}

inline void RingSelect(at::Tensor& state, at::Tensor& resolutions, at::Tensor& weights,
                       const at::Tensor& slots, const at::Tensor& sums, const at::Tensor& minima,
                       const at::Tensor& row_slots, const at::Tensor& betas, at::IntArrayRef rule,
                       at::IntArrayRef shape, at::IntArrayRef draw, int64_t unit) {
  cpu::Ring ring = RingOf(shape, rule, unit, row_slots.numel() > 0);
  SetMemory(&ring, state, slots, sums, minima);
  ring.row_slots = RowSlotsOf(ring, row_slots);
  const auto [records, count] = CountedRows<Resolution>(resolutions, "resolutions");
  float* weighed = ValuesOrNull<float>(weights, "weights", count);
  const cpu::RingDraw found = WeighedDrawOf(draw, ring, weighed != nullptr, betas);
  const Device device(state, kOfRing, resolutions, weights, slots, sums, minima, row_slots, betas);
  device.Run(on::RingSelect, ring, found, count, records, weighed);
}

inline void RingSelectLimited(at::Tensor& state, at::Tensor& resolutions, at::Tensor& weights,
                              at::Tensor& slots, at::Tensor& sums, at::Tensor& minima,
                              const at::Tensor& betas, at::IntArrayRef rule, at::IntArrayRef shape,
                              at::IntArrayRef draw, int64_t unit, int64_t most) {
  cpu::Ring ring = RingOf(shape, rule, unit, false);
  SetMemory(&ring, state, slots, sums, minima);
  const auto [records, count] = CountedRows<Resolution>(resolutions, "resolutions");
  float* weighed = ValuesOrNull<float>(weights, "weights", count);
  const cpu::RingDraw found = WeighedDrawOf(draw, ring, weighed != nullptr, betas);
  TORCH_CHECK(!found.stratified, "gear: limited draws must not be stratified");
  TORCH_CHECK(most > 0, "gear: most must be at least 1, got ", most);
  const Device device(state, kOfRing, resolutions, weights, slots, sums, minima, betas);
  device.Run(on::RingSelectLimited, ring, found, count, most, records, weighed);
}

inline void RingTopK(at::Tensor& state, at::Tensor& resolutions, at::Tensor& weights,
                     at::Tensor& slots, const at::Tensor& sums, const at::Tensor& priorities,
                     const at::Tensor& row_slots, at::IntArrayRef rule, at::IntArrayRef shape,
                     at::IntArrayRef draw, int64_t unit, bool counts) {
  cpu::Ring ring = RingOf(shape, rule, unit, row_slots.numel() > 0);
  SetMemory(&ring, state, slots, sums);
  ring.row_slots = RowSlotsOf(ring, row_slots);
  ring.priorities = const_cast<float*>(Values<float>(priorities, "priorities", ring.NumItems()));
  TORCH_CHECK(!counts || !ring.rule.by_row, "gear: draws of steps must not be counted");
  const auto [records, count] = CountedRows<Resolution>(resolutions, "resolutions");
  float* weighed = ValuesOrNull<float>(weights, "weights", count);
  const Device device(state, kOfRing, resolutions, weights, slots, sums, priorities, row_slots);
  device.RunWith(on::RingTopKScratch(ring, count), on::RingTopK, ring, DrawOf(draw), count, counts,
                 records, weighed);
}

inline void RingEpoch(at::Tensor& state, at::Tensor& resolutions, at::Tensor& epochs,
                      const at::Tensor& slots, const at::Tensor& sums, at::IntArrayRef rule,
                      at::IntArrayRef shape, at::IntArrayRef draw, int64_t unit) {
  cpu::Ring ring = RingOf(shape, rule, unit, false);
  SetMemory(&ring, state, slots, sums);
  const auto [records, count] = CountedRows<Resolution>(resolutions, "resolutions");
  int64_t* numbers = Values<int64_t>(epochs, "epochs", count);
  TORCH_CHECK(draw.size() == 6 && draw[2] > 0 && draw[3] >= 0 && draw[3] < draw[2],
              "gear: draw must be seed, stream, stride, offset, shared and drops_tail, got ", draw);
  cpu::EpochDraw how{};
  how.base.seed = static_cast<uint64_t>(draw[0]);
  how.base.stream = static_cast<uint32_t>(draw[1]);
  how.base.stride = draw[2];
  how.base.offset = draw[3];
  how.is_shared = draw[4] != 0;
  how.drops_tail = draw[5] != 0;
  const Device device(state, kOfRing, resolutions, epochs, slots, sums);
  device.Run(on::RingEpoch, ring, how, count, records, numbers);
}

inline void RingUpdate(at::Tensor& state, at::Tensor& sums, at::Tensor& minima,
                       at::Tensor& priorities, const at::Tensor& slots,
                       const at::Tensor& resolutions, const at::Tensor& values,
                       at::IntArrayRef rule, at::IntArrayRef shape, int64_t unit, int64_t alpha,
                       int64_t most_bits) {
  cpu::Ring ring = RingOf(shape, rule, unit, true, alpha, most_bits);
  SetMemory(&ring, state, slots, sums, minima);
  ring.priorities = PrioritiesOf(ring, priorities);
  const auto [records, count] = CountedRows<Resolution>(resolutions, "resolutions");
  const float* reported = Values<float>(values, "values", count);
  const Device device(state, kOfRing, sums, minima, priorities, slots, resolutions, values);
  device.RunWith(on::RingUpdateScratch(count), on::RingUpdate, ring, records, reported, count);
}

// `values`: rows for as many trajectories as there are places.
inline void Scatter(at::TensorList columns, at::TensorList values, const at::Tensor& placed,
                    at::IntArrayRef sources) {
  const int64_t* places = Values<int64_t>(placed, "placed");
  TORCH_CHECK(placed.dim() == 2 && placed.size(1) >= 3, "gear: placed must be [n, 3 or more], got ",
              placed.sizes());
  TORCH_CHECK(columns.size() == values.size() && columns.size() == sources.size(),
              "gear: there must be as many values and sources as columns");
  const int64_t count = placed.size(0);
  const Device device(placed, "every column and value", columns, values);
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
  const auto num_columns = static_cast<int64_t>(found.size());
  if constexpr (Device::kIsHost) {
    TORCH_CHECK(cpu::Scatter(found.data(), num_columns, places, placed.size(1), count),
                "gear: every place must lie in the columns");
  } else {
    cuda::Scatter(found.data(), num_columns, places, placed.size(1), count, device.stream());
  }
}

}  // namespace gear
