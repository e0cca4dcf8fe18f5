// Gathers windows of columns into the tensors of a batch, on the host: copies or conversions of
// real rows, padding, and masks.
#include <cstring>
#include <type_traits>
#include <utility>

#include "common/prefetch.h"
#include "gather/cache_sizes.h"
#include "gather/gather.h"
#include "gather/rows_cpu.h"

namespace gear::cpu {
namespace {

constexpr int64_t kLookAhead = 4;    // samples whose rows are requested before their turn
constexpr int64_t kStepsAhead = 16;  // the same for single steps

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
    if (field.follows) window.offset += n_steps[i];
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

// Starts the load of a few bytes, which may lie on two lines. A wrong address is never read.
inline void PrefetchFew(const char* from, int64_t bytes) {
  Prefetch(from, 0);
  Prefetch(from, bytes - 1);
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
    if (i + kStepsAhead < end) {
      const Resolution& next = resolutions[i + kStepsAhead];
      const int64_t step = next.anchor + field.window.offset;
      PrefetchFew(RowAt(column, next.first_row, step, row_bytes), row_bytes);
    }
    const Resolution& r = resolutions[i];
    if (IsNoSample(r)) {
      PadSample<To>(field, i);
      continue;
    }
    const int64_t step = r.anchor + field.window.offset + (field.follows ? n_steps[i] : 0);
    const int64_t nearest = Clamp<int64_t>(step, 0, r.num_steps + more - 1);
    const bool is_real = step == nearest;
    char* out = static_cast<char*>(field.out) + i * row_bytes;
    const char* from = RowAt(column, r.first_row, nearest, row_bytes);
    if (is_real)
      CopyFew(from, out, row_bytes);
    else
      PadRows<To, CopyRows>(field, from, out, 1);
    if (field.mask != nullptr) field.mask[i] = is_real;
    real += is_real;
  }
  return real;
}

// The first rows of the windows of a block of samples, while all their rows are real. Fields with
// the same window share them.
class FirstRows {
 public:
  static constexpr int64_t kMost = 256;  // samples of a block

  FirstRows(const Resolution* resolutions, const int64_t* n_steps, int64_t begin, int64_t end)
      : resolutions_(resolutions), n_steps_(n_steps), begin_(begin), end_(end) {}

  // Null: a sample has padding or is none.
  const int64_t* Of(const Field& field) {
    const int64_t more = field.source == kStepRowsPlusOne ? 1 : 0;
    const int64_t offset = field.window.offset, length = field.window.length;
    const bool follows = field.follows != 0;
    if (length == length_ && offset == offset_ && more == more_ && follows == follows_)
      return are_real_ ? rows_ : nullptr;
    are_real_ = true;
    length_ = length;
    offset_ = offset;
    more_ = more;
    follows_ = follows;
    for (int64_t i = begin_; i < end_; ++i) {
      const Resolution& r = resolutions_[i];
      const int64_t step = r.anchor + offset + (follows ? n_steps_[i] : 0);
      are_real_ &= !IsNoSample(r) && step >= 0 && step <= r.num_steps + more - length;
      rows_[i - begin_] = r.first_row + step;
    }
    return are_real_ ? rows_ : nullptr;
  }

