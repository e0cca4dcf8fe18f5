// Gather: windows of columns into the tensors of a batch.
#include <cstring>
#include <type_traits>

#include "common/convert.h"
#include "common/prefetch.h"
#include "gather/gather.h"

namespace gear::cpu {
namespace {

constexpr int64_t kLookAhead = 4;  // samples whose rows are requested before their turn

// (x - shift) * gain over whole rows; shift and gain repeat every `period` elements.
template <typename From, typename To>
void Convert(const From* from, To* to, int64_t count, const Field& field) {
  using C = std::conditional_t<NeedsDouble<From>::value || NeedsDouble<To>::value, double, float>;
  const C* shift = static_cast<const C*>(field.shift);
  const C* gain = static_cast<const C*>(field.gain);
  if (shift == nullptr && gain == nullptr) {
    for (int64_t i = 0; i < count; ++i) to[i] = Store<To, C>::From(Load<C>(from[i]));
  } else if (field.period == 1) {
    const C s = shift ? shift[0] : C{0}, g = gain ? gain[0] : C{1};
    for (int64_t i = 0; i < count; ++i) to[i] = Store<To, C>::From((Load<C>(from[i]) - s) * g);
  } else {
    for (int64_t done = 0; done < count; done += field.period) {
      const int64_t n = Min(field.period, count - done);
      for (int64_t i = 0; i < n; ++i)
        to[done + i] = Store<To, C>::From((Load<C>(from[done + i]) - shift[i]) * gain[i]);
    }
  }
}

template <typename To>
void FillValue(To* to, int64_t count, double value) {
  const To x = Store<To, double>::From(value);
  for (int64_t i = 0; i < count; ++i) to[i] = x;
}

// Copies whole rows unchanged.
template <typename Unit>
struct CopyRows {
  static void Run(const void* from, void* to, int64_t rows, const Field& field) {
    std::memcpy(to, from, static_cast<size_t>(rows * field.elements * field.to_bytes));
  }
};

template <typename From, typename To>
struct ConvertRows {
  static void Run(const void* from, void* to, int64_t rows, const Field& field) {
    Convert(static_cast<const From*>(from), static_cast<To*>(to), rows * field.elements, field);
  }
};

// Fills `count` rows at `to` with padding.
template <typename To, typename Rows>
void PadRows(const Field& field, const char* edge, char* to, int64_t count) {
  const int64_t row_bytes = field.elements * field.to_bytes;
  if (field.pad == kPadEdge) {
    for (int64_t i = 0; i < count; ++i) Rows::Run(edge, to + i * row_bytes, 1, field);
  } else if (field.pad_value == 0) {
    std::memset(to, 0, static_cast<size_t>(count * row_bytes));
  } else {
    FillValue(reinterpret_cast<To*>(to), count * field.elements, field.pad_value);
  }
}

// Pads all of a sample that is none.
template <typename To>
void PadSample(const Field& field, int64_t sample) {
  const int64_t rows = field.part.count, count = rows * field.elements;
  FillValue(static_cast<To*>(field.out) + sample * count, count,
            field.pad_value == 0 ? 0.0 : field.pad_value);
  if (field.mask != nullptr) std::memset(field.mask + sample * rows, 0, static_cast<size_t>(rows));
}

template <typename To, typename Rows>
int64_t GatherRows(const Field& field, const Resolution* resolutions, const int64_t* n_steps,
                   int64_t begin, int64_t end) {
  const int64_t from_row = field.elements * SizeOf(field.from),
                to_row = field.elements * field.to_bytes;
  const int64_t length = field.part.count;
  const bool is_whole = length == field.window.length;
  // A lower bound of where a part's real rows begin, from the anchor alone.
  const int64_t least = field.window.align == kLeft ? field.part.first : 0;
  const int64_t ahead = field.window.offset + field.part.first;
  const char* column = static_cast<const char*>(field.column);
  int64_t real = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kLookAhead < end) {
      const Resolution& next = resolutions[i + kLookAhead];
      const char* window =
          field.source == kTrajectoryRow
              ? RowAt(column, next.slot, 0, from_row)
              : RowAt(column, next.first_row, Max(least, next.anchor + ahead), from_row);
      PrefetchBytes(window, length * from_row);
    }
    const Resolution& r = resolutions[i];
    if (IsNoSample(r)) {
      PadSample<To>(field, i);
      continue;
    }
    char* out = static_cast<char*>(field.out) + i * length * to_row;
    if (field.source == kTrajectoryRow) {
      Rows::Run(column + r.slot * from_row, out, 1, field);
      if (field.mask != nullptr) field.mask[i] = true;
      ++real;
      continue;
    }
    Window window = field.window;
    if (field.after_n_step) window.offset += n_steps[i];
    const int64_t held = r.num_steps + (field.source == kStepRowsPlusOne ? 1 : 0);
    Span span = Bounds(window, r.anchor, held);
    if (!is_whole) span = Cut(span, field.part);
    const int64_t rows = span.end - span.begin, behind = length - span.place - rows;
    const auto at = [&](int64_t step) { return RowAt(column, r.first_row, step, from_row); };
    if (span.place > 0) PadRows<To, Rows>(field, at(span.before), out, span.place);
    if (rows > 0) Rows::Run(at(span.begin), out + span.place * to_row, rows, field);
    if (behind > 0)
      PadRows<To, Rows>(field, at(span.after), out + (length - behind) * to_row, behind);
    if (field.mask != nullptr) {
      bool* mask = field.mask + i * length;
      if (rows < length) std::memset(mask, 0, static_cast<size_t>(length));
      std::memset(mask + span.place, 1, static_cast<size_t>(rows));
    }
    real += rows;
  }
  return real;
}

