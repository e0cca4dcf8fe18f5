// Checks of the bindings of both devices before a kernel runs: all that keeps its accesses inside
// its tensors.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cmath>
#include <optional>

#include "common/convert.h"
#include "common/tree.h"
#include "draws/draws.h"
#include "gather/gather.h"
#include "priorities/priorities.h"
#include "returns/returns.h"
#include "rows/rows.h"
#include "select/select.h"

namespace gear {

inline constexpr int64_t kSlotWords = sizeof(Slot) / sizeof(int64_t);
inline constexpr int64_t kResolutionWords = sizeof(Resolution) / sizeof(int64_t);
inline constexpr int64_t kFieldInts =
    10;  // source, offset, length, align, after_n_step, pad, elements, index of the mask, first and
         // count of the part

inline int64_t CodeOf(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBool:
      return kBool;
    case at::kByte:
      return kUint8;
    case at::kChar:
      return kInt8;
    case at::kShort:
      return kInt16;
    case at::kInt:
      return kInt32;
    case at::kLong:
      return kInt64;
    case at::kHalf:
      return kFloat16;
    case at::kBFloat16:
      return kBfloat16;
    case at::kFloat:
      return kFloat32;
    case at::kDouble:
      return kFloat64;
    default:
      TORCH_CHECK(false, "gear: dtype ", tensor.scalar_type(), " is not supported");
  }
}

inline void CheckTensor(const at::Tensor& tensor, const char* name, at::ScalarType type) {
  TORCH_CHECK(tensor.scalar_type() == type, "gear: ", name, " must be ", type, ", got ",
              tensor.scalar_type());
  TORCH_CHECK(tensor.is_contiguous(), "gear: ", name, " must be contiguous");
}

inline void CheckRecords(const at::Tensor& tensor, const char* name, int64_t words) {
  CheckTensor(tensor, name, at::kLong);
  TORCH_CHECK(tensor.dim() == 2 && tensor.size(1) == words, "gear: ", name, " must be [n, ", words,
              "], got ", tensor.sizes());
}

inline void CheckTree(const at::Tensor& sums, int64_t num_items) {
  CheckTensor(sums, "sums", at::kLong);
  TORCH_CHECK(num_items >= 0 && sums.numel() == ShapeOfTree(num_items).words, "gear: sums of ",
              num_items, " items must have ", ShapeOfTree(num_items).words, " words, got ",
              sums.numel());
}

inline uint64_t* Unsigned(at::Tensor& tensor) {
  return reinterpret_cast<uint64_t*>(tensor.mutable_data_ptr<int64_t>());
}

inline const uint64_t* Unsigned(const at::Tensor& tensor) {
  return reinterpret_cast<const uint64_t*>(tensor.const_data_ptr<int64_t>());
}

// The rows of a tensor that CheckRecords has checked.
template <typename Record>
const Record* Records(const at::Tensor& tensor) {
  return reinterpret_cast<const Record*>(tensor.const_data_ptr<int64_t>());
}

inline const Resolution* Resolutions(const at::Tensor& tensor) {
  CheckRecords(tensor, "resolutions", kResolutionWords);
  return reinterpret_cast<const Resolution*>(tensor.const_data_ptr<int64_t>());
}

// Whether an integer dtype holds `value` exactly.
inline bool IsInteger(double value, int64_t dtype) {
  const int64_t bits = 8 * SizeOf(dtype) - (dtype == kBool || dtype == kUint8 ? 0 : 1);
  const double end = dtype == kBool ? 2.0 : std::ldexp(1.0, static_cast<int>(bits));
  const double low = dtype == kBool || dtype == kUint8 ? 0.0 : -end;
  return value >= low && value < end && value == std::floor(value);
}

// The error of a field, or null.
inline const char* CheckField(const cpu::Field& field) {
  if (field.source < cpu::kStepRows || field.source > cpu::kPosition) return "unknown source";
  if (field.from < 0 || field.from > kFloat64 || field.to < 0 || field.to > kFloat64)
    return "unknown dtype code";
  if (field.window.length < 1 || field.window.length > kMostSteps)
    return "length must be in [1, 2^40]";
  if (field.window.offset < -kMostSteps || field.window.offset > kMostSteps)
    return "offset must be in [-2^40, 2^40]";
  if (field.part.first < 0 || field.part.count < 1 ||
      field.part.first > field.window.length - field.part.count)
    return "first and count must be a part of the window: 0 <= first < first + count <= length";
  if (field.source == cpu::kTrajectoryRow && field.window.length != 1)
    return "a column of one row per trajectory has no window";
  if ((field.shift == nullptr) != (field.gain == nullptr)) return "shift and gain go together";
  if (field.to < kFloat16 && field.gain != nullptr) return "shift and gain need a floating dtype";
  if (field.to < kFloat16 && field.pad == kPadValue && !IsInteger(field.pad_value, field.to))
    return "the pad value must be a whole number that its dtype can hold";
  const bool same = field.from == field.to && field.gain == nullptr;
  return cpu::IsComputed(field.source) || same || IsConversion(field.from, field.to)
             ? nullptr
             : "no conversion between these dtypes";
}

