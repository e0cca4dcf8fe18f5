// Writes late columns of stored trajectories, shifted by an offset, then marks them present.
#include "store/late_rows.h"

#include <cstring>

#include "common/host_device.h"
#include "store/finite_checks.h"
#include "store/slots.h"

namespace gear::cpu {

namespace {

// Rows of a trajectory, of which [begin, begin + size) have a value. For 5 rows and an offset of 2
// the rows [2, 5) have the values [0, 3); for -2 the rows [0, 3) have the values [2, 5).
struct Span {
  int64_t rows, begin, size, value;
};

Span SpanOf(const ColumnOf& column, int64_t num_steps, int64_t offset) {
  const int64_t rows = column.rows == kPerTrajectory ? 1 : num_steps + column.rows;
  const int64_t begin = Clamp<int64_t>(offset, 0, rows), value = Clamp<int64_t>(-offset, 0, rows);
  return {rows, begin, rows - begin - value, value};
}

int64_t& PresentOf(const Store& store, int64_t slot) {
  return store.retention[slot * kRetentionWords + kPresent];
}

}  // namespace

LateRows WriteLateRows(Store& store, size_t late, int64_t bit, const Resolution* records,
                       int64_t count, const char* values, int64_t offset, int64_t* slots) {
  const ColumnOf& column = store.columns[late];
  const int64_t bytes = column.row_bytes;
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Span span = SpanOf(column, records[i].num_steps, offset);
    int64_t row = first + span.value;
    if (!AllFinite(values + row * bytes, span.size * bytes, column.checked)) {
      while (AllFinite(values + row * bytes, bytes, column.checked)) ++row;
      return {0, 0, row};
    }
    first += span.rows;
  }
  LateRows done{0, 0, -1};
  first = 0;
  for (int64_t i = 0; i < count; ++i) {
    const Resolution& r = records[i];
    const Span span = SpanOf(column, r.num_steps, offset);
    const char* from = values + (first + span.value) * bytes;
    first += span.rows;
    if (r.slot < 0 || r.slot >= store.num_slots) continue;
    const Slot& slot = store.slots[r.slot];
    if (slot.state != kCommitted || slot.id != r.id || slot.num_steps != r.num_steps) continue;
    if ((PresentOf(store, r.slot) & bit) != 0) {
      ++done.repeated;
      continue;
    }
    const int64_t at = column.rows == kPerTrajectory ? r.slot : slot.first_row;
    char* to = column.base + at * bytes;
    const int64_t end = span.begin + span.size;
    std::memset(to, 0, static_cast<size_t>(span.begin * bytes));
    std::memcpy(to + span.begin * bytes, from, static_cast<size_t>(span.size * bytes));
    std::memset(to + end * bytes, 0, static_cast<size_t>((span.rows - end) * bytes));
    slots[done.written++] = r.slot;
  }
  return done;
}

void MarkPresent(Store& store, int64_t bit, const int64_t* slots, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    int64_t& present = PresentOf(store, slots[i]);
    // After the rows, also where the process dies here. Readers of the word hold the lock.
    __atomic_store_n(&present, present | bit, __ATOMIC_RELEASE);
    Note(store, slots[i]);
  }
}

}  // namespace gear::cpu
