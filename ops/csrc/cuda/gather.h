// How rows get into a batch: as they are, or converted; and what pads them.
#pragma once
#include <type_traits>

#include "common/convert.h"
#include "cuda/copy.h"
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

// Writes one window: what lies in it of a trajectory whose step t is row first_row + t, and padding
// of the bits `pad` on both sides.
template <typename Rows>
__device__ void WriteWindow(const Field& field, uint64_t pad, int64_t sample, int64_t first_row,
                            const Span& span, Lane lane) {
  using To = typename Rows::To;
  To value;
  memcpy(&value, &pad, sizeof value);
  const auto* column = static_cast<const typename Rows::From*>(field.column);
  const auto at = [&](int64_t step) { return column + (first_row + step) * field.elements; };
  const int64_t length = field.part.count, rows = span.end - span.begin, behind = span.place + rows;
  auto* out = static_cast<To*>(field.out) + sample * length * field.elements;
  Pad<Rows>(field, at(span.before), value, out, span.place * field.elements, lane);
  Rows::Rows(field, at(span.begin), out + span.place * field.elements, rows * field.elements, lane);
  Pad<Rows>(field, at(span.after), value, out + behind * field.elements,
            (length - behind) * field.elements, lane);
}

}  // namespace gear::cuda
