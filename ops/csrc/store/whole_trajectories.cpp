// Adds a trajectory with one reservation and commit; writes and commits groups of leases.
#include "store/whole_trajectories.h"

#include <cstring>

#include "store/finite_checks.h"
#include "store/reserve_rows.h"
#include "store/scoped_lock.h"
#include "store/slots.h"

namespace gear::cpu {

namespace {

// Copies a trajectory into its slot, all but its first `before` steps, which another slot holds;
// late columns that it has not become zeros. Returns whether all values are finite where they must
// be. Of 5 steps and a `before` of 2, a column of T+1 rows has the rows [2, 6) copied.
bool Write(Store& store, int64_t slot, const Whole& whole, int64_t before = 0) {
  const int64_t first = store.slots[slot].first_row;
  for (size_t i = 0; i < store.columns.size(); ++i) {
    const ColumnOf& column = store.columns[i];
    const bool single = column.rows == kPerTrajectory;
    const int64_t skipped = single ? 0 : before * column.row_bytes;
    const int64_t rows = single ? 1 : whole.num_steps + column.rows;
    const int64_t bytes = rows * column.row_bytes - skipped;
    char* to = column.base + (single ? slot : first) * column.row_bytes;
    if (whole.sources[i] == nullptr) {
      std::memset(to, 0, static_cast<size_t>(bytes));
      continue;
    }
    const char* from = static_cast<const char*>(whole.sources[i]) + skipped;
    if (!CopyFinite(to, from, bytes, column.checked)) return false;
  }
  return true;
}

// Whether the group of a written slot has its most trajectories: TableGroups.check_room.
bool IsGroupFull(const Store& store, int64_t slot) {
  if (store.most_of_group == 0) return false;
  const ColumnOf& numbers = store.columns[store.group_column];
  const auto bytes = static_cast<size_t>(numbers.row_bytes);
  const char* number = numbers.base + slot * numbers.row_bytes;
  int64_t count = 0;
  for (int64_t other = 0; other < store.num_slots; ++other) {
    const bool is_stored = store.slots[other].state == kCommitted;
    const char* of_other = numbers.base + other * numbers.row_bytes;
    count += is_stored && std::memcmp(of_other, number, bytes) == 0;
  }
  return count >= store.most_of_group;
}

}  // namespace

Added Add(Store& store, const Whole& whole, double timeout_s) {
  const int64_t num_steps = whole.num_steps;
  int64_t slot = -1;
  {
    const ScopedLock held(store.mutex, store.holder, timeout_s);
    if (held.refusal() != 0) return {held.refusal(), -1};
    slot = ReserveWithRemoval(store, {RowsOf(store, num_steps), num_steps, num_steps});
    if (slot < 0) return {slot, -1};
  }
  const bool finite = Write(store, slot, whole);  // the rows belong to this process
  std::vector<double> block;
  if (finite && store.moments.head != nullptr) block = MomentsOf(store, slot, 0, num_steps);
  const ScopedLock held(store.mutex, store.holder, timeout_s);
  if (!finite) {
    if (held.refusal() != 0) return {kNotFinite, slot};
    Free(store, slot);
    return {kNotFinite, -1};
  }
  if (held.refusal() != 0) return {held.refusal(), slot};
  if (IsGroupFull(store, slot)) return {kGroupFull, slot};
  const int64_t num_rows = store.slots[slot].num_rows;
  const Marks marks{whole.present, 0};
  return {Commit(store, slot, num_steps, num_rows, BornNow(store), &block, marks), slot};
}

int64_t WriteGroup(Store& store, const Whole* members, int64_t count, const int64_t* shared,
                   int64_t* slots, double timeout_s) {
  {
    const ScopedLock held(store.mutex, store.holder, timeout_s);
    if (held.refusal() != 0) return held.refusal();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t steps = members[i].num_steps - shared[i];
      const int64_t slot = ReserveWithRemoval(store, {RowsOf(store, steps), steps, steps});
      if (slot >= 0) {
        slots[i] = slot;
        continue;
      }
      for (int64_t reserved = 0; reserved < i; ++reserved) {
        Free(store, slots[reserved]);
        slots[reserved] = -1;
      }
      return slot;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    Write(store, slots[i], members[i], shared[i]);
    int64_t* words = store.shared_prompts + slots[i] * 2;
    words[0] = shared[i];
    words[1] = i == 0 ? 0 : slots[0];
  }
  return 0;
}

void CommitGroup(Store& store, const int64_t* slots, const int64_t* present, int64_t count,
                 int64_t version, int64_t born, int64_t* ids) {
  for (int64_t i = 0; i < count; ++i) {
    const Slot& record = store.slots[slots[i]];
    const Marks marks{present[i], version};
    ids[i] = Commit(store, slots[i], record.num_steps, record.num_rows, born, nullptr, marks);
  }
}

}  // namespace gear::cpu