// Copies a few bytes. In a loop over rows of one size its branches are predicted, and it is no
// call.
inline void CopyFew(const char* from, char* to, int64_t bytes) {
  const auto copy = [&](auto unit) {  // in units that may overlap at the end
    constexpr int64_t kUnit = sizeof(unit);
    for (int64_t at = 0; at < bytes; at += kUnit) {
      const int64_t place = Min(at, bytes - kUnit);
      std::memcpy(&unit, from + place, kUnit);
      std::memcpy(to + place, &unit, kUnit);
    }
  };
  struct Sixteen {
    uint64_t words[2];
  };
  if (bytes >= 16) return copy(Sixteen{});
  if (bytes >= 8) return copy(uint64_t{});
  if (bytes >= 4) return copy(uint32_t{});
  copy(uint8_t{});
}

// Starts the loads of single steps. A wrong address is never read.
void PrefetchSteps(const Field& field, const Resolution* resolutions, int64_t begin, int64_t end) {
  const int64_t row_bytes = field.elements * field.to_bytes;
  const char* column = static_cast<const char*>(field.column);
  for (int64_t i = begin; i < end; ++i) {
    const Resolution& r = resolutions[i];
    const char* row = RowAt(column, r.first_row, r.anchor + field.window.offset, row_bytes);
    Prefetch(row, 0);
    Prefetch(row, row_bytes - 1);
  }
}

// Single steps, unchanged: each sample is an address and a copy of a few bytes.
template <typename To>
int64_t GatherSteps(const Field& field, const Resolution* resolutions, const int64_t* n_steps,
                    int64_t begin, int64_t end) {
  const int64_t row_bytes = field.elements * field.to_bytes;
  const int64_t more = field.source == kStepRowsPlusOne ? 1 : 0;
  const char* column = static_cast<const char*>(field.column);
  int64_t real = 0;
  for (int64_t i = begin; i < end; ++i) {
    const Resolution& r = resolutions[i];
    if (IsNoSample(r)) {
      PadSample<To>(field, i);
      continue;
    }
    const int64_t step = r.anchor + field.window.offset + (field.after_n_step ? n_steps[i] : 0);
    const int64_t nearest = Clamp<int64_t>(step, 0, r.num_steps + more - 1);
    const bool is_real = step == nearest;
    char* out = static_cast<char*>(field.out) + i * row_bytes;
    const char* from = RowAt(column, r.first_row, nearest, row_bytes);
    if (is_real)
      CopyFew(from, out, row_bytes);
    else
      PadRows<To, CopyRows<To>>(field, from, out, 1);
    if (field.mask != nullptr) field.mask[i] = is_real;
    real += is_real;
  }
  return real;
}

// The step numbers of a window themselves, or its places; nothing is read.
int64_t GatherComputed(const Field& field, const Resolution* resolutions, const int64_t* n_steps,
                       int64_t begin, int64_t end) {
  const int64_t length = field.part.count;
  const bool is_whole = length == field.window.length;
  int64_t real = 0;
  for (int64_t i = begin; i < end; ++i) {
    Window window = field.window;
    if (field.after_n_step) window.offset += n_steps[i];
    const Resolution& r = resolutions[i];
    Span span = Bounds(window, r.anchor, r.num_steps);
    if (!is_whole) span = Cut(span, field.part);
    const int64_t rows = span.end - span.begin;
    int64_t* out = static_cast<int64_t*>(field.out) + i * length;
    const bool edge = field.pad == kPadEdge, is_position = field.source == kPosition;
    const int64_t value = static_cast<int64_t>(field.pad_value);
    for (int64_t t = 0; t < length; ++t) {
      const bool is_real = t >= span.place && t < span.place + rows;
      if (is_position)
        out[t] = field.part.first + t;
      else
        out[t] = is_real ? span.begin + t - span.place
                         : (edge ? (t < span.place ? span.before : span.after) : value);
      if (field.mask != nullptr) field.mask[i * length + t] = is_real;
    }
    real += rows;
  }
  return real;
}

