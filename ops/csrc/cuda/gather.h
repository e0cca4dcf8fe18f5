// The kernel of collection: a team of lanes for each window.
#pragma once
#include <type_traits>

#include "common/convert.h"
#include "cuda/copy.h"
#include "cuda/launch.h"
#include "cuda/ops.h"

namespace gear::cuda {

// Elements of whole rows that are copied as they are. T: an unsigned integer of their size.
template <typename T>
struct CopyRows {
  using From = T;
  using To = T;

  __device__ static T At(const Field&, const T* row, int64_t element, int64_t) {
    return row[element];
  }

  __device__ static void Rows(const Field&, const T* from, T* to, int64_t count, Lane lane) {
    CopyBytes(reinterpret_cast<const char*>(from), reinterpret_cast<char*>(to),
              count * static_cast<int64_t>(sizeof(T)), lane);
  }
};

// (x - shift) * gain; shift and gain repeat every `period` elements.
template <typename F, typename T>
struct ConvertRows {
  using From = F;
  using To = T;
  using C = std::conditional_t<NeedsDouble<F>::value || NeedsDouble<T>::value, double, float>;

  __device__ static T At(const Field& field, const F* from, int64_t element, int64_t scale) {
    C x = Load<C>(from[element]);
    if (field.gain != nullptr)
      x = (x - static_cast<const C*>(field.shift)[scale]) *
          static_cast<const C*>(field.gain)[scale];
    return Store<T, C>::From(x);
  }

  __device__ static void Rows(const Field& field, const F* from, T* to, int64_t count, Lane lane) {
    const int64_t period = Max<int64_t>(field.period, 1), step = lane.team % period;
    int64_t scale = lane.index % period;
    for (int64_t i = lane.index; i < count; i += lane.team) {
      to[i] = At(field, from, i, scale);
      scale += step;
      if (scale >= period) scale -= period;
    }
  }
};

// Fills `count` elements with the padding: a value, or whole rows like `edge`.
template <typename Rows>
__device__ void Pad(const Field& field, const typename Rows::From* edge, typename Rows::To value,
                    typename Rows::To* to, int64_t count, Lane lane) {
  for (int64_t i = lane.index; i < count; i += lane.team) {
    const int64_t element = i % field.elements;
    to[i] = field.pad == kPadEdge ? Rows::At(field, edge, element, field.period > 1 ? element : 0)
                                  : value;
  }
}

template <typename Rows>
__global__ void GatherKernel(const Field field, int64_t held,
                             const Resolution* __restrict__ resolutions,
                             const int64_t* __restrict__ n_steps, int64_t count,
                             typename Rows::To pad, int team, uint64_t* counters) {
  const Lane lane{static_cast<int>(threadIdx.x) & (team - 1), team};
  const int64_t length = field.part.count;
  uint64_t real = 0;
  for (int64_t i = GlobalThread() / team; i < count; i += GlobalThreads() / team) {
    const Resolution r = resolutions[i];
    const auto* column = static_cast<const typename Rows::From*>(field.column);
    int64_t first_row = r.slot;
    Span span{0, 1, 0, 0, 0};
    if (field.source != cpu::kTrajectoryRow) {
      Require(IsAnchored(r));
      const int64_t final_row = field.source == cpu::kStepRowsPlusOne ? 1 : 0;
      Window window = field.window;
      if (field.after_n_step) window.offset += n_steps[i];
      span = Cut(Bounds(window, r.anchor, r.num_steps + final_row), field.part);
      first_row = r.first_row;
    }
    Require(IsInside(first_row, span, length, field.pad, held));
    const auto at = [&](int64_t step) { return column + (first_row + step) * field.elements; };
    const int64_t rows = span.end - span.begin, behind = span.place + rows;
    auto* out = static_cast<typename Rows::To*>(field.out) + i * length * field.elements;
    Pad<Rows>(field, at(span.before), pad, out, span.place * field.elements, lane);
    Rows::Rows(field, at(span.begin), out + span.place * field.elements, rows * field.elements,
               lane);
    Pad<Rows>(field, at(span.after), pad, out + behind * field.elements,
              (length - behind) * field.elements, lane);
    if (field.mask != nullptr)
      for (int64_t t = lane.index; t < length; t += lane.team)
        field.mask[i * length + t] = t >= span.place && t < behind;
    real += static_cast<uint64_t>(rows);
  }
  if (lane.index == 0 && real != 0) AtomicAdd(counters, real);
}

// Lanes of a team: about 32 bytes of the window each.
inline int TeamOf(int64_t window_bytes) {
  int team = 4;
  while (team < kThreads && team * 32 < window_bytes) team *= 2;
  return team;
}

template <typename Rows>
void LaunchGather(const Field& field, int64_t held, const Resolution* resolutions,
                  const int64_t* n_steps, int64_t count, typename Rows::To pad, int64_t* counters,
                  void* stream) {
  const int team = TeamOf(field.part.count * field.elements * field.to_bytes);
  GatherKernel<Rows><<<Blocks(count * team), kThreads, 0, AsStream(stream)>>>(
      field, held, resolutions, n_steps, count, pad, team, reinterpret_cast<uint64_t*>(counters));
  CheckLaunch("Gather");
}

// Collects a field whose elements change their type or are scaled.
void GatherConverted(const Field& field, int64_t held, const Resolution* resolutions,
                     const int64_t* n_steps, int64_t count, int64_t* counters, void* stream);

}  // namespace gear::cuda
