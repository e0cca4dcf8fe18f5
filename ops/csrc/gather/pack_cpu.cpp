// Gathers whole trajectories into packs, one after the other without padding between them.
#include "common/prefetch.h"
#include "gather/gather.h"
#include "gather/rows_cpu.h"

namespace gear::cpu {
namespace {

// The part of a trajectory that lies in [first, first + rows) of the pack.
struct Stretch {
  int64_t step;   // of its first place; may be after the trajectory's last row
  int64_t place;  // in the output
  int64_t count;
};

Stretch StretchOf(const Resolution& r, int64_t place, int64_t first, int64_t rows) {
  const int64_t begin = Max(place, first), end = Min(place + r.num_steps, first + rows);
  return {begin - place, begin - first, Max<int64_t>(end - begin, 0)};
}

template <typename To, typename Rows>
void PackRows(const Field& field, const Resolution* resolutions, const int64_t* places,
              int64_t count, int64_t first, int64_t rows) {
  const int64_t from_row = field.elements * SizeOf(field.from);
  const int64_t to_row = field.elements * field.to_bytes;
  const int64_t more = field.source == kStepRowsPlusOne ? 1 : 0;
  const char* column = static_cast<const char*>(field.column);
  for (int64_t i = 0; i < count; ++i) {
    const Resolution& r = resolutions[i];
    const Stretch part = StretchOf(r, places[i], first, rows);
    if (part.count == 0) continue;
    char* out = static_cast<char*>(field.out) + part.place * to_row;
    if (field.source == kTrajectoryRow) {
      for (int64_t t = 0; t < part.count; ++t)
        Rows::Run(column + r.slot * from_row, out + t * to_row, 1, field);
      continue;
    }
    const int64_t step = part.step + field.window.offset, held = r.num_steps + more;
    const int64_t begin = Clamp<int64_t>(step, 0, held);
    const int64_t end = Max(begin, Clamp<int64_t>(step + part.count, 0, held));
    const int64_t before = end > begin ? begin - step : part.count, real = end - begin;
    const int64_t behind = part.count - before - real;
    if (before > 0) PadRows<To, Rows>(field, nullptr, out, before);
    if (real > 0)
      Rows::Run(RowAt(column, r.first_row, begin, from_row), out + before * to_row, real, field);
    if (behind > 0) PadRows<To, Rows>(field, nullptr, out + (before + real) * to_row, behind);
  }
}

// The number of each step in its trajectory; nothing is read.
void PackSteps(const Field& field, const Resolution* resolutions, const int64_t* places,
               int64_t count, int64_t first, int64_t rows) {
  const int64_t pad = static_cast<int64_t>(field.pad_value);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t steps = resolutions[i].num_steps;
    const Stretch part = StretchOf(resolutions[i], places[i], first, rows);
    int64_t* out = static_cast<int64_t*>(field.out) + part.place;
    for (int64_t t = 0; t < part.count; ++t) {
      const int64_t step = part.step + field.window.offset + t;
      out[t] = step >= 0 && step < steps ? step : pad;
    }
  }
}

}  // namespace

void Pack(const Field* fields, int64_t num_fields, const Resolution* resolutions,
          const int64_t* places, int64_t count, int64_t first, int64_t rows) {
  for (const Field* field = fields; field < fields + num_fields; ++field) {
    if (IsComputed(field->source)) {
      PackSteps(*field, resolutions, places, count, first, rows);
      continue;
    }
    WithRows(*field, [&](auto to, auto how) {
      PackRows<decltype(to), decltype(how)>(*field, resolutions, places, count, first, rows);
    });
  }
}

}  // namespace gear::cpu