inline cpu::Field FieldOf(const int64_t* spec, double pad_value, const at::Tensor& column,
                          const at::Tensor& shift, const at::Tensor& gain, const at::Tensor& out,
                          const at::Tensor* mask, int64_t count) {
  cpu::Field field{};
  field.source = spec[0];
  field.window = {spec[1], spec[2], spec[3]};
  field.after_n_step = spec[4];
  field.pad = spec[5];
  field.elements = spec[6];
  field.part = {spec[8], spec[9]};
  field.to = CodeOf(out);
  field.from = cpu::IsComputed(field.source) ? field.to : CodeOf(column);
  field.to_bytes = out.element_size();
  field.pad_value = field.pad == kPadEdge ? 0 : pad_value;
  TORCH_CHECK(out.is_contiguous() && column.is_contiguous(),
              "gear: out and columns must be contiguous");
  TORCH_CHECK(out.numel() == count * field.part.count * field.elements, "gear: out must hold ",
              count, " x ", field.part.count, " x ", field.elements, " elements, got ",
              out.sizes());
  TORCH_CHECK(!cpu::IsComputed(field.source) || field.to == kInt64,
              "gear: time steps and positions must be int64");
  TORCH_CHECK(cpu::IsComputed(field.source) || column.numel() % field.elements == 0,
              "gear: column must hold whole rows of ", field.elements, " elements");
  if (gain.numel() > 0) {
    for (const at::Tensor* t : {&shift, &gain}) CheckTensor(*t, "shift and gain", at::kDouble);
    field.period = gain.numel();
    TORCH_CHECK(
        shift.numel() == gain.numel() && (field.period == 1 || field.period % field.elements == 0),
        "gear: shift and gain must have equal sizes, 1 or a multiple of ", field.elements);
    field.shift = shift.const_data_ptr();
    field.gain = gain.const_data_ptr();
  }
  if (!cpu::IsComputed(field.source)) field.column = column.const_data_ptr();
  field.out = out.mutable_data_ptr();
  if (mask != nullptr) {
    CheckTensor(*mask, "mask", at::kBool);
    TORCH_CHECK(mask->numel() == count * field.part.count, "gear: mask must be [", count, ", ",
                field.part.count, "], got ", mask->sizes());
    field.mask = mask->mutable_data_ptr<bool>();
  }
  const char* wrong = CheckField(field);
  TORCH_CHECK(wrong == nullptr, "gear: ", wrong);
  return field;
}

using FieldList = c10::SmallVector<cpu::Field, 16>;

// The fields of a gather, each checked against its tensors.
inline FieldList FieldsOf(at::TensorList outs, at::TensorList masks, const at::Tensor& counters,
                          at::TensorList columns, at::TensorList shifts, at::TensorList gains,
                          const at::Tensor& resolutions, const std::optional<at::Tensor>& n_steps,
                          at::IntArrayRef spec, at::ArrayRef<double> pad_values) {
  const size_t num_fields = outs.size();
  const int64_t count = resolutions.size(0);
  TORCH_CHECK(
      columns.size() == num_fields && shifts.size() == num_fields && gains.size() == num_fields &&
          pad_values.size() == num_fields && spec.size() == num_fields * kFieldInts,
      "gear: out, columns, shifts, gains, pad values and spec must describe the same fields");
  CheckTensor(counters, "counters", at::kLong);
  TORCH_CHECK(counters.numel() >= 3, "gear: counters must have 3 elements");
  if (n_steps) {
    CheckTensor(*n_steps, "n_steps", at::kLong);
    TORCH_CHECK(n_steps->numel() == count, "gear: n_steps must have a value per resolution");
  }
  FieldList fields;
  for (size_t f = 0; f < num_fields; ++f) {
    const int64_t* ints = spec.data() + f * kFieldInts;
    const int64_t mask = ints[7];
    TORCH_CHECK(mask < static_cast<int64_t>(masks.size()),
                "gear: the index of a mask must lie in masks");
    TORCH_CHECK(!ints[4] || n_steps.has_value(),
                "gear: n_steps must be given for a field that follows it");
    TORCH_CHECK(ints[6] > 0, "gear: a row must have elements");
    cpu::Field field = FieldOf(ints, pad_values[f], columns[f], shifts[f], gains[f], outs[f],
                               mask < 0 ? nullptr : &masks[mask], count);
    // Fields with equal windows share a mask; the first one writes it.
    for (const cpu::Field& earlier : fields)
      if (earlier.mask == field.mask) field.mask = nullptr;
    fields.push_back(field);
  }
  return fields;
}

