// The rows of a trajectory that a window covers, and their places in it.
#pragma once
#include "common/host_device.h"

namespace gear {

enum Align : int64_t { kInPlace = 0, kLeft = 1, kRight = 2 };
enum Pad : int64_t { kPadValue = 0, kPadEdge = 1 };

struct Window {
  int64_t offset, length, align;
};

// The rows [first, first + count) of a window: all of it that is written.
struct Part {
  int64_t first, count;
};

struct Span {
  int64_t begin, end;     // rows of the trajectory that are real
  int64_t place;          // where `begin` lies in the window
  int64_t before, after;  // rows whose values pad the window before and after, for kPadEdge
};

// The real rows are [max(0, anchor + offset), min(rows, anchor + offset + length)), or none. The
// edge of a trajectory without rows is row 0, which must not be read.
GEAR_HOST_DEVICE Span Bounds(const Window& window, int64_t anchor, int64_t rows) {
  const int64_t first = anchor + window.offset, last = first + window.length;
  const int64_t begin = Clamp<int64_t>(first, 0, rows);
  const int64_t end = Max(begin, Clamp<int64_t>(last, 0, rows));
  Span span{begin, end, 0, 0, 0};
  if (end == begin) {
    span.before = span.after = Clamp<int64_t>(first, 0, Max<int64_t>(rows - 1, 0));
    return span;
  }
  span.place = window.align == kInPlace
                   ? begin - first
                   : (window.align == kLeft ? 0 : window.length - (end - begin));
  span.before = begin;
  span.after = end - 1;
  return span;
}

// The piece of a window's span in a part of it, by its place in the part. Its padding is that of
// the window; a part without real rows is padded like the side on which it lies.
GEAR_HOST_DEVICE Span Cut(const Span& span, const Part& part) {
  const int64_t ahead = span.begin - span.place;  // the row at the window's first place
  const int64_t last = part.first + part.count;
  const int64_t from = Clamp<int64_t>(span.place, part.first, last);
  const int64_t to = Clamp<int64_t>(span.place + span.end - span.begin, part.first, last);
  return {from + ahead, to + ahead, from - part.first, span.before, span.after};
}

// Whether the steps [begin, end) of a trajectory lie in a column's rows. Step t is row
// first_row + t; first_row itself need not be a row, and may be negative.
GEAR_HOST_DEVICE bool IsInside(int64_t first_row, int64_t begin, int64_t end, int64_t rows) {
  return begin >= end || (first_row >= -begin && first_row <= rows - end);
}

// Whether the rows that fill `length` places lie in a column: the real ones, and for kPadEdge those
// whose values pad.
GEAR_HOST_DEVICE bool IsInside(int64_t first_row, const Span& span, int64_t length, int64_t pad,
                               int64_t rows) {
  const bool in_front = pad == kPadEdge && span.place > 0;
  const bool behind = pad == kPadEdge && span.place + span.end - span.begin < length;
  return IsInside(first_row, span.begin, span.end, rows) &&
         (!in_front || IsInside(first_row, span.before, span.before + 1, rows)) &&
         (!behind || IsInside(first_row, span.after, span.after + 1, rows));
}

}  // namespace gear
