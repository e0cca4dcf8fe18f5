// The ops that read columns, on the host and on devices: windows, returns, and pieces.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#include "bindings/device.h"
#include "bindings/tensors.h"
#include "gather/gather.h"
#include "gather/read_ahead.h"
#include "returns/returns.h"

namespace gear {

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
  if (field.follows < cpu::kAnchor || field.follows > cpu::kGoal) return "unknown word follows";
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

// Words of a field's spec: source, offset, length, align, follows, pad, elements, index of the
// mask, first and count of the part.
inline constexpr int64_t kFieldInts = 10;

inline cpu::Field FieldOf(const int64_t* spec, double pad_value, const at::Tensor& column,
                          const at::Tensor& shift, const at::Tensor& gain, const at::Tensor& out,
                          const at::Tensor* mask, int64_t count) {
  cpu::Field field{};
  field.source = spec[0];
  field.window = {spec[1], spec[2], spec[3]};
  field.follows = spec[4];
  field.pad = spec[5];
  field.elements = spec[6];
  field.part = {spec[8], spec[9]};
  field.to = CodeOf(out);
  const bool is_computed = cpu::IsComputed(field.source);
  field.from = is_computed ? field.to : CodeOf(column);
  field.to_bytes = out.element_size();
  field.pad_value = field.pad == kPadEdge ? 0 : pad_value;
  TORCH_CHECK(field.elements > 0, "gear: a row must have elements");
  TORCH_CHECK(out.is_contiguous() && column.is_contiguous(),
              "gear: out and columns must be contiguous");
  TORCH_CHECK(out.numel() == count * field.part.count * field.elements, "gear: out must hold ",
              count, " x ", field.part.count, " x ", field.elements, " elements, got ",
              out.sizes());
  TORCH_CHECK(!is_computed || field.to == kInt64, "gear: time steps and positions must be int64");
  TORCH_CHECK(is_computed || column.numel() % field.elements == 0,
              "gear: column must hold whole rows of ", field.elements, " elements");
  if (gain.numel() > 0) {
    field.period = gain.numel();
    field.shift = Values<double>(shift, "shift and gain", field.period);
    field.gain = Values<double>(gain, "shift and gain");
    TORCH_CHECK(field.period == 1 || field.period % field.elements == 0,
                "gear: shift and gain must have 1 value or a multiple of ", field.elements);
  }
  if (!is_computed) field.column = column.const_data_ptr();
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

// The fields of a gather, each checked against its tensors. `masks` are null for a pack, which has
// none.
inline FieldList FieldsOf(at::TensorList outs, const at::TensorList* masks, at::TensorList columns,
                          at::TensorList shifts, at::TensorList gains, at::IntArrayRef spec,
                          at::ArrayRef<double> pad_values, int64_t count) {
  const size_t num_fields = outs.size();
  TORCH_CHECK(
      columns.size() == num_fields && shifts.size() == num_fields && gains.size() == num_fields &&
          pad_values.size() == num_fields && spec.size() == num_fields * kFieldInts,
      "gear: out, columns, shifts, gains, pad values and spec must describe the same fields");
  FieldList fields;
  for (size_t f = 0; f < num_fields; ++f) {
    const int64_t* ints = spec.data() + f * kFieldInts;
    const int64_t mask = masks == nullptr ? -1 : ints[7];
    TORCH_CHECK(mask < 0 || mask < static_cast<int64_t>(masks->size()),
                "gear: the index of a mask must lie in masks");
    cpu::Field field = FieldOf(ints, pad_values[f], columns[f], shifts[f], gains[f], outs[f],
                               mask < 0 ? nullptr : &(*masks)[mask], count);
    // Fields with equal windows share a mask; the first one writes it.
    for (const cpu::Field& earlier : fields)
      if (earlier.mask == field.mask) field.mask = nullptr;
    fields.push_back(field);
  }
  return fields;
}

// One pass over the resolutions protects every column. `is_inside(i)`: whether the rows that are
// read of resolution i, which has an anchor, lie in them. Of one that is no sample nothing is read.
template <typename IsInsideAt>
void CheckRows(const Resolution* resolutions, int64_t count, int64_t rows, int64_t slots,
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

// Whether the rows that a window of steps reads lie in its column. A wrong offset is an error
// before its sum overflows.
inline bool ReadsInside(const cpu::Field& field, int64_t rows, const Resolution& r,
                        const int64_t* n_step) {
  Window window = field.window;
  if (field.follows) {
    if (*n_step < -kMostSteps || *n_step > kMostSteps) return false;
    window.offset += *n_step;
  }
  const int64_t held = r.num_steps + (field.source == cpu::kStepRowsPlusOne ? 1 : 0);
  const Span span = Cut(Bounds(window, r.anchor, held), field.part);
  return IsInside(r.first_row, span, field.part.count, field.pad, rows);
}

// A trajectory that lies in the shortest column as a whole needs no check of the windows.
inline void CheckWindows(const FieldList& fields, const int64_t* held, const Resolution* records,
                         int64_t count, const int64_t* n_steps) {
  int64_t rows = std::numeric_limits<int64_t>::max(), slots = rows, final_row = 0;
  for (size_t f = 0; f < fields.size(); ++f) {
    if (cpu::IsComputed(fields[f].source)) continue;
    int64_t& least = fields[f].source == cpu::kTrajectoryRow ? slots : rows;
    least = std::min(least, held[f]);
    if (fields[f].source == cpu::kStepRowsPlusOne) final_row = 1;
  }
  CheckRows(records, count, rows, slots, [&](int64_t i) {
    const Resolution& r = records[i];
    if (r.first_row >= 0 && r.first_row <= rows - final_row - r.num_steps) return true;
    for (size_t f = 0; f < fields.size(); ++f)
      if (cpu::IsStepRow(fields[f].source) &&
          !ReadsInside(fields[f], held[f], r, n_steps ? n_steps + i : nullptr))
        return false;
    return true;
  });
}

// Here samples are gathered in their own order: their rows are in the caches anyway.
inline void CheckOrder(const int64_t* samples, int64_t count) {
  std::vector<bool> is_there(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t sample = samples[i];
    TORCH_CHECK(sample >= 0 && sample < count && !is_there[static_cast<size_t>(sample)],
                "gear: order must have every index of [0, ", count, ") once");
    is_there[static_cast<size_t>(sample)] = true;
  }
}

inline void CountRows(const FieldList& fields, int64_t count, int64_t* counters) {
  for (const cpu::Field& field : fields) {
    counters[1] += count * field.part.count;
    counters[2] += count * field.part.count * field.elements * field.to_bytes;
  }
}

// Gathers by threads of its own: torch's pool would need OpenMP's runtime of the same torch build.
inline void GatherInThreads(const FieldList& fields, const Resolution* records,
                            const int64_t* n_steps, int64_t count, int64_t threads,
                            const cpu::ReadAhead& ahead, int64_t* counters) {
  std::atomic<int64_t> real{0};
  const auto work = [&](int64_t begin, int64_t end) {
    ahead.InBlocks(records, n_steps, begin, end, [&](int64_t first, int64_t last) {
      const int64_t mine = cpu::Gather(fields.data(), static_cast<int64_t>(fields.size()), records,
                                       n_steps, first, last, count);
      real.fetch_add(mine, std::memory_order_relaxed);
    });
  };
  const int64_t part = threads <= 1 ? count : (count + threads - 1) / threads;
  std::vector<std::thread> others;
  for (int64_t begin = part; begin < count; begin += part)
    others.emplace_back(work, begin, std::min(begin + part, count));
  work(0, std::min(part, count));
  for (std::thread& other : others) other.join();
  counters[0] += real.load(std::memory_order_relaxed);
  CountRows(fields, count, counters);
}

// Gathers the rows of goals into the batch: of each run of samples that have one.
inline void GatherGoals(const FieldList& fields, const int64_t* held, const Resolution* records,
                        const int64_t* goals, int64_t count, int64_t* counters) {
  c10::SmallVector<int64_t, 1024> steps(static_cast<size_t>(count));  // from the anchor
  for (int64_t i = 0; i < count; ++i) steps[i] = goals[i] < 0 ? 0 : goals[i] - records[i].anchor;
  const auto for_each_run = [&](const auto& visit) {
    for (int64_t first = 0, end; first < count; first = end + 1) {
      for (end = first; end < count && goals[end] >= 0;) ++end;
      if (end > first) visit(first, end);
    }
  };
  for_each_run([&](int64_t first, int64_t end) {
    CheckWindows(fields, held, records + first, end - first, steps.data() + first);
  });
  const cpu::ReadAhead ahead(fields.data(), static_cast<int64_t>(fields.size()), 1);
  for_each_run([&](int64_t first, int64_t end) {
    ahead.InBlocks(records, steps.data(), first, end, [&](int64_t begin, int64_t last) {
      counters[0] += cpu::Gather(fields.data(), static_cast<int64_t>(fields.size()), records,
                                 steps.data(), begin, last);
    });
    CountRows(fields, end - first, counters);
  });
}

// The fields of a gather, checked against their tensors: what follows depends on the resolutions.
struct CheckedFields {
  FieldList fields;
  c10::SmallVector<int64_t, 16> held;  // rows of each column
  bool are_goals = false, follow_steps = false;

  CheckedFields(at::TensorList outs, at::TensorList masks, at::TensorList columns,
                at::TensorList shifts, at::TensorList gains, at::IntArrayRef spec,
                at::ArrayRef<double> pad_values, int64_t count, const Device& device)
      : fields(FieldsOf(outs, &masks, columns, shifts, gains, spec, pad_values, count)) {
    are_goals = !fields.empty() && fields[0].follows == cpu::kGoal;
    for (size_t f = 0; f < fields.size(); ++f) {
      TORCH_CHECK((fields[f].follows == cpu::kGoal) == are_goals && (Device::kIsHost || !are_goals),
                  "gear: goals are gathered on the host, in a call of their own");
      follow_steps |= fields[f].follows != cpu::kAnchor;
      if (fields[f].column != nullptr) device.Check("every column", columns[f]);
      if (fields[f].gain != nullptr) device.Check("shift and gain", shifts[f]);
      if (fields[f].gain != nullptr) device.Check("shift and gain", gains[f]);
      held.push_back(columns[f].numel() / fields[f].elements);
    }
  }

  void CheckSteps(bool are_given) const {
    TORCH_CHECK(!follow_steps || are_given,
                "gear: n_steps must be given for a field that follows it");
  }
};

// Gathers checked fields on the host, after `CheckSteps`. `next`: as many samples that are gathered
// after these, whose rows are requested now where columns are read ahead; or null.
inline void GatherChecked(const CheckedFields& checked, const Resolution* records,
                          const int64_t* n_steps, int64_t count, int64_t threads, int64_t* counters,
                          const Resolution* next = nullptr) {
  const FieldList& fields = checked.fields;
  if (checked.are_goals)
    return GatherGoals(fields, checked.held.data(), records, n_steps, count, counters);
  CheckWindows(fields, checked.held.data(), records, count, n_steps);
  if (count == 0) return;
  const cpu::ReadAhead ahead(fields.data(), static_cast<int64_t>(fields.size()), threads);
  if (next != nullptr && ahead.IsNeeded())
    ahead.Request(next, nullptr, 0, std::min(ahead.block(), count));
  GatherInThreads(fields, records, n_steps, count, threads, ahead, counters);
}

inline void Gather(at::TensorList outs, at::TensorList masks, at::Tensor& counters,
                   at::TensorList columns, at::TensorList shifts, at::TensorList gains,
                   const at::Tensor& resolutions, const std::optional<at::Tensor>& n_steps,
                   at::IntArrayRef spec, at::ArrayRef<double> pad_values, int64_t threads,
                   const std::optional<at::Tensor>& order) {
  const auto [records, count] = CountedRows<Resolution>(resolutions, "resolutions");
  const int64_t* samples = order ? Values<int64_t>(*order, "order", count) : nullptr;
  const int64_t* offsets = n_steps ? Values<int64_t>(*n_steps, "n_steps", count) : nullptr;
  int64_t* counter = Values<int64_t>(counters, "counters");
  TORCH_CHECK(counters.numel() >= 3, "gear: counters must have 3 elements");
  const Device device(counters, "every tensor", outs, masks, resolutions, n_steps, order);
  const CheckedFields checked(outs, masks, columns, shifts, gains, spec, pad_values, count, device);
  checked.CheckSteps(n_steps.has_value());
  if constexpr (Device::kIsHost) {
    if (samples != nullptr) CheckOrder(samples, count);
    GatherChecked(checked, records, offsets, count, threads, counter);
  } else {
    cuda::Gather(checked.fields.data(), checked.held.data(),
                 static_cast<int64_t>(checked.fields.size()), records, offsets, samples, count,
                 threads > 1 ? threads : 0, counter, device.stream());
  }
}

inline void CheckReward(const at::Tensor& reward, int64_t rows) {
  TORCH_CHECK(reward.is_contiguous() && reward.dim() == 1 && reward.numel() == rows,
              "gear: reward must be contiguous and have ", rows, " rows, got ", reward.sizes());
}

inline void SuffixSum(at::Tensor& out, const at::Tensor& reward, const at::Tensor& extents) {
  const int64_t num_rows = out.numel();
  float* sums = Values<float>(out, "out");
  const auto* extent = Rows<Extent>(extents, "extents");
  CheckReward(reward, num_rows);
  for (int64_t i = 0; Device::kIsHost && i < extents.size(0); ++i)
    TORCH_CHECK(IsIn(extent[i], num_rows), "gear: extent ", i, " must lie in the reward's rows");
  const Device device(out, "reward and extents", reward, extents);
  device.Run(on::SuffixSum, reward.const_data_ptr(), CodeOf(reward), extent, extents.size(0),
             num_rows, sums);
}

inline void NStepReturn(at::Tensor& returns, at::Tensor& discount, at::Tensor& steps,
                        const at::Tensor& reward, const at::Tensor& terminated,
                        const std::optional<at::Tensor>& truncated, const at::Tensor& powers,
                        const at::Tensor& resolutions, int64_t n) {
  const Resolution* records = Rows<Resolution>(resolutions, "resolutions");
  const int64_t count = resolutions.size(0);
  CheckReward(reward, reward.numel());
  TORCH_CHECK(n >= 1 && powers.numel() == n + 1, "gear: powers must hold gamma^0 .. gamma^n");
  cpu::NStep n_step{reward.const_data_ptr(), CodeOf(reward)};
  n_step.terminated = Values<bool>(terminated, "terminated");
  n_step.truncated = truncated ? Values<bool>(*truncated, "truncated") : nullptr;
  n_step.powers = Values<double>(powers, "powers");
  n_step.n = n;
  n_step.num_rows = Min(reward.numel(), terminated.numel());
  if (truncated) n_step.num_rows = Min(n_step.num_rows, truncated->numel());
  float* sums = Values<float>(returns, "returns", count);
  float* discounts = Values<float>(discount, "discount", count);
  int64_t* counts = Values<int64_t>(steps, "steps", count);
  if constexpr (Device::kIsHost) {
    const int64_t rows = n_step.num_rows;
    CheckRows(records, count, rows, std::numeric_limits<int64_t>::max(), [&](int64_t i) {
      const Resolution& r = records[i];
      const int64_t most = Min(n, r.num_steps - r.anchor);
      return IsInside(r.first_row, r.anchor, r.anchor + most, rows);
    });
    cpu::Field read[3]{};
    const at::Tensor* columns[3] = {&reward, &terminated, truncated ? &*truncated : &terminated};
    for (int f = 0; f < 3; ++f) {
      read[f].window = {0, n, kInPlace};
      read[f].part = {0, n};
      read[f].elements = 1;
      read[f].from = CodeOf(*columns[f]);
      read[f].column = columns[f]->const_data_ptr();
    }
    const cpu::ReadAhead ahead(read, 3, 1);
    if (ahead.IsNeeded()) ahead.Request(records, nullptr, 0, count);
  }
  const Device device(returns, "every tensor", discount, steps, reward, terminated, truncated,
                      powers, resolutions);
  device.Run(on::NStepReturn, n_step, records, count, sums, discounts, counts);
}

inline void Advantages(at::Tensor& advantage, at::Tensor& target, const at::Tensor& reward,
                       const at::Tensor& value, const at::Tensor& next_value,
                       const at::Tensor& terminated, const std::optional<at::Tensor>& truncated,
                       const at::Tensor& mask, const std::optional<at::Tensor>& log_prob,
                       const std::optional<at::Tensor>& behaviour_log_prob,
                       at::ArrayRef<double> factors) {
  TORCH_CHECK(advantage.dim() == 2, "gear: advantage must be [B, T], got ", advantage.sizes());
  TORCH_CHECK(factors.size() == 4 && log_prob.has_value() == behaviour_log_prob.has_value(),
              "gear: factors must be 4, and log-probabilities of both policies or none");
  const int64_t count = advantage.numel();
  Advantage a{Values<double>(reward, "reward", count), Values<double>(value, "value", count),
              Values<double>(next_value, "next_value", count)};
  if (log_prob) a.log_prob = Values<double>(*log_prob, "log_prob", count);
  if (log_prob)
    a.behaviour_log_prob = Values<double>(*behaviour_log_prob, "behaviour_log_prob", count);
  a.terminated = Values<bool>(terminated, "terminated", count);
  if (truncated) a.truncated = Values<bool>(*truncated, "truncated", count);
  a.mask = Values<bool>(mask, "mask", count);
  a.gamma = factors[0], a.lambda = factors[1], a.rho_bar = factors[2], a.c_bar = factors[3];
  a.rows = advantage.size(0), a.length = advantage.size(1);
  const Device device(advantage, "every tensor", target, reward, value, next_value, terminated,
                      truncated, mask, log_prob, behaviour_log_prob);
  device.Run(on::Estimate, a, Values<float>(advantage, "advantage"),
             Values<float>(target, "target", count));
}

}  // namespace gear
