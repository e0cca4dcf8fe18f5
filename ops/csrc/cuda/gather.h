// How rows get into a batch: as they are, or converted; and what pads them.
#pragma once
#include <type_traits>

#include "common/convert.h"
#include "cuda/copy.h"
#include "cuda/ops.h"

namespace gear::cuda {

// Elements that stay as they are. T: an unsigned integer of their size.
template <typename T>
struct SameElements {
  using From = T;
  using To = T;

  __device__ static T At(const Field&, const T* row, int64_t element, int64_t) {
    return row[element];
  }
};

// (x - shift) * gain; shift and gain repeat every `period` elements.
template <typename F, typename T>
struct ConvertedElements {
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

// Where the rows of one window lie: step t of its trajectory is row first_row + t.
struct Read {
  int64_t sample, first_row;
  Span span;
};

// Fills `count` elements with the padding: a value, or whole rows like `edge`.
template <typename Elements>
__device__ void Pad(const Field& field, const typename Elements::From* edge,
                    typename Elements::To value, typename Elements::To* to, int64_t count,
                    Lane lane) {
  for (int64_t i = lane.index; i < count; i += lane.team) {
    const int64_t element = i % field.elements;
    to[i] = field.pad == kPadEdge
                ? Elements::At(field, edge, element, field.period > 1 ? element : 0)
                : value;
  }
}

// Pads a window on both sides. `pad`: the bits of the value.
template <typename Elements>
__device__ void PadWindow(const Field& field, uint64_t pad, const Read& read, Lane lane) {
  using To = typename Elements::To;
  To value;
  memcpy(&value, &pad, sizeof value);
  const auto* column = static_cast<const typename Elements::From*>(field.column);
  const auto at = [&](int64_t step) { return column + (read.first_row + step) * field.elements; };
  const Span& span = read.span;
  const int64_t length = field.part.count, behind = span.place + span.end - span.begin;
  auto* out = static_cast<To*>(field.out) + read.sample * length * field.elements;
  Pad<Elements>(field, at(span.before), value, out, span.place * field.elements, lane);
  Pad<Elements>(field, at(span.after), value, out + behind * field.elements,
                (length - behind) * field.elements, lane);
}

// Copies the real rows of a window as they are: they are bytes, whatever their type. `held`: rows
// of the column.
__device__ inline void CopyWindow(const Field& field, int64_t held, const Read& read, Lane lane) {
  const Span& span = read.span;
  const int64_t row_bytes = field.elements * field.to_bytes;
  const auto* column = static_cast<const char*>(field.column);
  char* to =
      static_cast<char*>(field.out) + (read.sample * field.part.count + span.place) * row_bytes;
  CopyBytes(column + (read.first_row + span.begin) * row_bytes, column + held * row_bytes, to,
            (span.end - span.begin) * row_bytes, lane);
}

// Converts the real rows of a window.
template <typename Elements>
__device__ void ConvertWindow(const Field& field, const Read& read, Lane lane) {
  const Span& span = read.span;
  const auto* from = static_cast<const typename Elements::From*>(field.column) +
                     (read.first_row + span.begin) * field.elements;
  auto* to = static_cast<typename Elements::To*>(field.out) +
             (read.sample * field.part.count + span.place) * field.elements;
  Elements::Rows(field, from, to, (span.end - span.begin) * field.elements, lane);
}

}  // namespace gear::cuda
