// The ops of a table in the memory of one device, on the host. They are defined in
// deepspeed_gear/ops/reference/ring_table.py.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "bindings/check_ring.h"
#include "bindings/op_table.h"

namespace gear {
namespace {

uint64_t* MinimaOf(at::Tensor& minima) { return minima.numel() > 0 ? Unsigned(minima) : nullptr; }

void RingAdd(at::Tensor& state, at::Tensor& slots, at::Tensor& begins, at::Tensor& sums,
             at::Tensor& minima, at::Tensor& priorities, at::Tensor& row_slots, at::Tensor& placed,
             const at::Tensor& lengths, at::IntArrayRef rule, at::IntArrayRef shape, int64_t unit,
             int64_t alpha, int64_t initial, int64_t most_bits) {
  const RingShape ring_shape = ShapeOfRing(shape);
  const RingRule ring_rule = RuleOfRing(rule, unit, priorities.numel() > 0, alpha, most_bits);
  CheckRingAdd(state, slots, begins, sums, minima, priorities, row_slots, placed, lengths,
               ring_shape, ring_rule, initial);
  const cpu::Ring ring{state.mutable_data_ptr<int64_t>(),
                       reinterpret_cast<Slot*>(slots.mutable_data_ptr<int64_t>()),
                       begins.mutable_data_ptr<int64_t>(),
                       Unsigned(sums),
                       MinimaOf(minima),
                       ring_rule.has_priorities ? priorities.mutable_data_ptr<float>() : nullptr,
                       row_slots.mutable_data_ptr<int32_t>()};
  cpu::RingAdd(ring, ring_shape, ring_rule, lengths.const_data_ptr<int64_t>(), lengths.numel(),
               initial, reinterpret_cast<Placed*>(placed.mutable_data_ptr<int64_t>()));
}

void RingExtend(at::Tensor& state, at::Tensor& slots, at::Tensor& opened, at::Tensor& owners,
                at::Tensor& sums, at::Tensor& minima, at::Tensor& priorities, at::Tensor& placed,
                at::Tensor& begun, at::Tensor& truncations, const at::Tensor& terminated,
                const std::optional<at::Tensor>& truncated, const std::optional<at::Tensor>& mask,
                at::IntArrayRef rule, at::IntArrayRef shape, int64_t unit, int64_t alpha,
                int64_t initial, int64_t most_bits, bool next_step) {
  const RingShape ring_shape = ShapeOfRing(shape);
  const RingRule ring_rule = RuleOfRing(rule, unit, priorities.numel() > 0, alpha, most_bits);
  const EnvSteps steps = CheckRingExtend(state, slots, opened, owners, sums, minima, priorities,
                                         placed, begun, truncations, terminated, truncated, mask,
                                         ring_shape, ring_rule, initial, next_step);
  const cpu::Ring ring{state.mutable_data_ptr<int64_t>(),
                       reinterpret_cast<Slot*>(slots.mutable_data_ptr<int64_t>()),
                       nullptr,
                       Unsigned(sums),
                       MinimaOf(minima),
                       ring_rule.has_priorities ? priorities.mutable_data_ptr<float>() : nullptr,
                       nullptr};
  cpu::RingExtend(ring, OpenRingOf(opened, owners, truncations), ring_shape, ring_rule, steps,
                  initial, reinterpret_cast<PlacedStep*>(placed.mutable_data_ptr<int64_t>()),
                  begun.mutable_data_ptr<int64_t>());
}

void RingRemove(at::Tensor& state, at::Tensor& slots, at::Tensor& sums, at::Tensor& minima,
                at::Tensor& priorities, at::Tensor& removed, const at::Tensor& ids,
                at::IntArrayRef shape, int64_t unit) {
  const RingShape ring_shape = ShapeOfRing(shape);
  const RingRule ring_rule = RuleOfRing({0, 0, 1, 1, 0}, unit, priorities.numel() > 0, 0);
  CheckRingRemove(state, slots, sums, minima, priorities, removed, ids, ring_shape, ring_rule);
  const cpu::Ring ring{state.mutable_data_ptr<int64_t>(),
                       reinterpret_cast<Slot*>(slots.mutable_data_ptr<int64_t>()),
                       nullptr,
                       Unsigned(sums),
                       MinimaOf(minima),
                       ring_rule.has_priorities ? priorities.mutable_data_ptr<float>() : nullptr,
                       nullptr};
  cpu::RingRemove(ring, ring_shape, ring_rule, ids.const_data_ptr<int64_t>(), ids.numel(),
                  removed.mutable_data_ptr<int64_t>());
}

void RingSelect(at::Tensor& state, at::Tensor& resolutions, at::Tensor& weights,
                const at::Tensor& slots, const at::Tensor& sums, const at::Tensor& minima,
                const at::Tensor& row_slots, const at::Tensor& betas, at::IntArrayRef rule,
                at::IntArrayRef shape, at::IntArrayRef draw, int64_t unit) {
  const RingShape ring_shape = ShapeOfRing(shape);
  const RingRule ring_rule = RuleOfRing(rule, unit, row_slots.numel() > 0, 0);
  const cpu::RingDraw ring_draw = CheckRingSelect(state, resolutions, weights, slots, sums, minima,
                                                  row_slots, betas, ring_shape, ring_rule, draw);
  // Only the state is written to.
  const cpu::Ring ring{state.mutable_data_ptr<int64_t>(),
                       const_cast<Slot*>(Records<Slot>(slots)),
                       nullptr,
                       const_cast<uint64_t*>(Unsigned(sums)),
                       minima.numel() > 0 ? const_cast<uint64_t*>(Unsigned(minima)) : nullptr,
                       nullptr,
                       const_cast<int32_t*>(row_slots.const_data_ptr<int32_t>())};
  cpu::RingSelect(ring, ring_shape, ring_rule, ring_draw, resolutions.size(0),
                  reinterpret_cast<Resolution*>(resolutions.mutable_data_ptr<int64_t>()),
                  weights.numel() > 0 ? weights.mutable_data_ptr<float>() : nullptr);
}

void RingSelectLimited(at::Tensor& state, at::Tensor& resolutions, at::Tensor& weights,
                       at::Tensor& slots, at::Tensor& sums, at::Tensor& minima,
                       const at::Tensor& betas, at::IntArrayRef rule, at::IntArrayRef shape,
                       at::IntArrayRef draw, int64_t unit, int64_t most) {
  const RingShape ring_shape = ShapeOfRing(shape);
  const RingRule ring_rule = RuleOfRing(rule, unit, false, 0);
  const cpu::RingDraw ring_draw = CheckRingSelectLimited(
      state, resolutions, weights, slots, sums, minima, betas, ring_shape, ring_rule, draw, most);
  const cpu::Ring ring{state.mutable_data_ptr<int64_t>(),
                       reinterpret_cast<Slot*>(slots.mutable_data_ptr<int64_t>()),
                       nullptr,
                       Unsigned(sums),
                       MinimaOf(minima),
                       nullptr,
                       nullptr};
  cpu::RingSelectLimited(ring, ring_shape, ring_rule, ring_draw, resolutions.size(0), most,
                         reinterpret_cast<Resolution*>(resolutions.mutable_data_ptr<int64_t>()),
                         weights.numel() > 0 ? weights.mutable_data_ptr<float>() : nullptr);
}

void RingTopK(at::Tensor& state, at::Tensor& resolutions, at::Tensor& weights, at::Tensor& slots,
              const at::Tensor& sums, const at::Tensor& priorities, const at::Tensor& row_slots,
              at::IntArrayRef rule, at::IntArrayRef shape, at::IntArrayRef draw, int64_t unit,
              bool counts) {
  const RingShape ring_shape = ShapeOfRing(shape);
  const RingRule ring_rule = RuleOfRing(rule, unit, row_slots.numel() > 0, 0);
  const cpu::RingDraw ring_draw =
      CheckRingTopK(state, resolutions, weights, slots, sums, priorities, row_slots, ring_shape,
                    ring_rule, draw, counts);
  // Only the state and the slots are written to.
  const cpu::Ring ring{state.mutable_data_ptr<int64_t>(),
                       reinterpret_cast<Slot*>(slots.mutable_data_ptr<int64_t>()),
                       nullptr,
                       const_cast<uint64_t*>(Unsigned(sums)),
                       nullptr,
                       const_cast<float*>(priorities.const_data_ptr<float>()),
                       const_cast<int32_t*>(row_slots.const_data_ptr<int32_t>())};
  cpu::RingTopK(ring, ring_shape, ring_rule, ring_draw, resolutions.size(0), counts,
                reinterpret_cast<Resolution*>(resolutions.mutable_data_ptr<int64_t>()),
                weights.numel() > 0 ? weights.mutable_data_ptr<float>() : nullptr);
}

void RingUpdate(at::Tensor& state, at::Tensor& sums, at::Tensor& minima, at::Tensor& priorities,
                const at::Tensor& slots, const at::Tensor& resolutions, const at::Tensor& values,
                at::IntArrayRef rule, at::IntArrayRef shape, int64_t unit, int64_t alpha,
                int64_t most_bits) {
  const RingShape ring_shape = ShapeOfRing(shape);
  const RingRule ring_rule = RuleOfRing(rule, unit, true, alpha, most_bits);
  CheckRingUpdate(state, sums, minima, priorities, slots, resolutions, values, ring_shape,
                  ring_rule);
  const cpu::Ring ring{state.mutable_data_ptr<int64_t>(),
                       const_cast<Slot*>(Records<Slot>(slots)),
                       nullptr,
                       Unsigned(sums),
                       MinimaOf(minima),
                       priorities.mutable_data_ptr<float>(),
                       nullptr};
  cpu::RingUpdate(ring, ring_shape, ring_rule, Resolutions(resolutions),
                  values.const_data_ptr<float>(), values.numel());
}

void Scatter(at::TensorList columns, at::TensorList values, const at::Tensor& placed,
             at::IntArrayRef sources) {
  const std::vector<cpu::ScatterColumn> found = ScatterColumns(columns, values, placed, sources);
  TORCH_CHECK(cpu::Scatter(found.data(), static_cast<int64_t>(found.size()),
                           placed.const_data_ptr<int64_t>(), placed.size(1), placed.size(0)),
              "gear: every place must lie in the columns");
}

}  // namespace
}  // namespace gear

TORCH_LIBRARY_IMPL(gear, CPU, m) { GEAR_RING_OPS(GEAR_IMPLEMENT) }
