// The op `pack_`: rows of whole trajectories into one sequence.
#include "bindings/checks.h"
#include "bindings/ops.h"
#include "gather/pack.h"

namespace gear {

static bool LiesInside(const cpu::Field& field, int64_t held_rows, const Resolution& r) {
  if (field.source == cpu::kTrajectoryRow) return r.slot >= 0 && r.slot < held_rows;
  const int64_t held = r.num_steps + (field.source == cpu::kStepRowsPlusOne ? 1 : 0);
  const int64_t begin = Clamp<int64_t>(field.window.offset, 0, held);
  const int64_t end = Clamp<int64_t>(field.window.offset + r.num_steps, 0, held);
  return IsInside(r.first_row, begin, end, held_rows);
}

void Pack(at::TensorList outs, at::TensorList columns, at::TensorList shifts, at::TensorList gains,
          const at::Tensor& resolutions, const at::Tensor& places, at::IntArrayRef spec,
          at::ArrayRef<double> pad_values, int64_t first, int64_t rows) {
  const Resolution* records = Resolutions(resolutions);
  const int64_t count = resolutions.size(0);
  CheckTensor(places, "places", at::kLong);
  TORCH_CHECK(places.numel() == count, "gear: places must have a value per resolution");
  const size_t num_fields = outs.size();
  TORCH_CHECK(
      columns.size() == num_fields && shifts.size() == num_fields && gains.size() == num_fields &&
          pad_values.size() == num_fields && spec.size() == num_fields * kFieldInts,
      "gear: out, columns, shifts, gains, pad values and spec must describe the same fields");
  TORCH_CHECK(first >= 0 && rows >= 0 && first <= kMostSteps && rows <= kMostSteps,
              "gear: first and rows must be in [0, 2^40]");
  FieldList fields;
  for (size_t f = 0; f < num_fields; ++f) {
    const cpu::Field field = FieldOf(spec.data() + f * kFieldInts, pad_values[f], columns[f],
                                     shifts[f], gains[f], outs[f], nullptr, rows);
    TORCH_CHECK(field.window.length == 1 && field.pad == kPadValue && !field.after_n_step &&
                    field.source != cpu::kPosition,
                "gear: a packed field must be of single steps, padded by a value");
    fields.push_back(field);
  }
  const int64_t* at = places.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    const Resolution& r = records[i];
    bool is_inside =
        r.num_steps >= 1 && r.num_steps <= kMostSteps && at[i] >= 0 && at[i] <= kMostSteps;
    for (size_t f = 0; is_inside && f < num_fields; ++f)
      is_inside = cpu::IsComputed(fields[f].source) ||
                  LiesInside(fields[f], columns[f].numel() / fields[f].elements, r);
    TORCH_CHECK(is_inside, "gear: resolution ", i,
                " must lie in the columns, and its place in [0, 2^40]");
  }
  if (rows > 0)
    cpu::Pack(fields.data(), static_cast<int64_t>(num_fields), records, at, count, first, rows);
}

}  // namespace gear
