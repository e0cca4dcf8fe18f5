// Requests of rows of mapped files, block by block, before a gather copies them.
#include "gather/read_ahead.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "common/convert.h"
#include "common/prefetch.h"

namespace gear::cpu {
namespace {

constexpr int kMaps = 256;
// Requests of a block of samples, of the next block, and of the next batch.
constexpr int64_t kBlocks = 3;

struct MarkedMap {
  std::atomic<uintptr_t> begin{0};  // 0: the entry is free
  std::atomic<uintptr_t> end{0};
  std::atomic<int64_t> most_bytes{0};
};

MarkedMap maps[kMaps];
std::atomic<int> used{0};  // entries of `maps` that may be taken: those before it

uintptr_t PageBytes() {
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

const MarkedMap* MapOf(const void* column) {
  const auto address = reinterpret_cast<uintptr_t>(column);
  const int count = used.load(std::memory_order_acquire);  // pairs with ReadAheadAdd
  for (const MarkedMap* map = maps; map < maps + count; ++map) {
    const uintptr_t begin = map->begin.load(std::memory_order_acquire);  // pairs with ReadAheadAdd
    if (begin != 0 && begin <= address && address < map->end.load(std::memory_order_relaxed))
      return map;
  }
  return nullptr;
}

int64_t RowBytes(const Field& field) { return field.elements * SizeOf(field.from); }

// The rows of its column that a field reads of a sample: [first, first + count).
std::pair<int64_t, int64_t> RowsOf(const Field& field, const Resolution& r, int64_t n_steps) {
  if (field.source == kTrajectoryRow) return {r.slot, 1};
  Window window = field.window;
  window.offset += n_steps;
  const int64_t held = r.num_steps + (field.source == kStepRowsPlusOne ? 1 : 0);
  const Span span = Cut(Bounds(window, r.anchor, held), field.part);
  if (span.end > span.begin) return {r.first_row + span.begin, span.end - span.begin};
  return {r.first_row + span.before, field.pad == kPadEdge ? 1 : 0};
}

}  // namespace

int ReadAheadAdd(const void* begin, size_t num_bytes, int64_t most_bytes) {
  for (int entry = 0; entry < kMaps; ++entry) {
    MarkedMap& map = maps[entry];
    if (map.begin.load(std::memory_order_relaxed) != 0) continue;  // one caller at a time
    const auto first = reinterpret_cast<uintptr_t>(begin);
    map.end.store(first + num_bytes, std::memory_order_relaxed);
    map.most_bytes.store(most_bytes, std::memory_order_relaxed);
    map.begin.store(first, std::memory_order_release);  // pairs with MapOf: its end is there
    if (used.load(std::memory_order_relaxed) <= entry)
      used.store(entry + 1, std::memory_order_release);  // pairs with MapOf: the entry is there
    return entry;
  }
  return -1;
}

void ReadAheadRemove(int entry) {
  if (entry >= 0 && entry < kMaps) maps[entry].begin.store(0, std::memory_order_relaxed);
}

ReadAhead::ReadAhead(const Field* fields, int64_t num_fields, int64_t threads) {
  if (used.load(std::memory_order_relaxed) == 0) return;
  const auto page = static_cast<int64_t>(PageBytes());
  int64_t most_bytes = 0, sample_bytes = 0;
  for (const Field* field = fields; field < fields + num_fields; ++field) {
    const MarkedMap* map = field->column == nullptr ? nullptr : MapOf(field->column);
    if (map == nullptr) continue;
    columns_.push_back({field, map->begin.load(std::memory_order_relaxed),
                        map->end.load(std::memory_order_relaxed)});
    const int64_t bytes = map->most_bytes.load(std::memory_order_relaxed);
    most_bytes = most_bytes == 0 ? bytes : Min(most_bytes, bytes);
    // A window begins in the middle of a page.
    sample_bytes += field->part.count * RowBytes(*field) + page;
  }
  if (columns_.empty()) return;
  block_bytes_ = most_bytes / (kBlocks * Max<int64_t>(threads, 1));
  block_ = Max<int64_t>(block_bytes_ / sample_bytes, 1);
  most_run_ = Max<int64_t>(block_bytes_ / static_cast<int64_t>(columns_.size()), page);
}

void ReadAhead::Add(const Column& column, int64_t row, int64_t count, Ranges* ranges) const {
  const uintptr_t page = PageBytes();
  const int64_t row_bytes = RowBytes(*column.field);
  const auto first = reinterpret_cast<uintptr_t>(RowAt(column.field->column, row, 0, row_bytes));
  const uintptr_t last = first + static_cast<uintptr_t>(Min(count * row_bytes, most_run_));
  const uintptr_t from = Max(first, column.begin) / page * page;
  const uintptr_t until = (Min(last, column.end) + page - 1) / page * page;
  if (count > 0 && from < until) ranges->emplace_back(from, until);
}

void ReadAhead::Advise(Ranges* ranges) {
  std::sort(ranges->begin(), ranges->end());
  for (size_t i = 0; i < ranges->size();) {
    const uintptr_t from = (*ranges)[i].first;
    uintptr_t until = (*ranges)[i].second;
    for (++i; i < ranges->size() && (*ranges)[i].first <= until; ++i)
      until = std::max(until, (*ranges)[i].second);
    madvise(reinterpret_cast<void*>(from), until - from, MADV_WILLNEED);
  }
}

void ReadAhead::Request(const Resolution* resolutions, const int64_t* n_steps, int64_t begin,
                        int64_t end) const {
  Ranges ranges;
  ranges.reserve(static_cast<size_t>(end - begin) * columns_.size());
  for (const Column& column : columns_) {
    const Field& field = *column.field;
    if (field.follows && n_steps == nullptr) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (IsNoSample(resolutions[i])) continue;
      const auto [row, count] = RowsOf(field, resolutions[i], field.follows ? n_steps[i] : 0);
      Add(column, row, count, &ranges);
    }
  }
  Advise(&ranges);
}

void ReadAhead::RequestWhole(const Resolution* resolutions, int64_t count) const {
  Ranges ranges;
  int64_t left = block_bytes_;
  for (int64_t i = 0; i < count && left > 0; ++i) {
    const Resolution& r = resolutions[i];
    for (const Column& column : columns_) {
      const Field& field = *column.field;
      if (field.source == kTrajectoryRow) {
        Add(column, r.slot, 1, &ranges);
        continue;
      }
      const int64_t held = r.num_steps + (field.source == kStepRowsPlusOne ? 1 : 0);
      const int64_t begin = Clamp<int64_t>(field.window.offset, 0, held);
      const int64_t end = Clamp<int64_t>(field.window.offset + r.num_steps, begin, held);
      Add(column, r.first_row + begin, end - begin, &ranges);
      left -= (end - begin) * RowBytes(field);
    }
  }
  Advise(&ranges);
}

}  // namespace gear::cpu
