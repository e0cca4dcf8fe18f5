// Copies, conversions and padding of the rows of one window, by a team of lanes of a kernel.
#pragma once
#include "common/copy_cuda.h"
#include "gather/convert_run_cuda.h"
#include "gather/gather.h"

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

// The rows of one window: step t of its trajectory is row first_row + t.
struct Read {
  int64_t sample, first_row;
  Span span;
};

// Pads a window on both sides, by a value or rows like its edges. `pad`: the bits of the value.
template <typename Elements>
__device__ void PadWindow(const Field& field, uint64_t pad, const Read& read, Lane lane) {
  using To = typename Elements::To;
  To value;
  memcpy(&value, &pad, sizeof value);
  const auto* column = static_cast<const typename Elements::From*>(field.column);
  const Span& span = read.span;
  const int64_t length = field.part.count;
  // A window has fewer than 2^31 elements.
  const auto elements = static_cast<int>(field.elements);
  const int real = static_cast<int>(span.end - span.begin) * elements;
  const int padded = static_cast<int>(length) * elements - real;
  const int front = static_cast<int>(span.place) * elements;
  auto* out = static_cast<To*>(field.out) + read.sample * length * field.elements;
  for (int i = lane.index; i < padded; i += lane.team) {
    To* to = out + (i < front ? i : i + real);
    if (field.pad == kPadEdge) {
      const int64_t step = i < front ? span.before : span.after, element = i % elements;
      *to = Elements::At(field, column + (read.first_row + step) * field.elements, element,
                         field.period > 1 ? element : 0);
    } else {
      *to = value;
    }
  }
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

// Converts the real rows of a window. `write` as of ConvertRun, but into the batch: it gets where
// the run begins there, and how many elements it has.
template <typename Write>
__device__ void ConvertWindow(const Field& field, int64_t held, const Read& read, Lane lane,
                              const Write& write) {
  const Span& span = read.span;
  const int64_t row_bytes = field.elements * SizeOf(field.from);
  const auto count = static_cast<int>((span.end - span.begin) * field.elements);
  const auto* column = static_cast<const char*>(field.column);
  char* to = static_cast<char*>(field.out) +
             (read.sample * field.part.count + span.place) * field.elements * field.to_bytes;
  ConvertRun(field, column + (read.first_row + span.begin) * row_bytes, column + held * row_bytes,
             to, count, lane,
             [&](uint4 unit, int first, int scale) { write(unit, to, first, count, scale); });
}

}  // namespace gear::cuda