using GatherFunction = int64_t (*)(const Field&, const Resolution*, const int64_t*, int64_t,
                                   int64_t);

bool IsCopy(const Field& field) {
  return !IsComputed(field.source) && field.from == field.to && field.shift == nullptr &&
         field.gain == nullptr;
}

// Whether a sample is a few bytes of one step: most of its time is a cache miss.
bool IsFewBytes(const Field& field) {
  constexpr int64_t kFewBytes = 512;  // beyond it memcpy is the better loop
  return IsCopy(field) && field.source != kTrajectoryRow && field.window.length == 1 &&
         field.elements * field.to_bytes <= kFewBytes;
}

template <typename To>
GatherFunction CopyTo(const Field& field) {
  return IsFewBytes(field) ? &GatherSteps<To> : &GatherRows<To, CopyRows<To>>;
}

GatherFunction CopyFunction(const Field& field) {
  switch (field.from) {
    case kBool:
    case kUint8:
      return CopyTo<uint8_t>(field);
    case kInt8:
      return CopyTo<int8_t>(field);
    case kInt16:
      return CopyTo<int16_t>(field);
    case kInt32:
      return CopyTo<int32_t>(field);
    case kInt64:
      return CopyTo<int64_t>(field);
    case kFloat16:
      return CopyTo<Half>(field);
    case kBfloat16:
      return CopyTo<Bfloat>(field);
    case kFloat32:
      return CopyTo<float>(field);
    case kFloat64:
      return CopyTo<double>(field);
  }
  return nullptr;
}

template <typename From>
GatherFunction ConvertFrom(int64_t to) {
  switch (to) {
    case kFloat16:
      return &GatherRows<Half, ConvertRows<From, Half>>;
    case kBfloat16:
      return &GatherRows<Bfloat, ConvertRows<From, Bfloat>>;
    case kFloat32:
      return &GatherRows<float, ConvertRows<From, float>>;
    case kFloat64:
      return &GatherRows<double, ConvertRows<From, double>>;
  }
  if constexpr (std::is_integral_v<From> && sizeof(From) <= 4) {
    if (to == kInt64) return &GatherRows<int64_t, ConvertRows<From, int64_t>>;
    if (to == kInt32 && sizeof(From) <= 2) return &GatherRows<int32_t, ConvertRows<From, int32_t>>;
  }
  return nullptr;
}

GatherFunction ConvertFunction(int64_t from, int64_t to) {
  switch (from) {
    case kBool:
    case kUint8:
      return ConvertFrom<uint8_t>(to);
    case kInt8:
      return ConvertFrom<int8_t>(to);
    case kInt16:
      return ConvertFrom<int16_t>(to);
    case kInt32:
      return ConvertFrom<int32_t>(to);
    case kInt64:
      return ConvertFrom<int64_t>(to);
    case kFloat16:
      return ConvertFrom<Half>(to);
    case kBfloat16:
      return ConvertFrom<Bfloat>(to);
    case kFloat32:
      return ConvertFrom<float>(to);
    case kFloat64:
      return ConvertFrom<double>(to);
  }
  return nullptr;
}

GatherFunction FunctionFor(const Field& field) {
  if (IsComputed(field.source)) return &GatherComputed;
  return IsCopy(field) ? CopyFunction(field) : ConvertFunction(field.from, field.to);
}

}  // namespace

// Fields of few bytes are gathered together, one block of samples after another, so that the cache
// misses of all fields overlap. Field by field takes twice as long.
int64_t Gather(const Field* fields, int64_t num_fields, const Resolution* resolutions,
               const int64_t* n_steps, int64_t begin, int64_t end) {
  int64_t real = 0;
  for (const Field* field = fields; field < fields + num_fields; ++field)
    if (!IsFewBytes(*field)) real += FunctionFor(*field)(*field, resolutions, n_steps, begin, end);
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t last = Min(first + kBlock, end);
    for (const Field* field = fields; field < fields + num_fields; ++field)
      if (IsFewBytes(*field)) PrefetchSteps(*field, resolutions, first, last);
    for (const Field* field = fields; field < fields + num_fields; ++field)
      if (IsFewBytes(*field))
        real += FunctionFor(*field)(*field, resolutions, n_steps, first, last);
  }
  return real;
}

}  // namespace gear::cpu