// The order in which samples are taken, or null.
inline const int64_t* OrderOf(const std::optional<at::Tensor>& order, int64_t count) {
  if (!order) return nullptr;
  CheckTensor(*order, "order", at::kLong);
  TORCH_CHECK(order->numel() == count, "gear: order must have a value per resolution");
  return order->const_data_ptr<int64_t>();
}

inline void CheckIndices(const at::Tensor& coordinates, int64_t first, int64_t size) {
  TORCH_CHECK(first >= 0 && size >= 0 && first <= size - coordinates.numel(),
              "gear: ", coordinates.numel(), " indices from ", first, " must lie in [0, ", size,
              ")");
}

inline void CheckRule(at::IntArrayRef rule) {
  TORCH_CHECK(rule.size() == 5 && rule[2] > 0,
              "gear: rule must be first, trim, stride, most, from_end");
}

inline AnchorRule AnchorsOf(at::IntArrayRef rule) {
  CheckRule(rule);
  return {rule[0], rule[1], rule[2], rule[3], rule[4]};
}

inline void CheckEntries(const at::Tensor& log, int64_t first, int64_t last) {
  CheckTensor(log, "log", at::kLong);
  TORCH_CHECK(0 <= first && first <= last && last - first <= log.numel(),
              "gear: entries must be in a log of ", log.numel(), ", got [", first, ", ", last, ")");
}

inline void CheckSlotMasses(const at::Tensor& sums, const at::Tensor& slots, const at::Tensor& log,
                            int64_t first, int64_t last, at::IntArrayRef rule) {
  CheckRecords(slots, "slots", kSlotWords);
  CheckTree(sums, slots.size(0));
  CheckRule(rule);
  CheckEntries(log, first, last);
}

inline void CheckResolve(const at::Tensor& resolutions, const at::Tensor& sums,
                         const at::Tensor& slots, const at::Tensor& coordinates,
                         at::IntArrayRef rule) {
  CheckRecords(slots, "slots", kSlotWords);
  CheckTree(sums, slots.size(0));
  CheckTensor(coordinates, "coordinates", at::kLong);
  CheckRecords(resolutions, "resolutions", kResolutionWords);
  TORCH_CHECK(resolutions.size(0) == coordinates.numel(),
              "gear: resolutions must have a row per coordinate");
  CheckRule(rule);
}

inline void CheckReward(const at::Tensor& reward, int64_t rows) {
  TORCH_CHECK(reward.is_contiguous() && reward.dim() == 1 && reward.numel() == rows,
              "gear: reward must be contiguous and have ", rows, " rows, got ", reward.sizes());
}

// Rows that all columns of an n-step return hold.
inline int64_t NumRows(const at::Tensor& reward, const at::Tensor& terminated,
                       const std::optional<at::Tensor>& truncated) {
  const int64_t rows = Min(reward.numel(), terminated.numel());
  return truncated ? Min(rows, truncated->numel()) : rows;
}

inline cpu::NStep NStepOf(const at::Tensor& returns, const at::Tensor& discount,
                          const at::Tensor& steps, const at::Tensor& reward,
                          const at::Tensor& terminated, const std::optional<at::Tensor>& truncated,
                          const at::Tensor& powers, const at::Tensor& resolutions, int64_t n) {
  const int64_t count = resolutions.size(0);
  CheckTensor(returns, "returns", at::kFloat);
  CheckTensor(discount, "discount", at::kFloat);
  CheckTensor(steps, "steps", at::kLong);
  CheckReward(reward, reward.numel());
  CheckTensor(terminated, "terminated", at::kBool);
  CheckTensor(powers, "powers", at::kDouble);
  if (truncated) CheckTensor(*truncated, "truncated", at::kBool);
  TORCH_CHECK(n >= 1 && powers.numel() == n + 1, "gear: powers must hold gamma^0 .. gamma^n");
  TORCH_CHECK(returns.numel() == count && discount.numel() == count && steps.numel() == count,
              "gear: returns, discount and steps must have a value per resolution");
  return {
      reward.const_data_ptr(),           CodeOf(reward),
      terminated.const_data_ptr<bool>(), truncated ? truncated->const_data_ptr<bool>() : nullptr,
      powers.const_data_ptr<double>(),   n};
}

}  // namespace gear