 private:
  const Resolution* resolutions_;
  const int64_t* n_steps_;
  int64_t begin_, end_, length_ = 0, offset_ = 0, more_ = 0;
  bool are_real_ = false, follows_ = false;
  int64_t rows_[kMost];
};

// Copies windows of one size, which the compiler knows where it is not 0.
template <int64_t kBytes>
void CopyWindows(const char* column, const int64_t* rows, int64_t count, int64_t row_bytes,
                 int64_t window_bytes, char* out) {
  constexpr int64_t kLine = 64, kFewBytes = 512;  // beyond it memcpy is the better loop
  const int64_t bytes = kBytes == 0 ? window_bytes : kBytes;
  const int64_t stride = kBytes == 0 ? row_bytes : kBytes;
  const int64_t ahead = bytes <= kFewBytes ? kStepsAhead : kLookAhead;
  for (int64_t i = 0; i < count; ++i) {
    if (i + ahead < count) {
      const char* next = column + rows[i + ahead] * stride;
      bytes <= kLine ? PrefetchFew(next, bytes) : PrefetchBytes(next, bytes);
    }
    const char* from = column + rows[i] * stride;
    if constexpr (kBytes != 0)
      std::memcpy(out + i * kBytes, from, kBytes);
    else if (bytes <= kFewBytes)
      CopyFew(from, out + i * bytes, bytes);
    else
      std::memcpy(out + i * bytes, from, static_cast<size_t>(bytes));
  }
}

using CopyFunction = void (*)(const char*, const int64_t*, int64_t, int64_t, int64_t, char*);

template <size_t... kWords>
CopyFunction CopyOf(const Field& field, int64_t row_bytes, std::index_sequence<kWords...>) {
  constexpr CopyFunction kCopies[] = {&CopyWindows<static_cast<int64_t>(4 * kWords)>...};
  if (field.window.length != 1) return &CopyWindows<0>;
  if (row_bytes == 1) return &CopyWindows<1>;
  if (row_bytes == 2) return &CopyWindows<2>;
  const int64_t words = row_bytes / 4;
  const bool is_known = row_bytes % 4 == 0 && words < static_cast<int64_t>(sizeof...(kWords));
  return is_known ? kCopies[words] : &CopyWindows<0>;
}

// The step numbers of a window themselves, or its places; nothing is read.
int64_t GatherComputed(const Field& field, const Resolution* resolutions, const int64_t* n_steps,
                       int64_t begin, int64_t end) {
  const int64_t length = field.part.count;
  const bool is_whole = length == field.window.length;
  int64_t real = 0;
  for (int64_t i = begin; i < end; ++i) {
    Window window = field.window;
    if (field.follows) window.offset += n_steps[i];
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

// Whether a sample is one step, unchanged.
bool IsOneStep(const Field& field) {
  constexpr int64_t kFewBytes = 512;  // beyond it memcpy is the better loop
  return IsCopy(field) && field.source != kTrajectoryRow && field.window.length == 1 &&
         field.elements * field.to_bytes <= kFewBytes;
}

// Whether a sample is a short run of rows, unchanged: much of its time is cache misses and
// decisions about padding.
bool IsShort(const Field& field) {
  constexpr int64_t kMostBytes = 2048;
  return IsCopy(field) && field.source != kTrajectoryRow &&
         field.part.count == field.window.length &&
         field.window.length * field.elements * field.to_bytes <= kMostBytes;
}

int64_t RunBytes(const Field& field) { return field.part.count * field.elements * field.to_bytes; }

// Whether the long runs of a batch are stored past the caches: the caches do not hold its fields,
// which share them, until its buffers are written again.
bool IsStreamed(const Field* fields, int64_t num_fields, int64_t batch) {
  static const int64_t least = LeastStreamed(CachesOfMachine());
  int64_t bytes = 0;
  for (const Field* field = fields; field < fields + num_fields; ++field) bytes += RunBytes(*field);
  return batch * bytes >= least;
}

int64_t GatherField(const Field& field, const Resolution* resolutions, const int64_t* n_steps,
                    int64_t begin, int64_t end, bool streams) {
  if (IsComputed(field.source)) return GatherComputed(field, resolutions, n_steps, begin, end);
  const bool is_streamed = streams && RunBytes(field) >= kLeastStreamedRun;
  const bool is_one_step = IsOneStep(field);
  return WithRows(field, [&](auto to, auto rows) {
    using To = decltype(to);
    using Rows = decltype(rows);
    if constexpr (std::is_same_v<Rows, CopyRows>) {
      if (is_streamed) return GatherRows<To, StreamRows>(field, resolutions, n_steps, begin, end);
      if (is_one_step) return GatherSteps<To>(field, resolutions, n_steps, begin, end);
    }
    return GatherRows<To, Rows>(field, resolutions, n_steps, begin, end);
  });
}

// A field of short windows. Their rows are known before the first is read: so the loads of many
// samples are under way at once. Deciding about each window before its copy takes twice as long.
int64_t GatherShort(const Field& field, const Resolution* resolutions, const int64_t* n_steps,
                    int64_t begin, int64_t end, FirstRows* first_rows) {
  const int64_t* rows = first_rows->Of(field);
  if (rows == nullptr) return GatherField(field, resolutions, n_steps, begin, end, false);
  const int64_t length = field.window.length, row_bytes = field.elements * field.to_bytes;
  const int64_t count = end - begin;
  const auto copy = CopyOf(field, row_bytes, std::make_index_sequence<17>());
  copy(static_cast<const char*>(field.column), rows, count, row_bytes, length * row_bytes,
       static_cast<char*>(field.out) + begin * length * row_bytes);
  if (field.mask != nullptr)
    std::memset(field.mask + begin * length, 1, static_cast<size_t>(count * length));
  return count * length;
}

}  // namespace

int64_t Gather(const Field* fields, int64_t num_fields, const Resolution* resolutions,
               const int64_t* n_steps, int64_t begin, int64_t end, int64_t batch) {
  const bool streams = IsStreamed(fields, num_fields, batch == 0 ? end - begin : batch);
  int64_t real = 0;
  for (const Field* field = fields; field < fields + num_fields; ++field)
    if (!IsShort(*field)) real += GatherField(*field, resolutions, n_steps, begin, end, streams);
  if (streams) EndStreaming();
  for (int64_t first = begin; first < end; first += FirstRows::kMost) {
    const int64_t last = Min(first + FirstRows::kMost, end);
    FirstRows first_rows(resolutions, n_steps, first, last);
    for (const Field* field = fields; field < fields + num_fields; ++field)
      if (IsShort(*field))
        real += GatherShort(*field, resolutions, n_steps, first, last, &first_rows);
  }
  return real;
}

}  // namespace gear::cpu
