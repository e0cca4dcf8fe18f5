#include "store/store.h"
#include "store/bell.h"
#include "store/held.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace gear::cpu {

namespace {

int64_t& LinkOf(Store& store, int64_t slot, Link word) {
  return store.links[slot * kLinkWords + word];
}

int64_t& OpenOf(const Store& store, int64_t slot) {
  return store.retention[slot * kRetentionWords + kOpen];
}

// Adds a reserved slot's trajectory and steps to the pending counts, or subtracts them.
void CountPending(Store& store, const Slot& record, int64_t sign) {
  store.control[kPending] += sign;
  store.control[kStepsPending] += sign * record.num_steps;
}

void InsertBehind(Store& store, int64_t where, int64_t slot, Link back, Link on) {
  const int64_t next = LinkOf(store, where, on);
  LinkOf(store, slot, back) = where;
  LinkOf(store, slot, on) = next;
  LinkOf(store, where, on) = slot;
  LinkOf(store, next, back) = slot;
}

void TakeOut(Store& store, int64_t slot, Link back, Link on) {
  const int64_t before = LinkOf(store, slot, back), after = LinkOf(store, slot, on);
  LinkOf(store, before, on) = after;
  LinkOf(store, after, back) = before;
}

void Note(Store& store, int64_t slot) {
  int64_t& changed = store.control[kChanged];
  store.log[changed % store.log_size] = slot;
  ++changed;
  int64_t& listening = store.control[kListening];
  if (listening != 0) {  // set and cleared with the lock held, so no earlier change is missed
    listening = 0;
    BellRing(reinterpret_cast<uint32_t*>(&store.control[kBell]));
  }
}

// The extent after which `num_rows` rows are free; -1 if there is none.
int64_t FindGap(Store& store, int64_t num_rows) {
  const int64_t sentinel = store.num_slots, start = store.control[kRover];
  int64_t at = start;
  do {
    const int64_t next = LinkOf(store, at, kAfter);
    const Slot& here = store.slots[at];
    const int64_t begin = at == sentinel ? 0 : here.first_row + here.num_rows;
    const int64_t end = next == sentinel ? store.num_rows : store.slots[next].first_row;
    if (end - begin >= num_rows) return at;
    at = next;
  } while (at != start);
  return -1;
}

// The lock was not taken: the refusal; else 0.
int64_t RefusalOf(const Held& held) {
  switch (held.refused()) {
    case Refused::kNo:
      return 0;
    case Refused::kTimeout:
      return kLockTimeout;
    case Refused::kBroken:
      return kLockBroken;
    case Refused::kMustRecover:
      return kMustRecover;
  }
  return kLockBroken;
}

int64_t RowsOf(const Store& store, int64_t num_steps) {
  for (const ColumnOf& column : store.columns) {
    if (column.rows == kPerStepAndEnd) return num_steps + 1;
  }
  return num_steps;
}

// Copies a trajectory into its slot; returns whether all values are finite where they must be.
bool Write(Store& store, int64_t slot, const void* const* sources, int64_t num_steps) {
  const int64_t first = store.slots[slot].first_row;
  for (size_t i = 0; i < store.columns.size(); ++i) {
    const ColumnOf& column = store.columns[i];
    const bool single = column.rows == kPerTrajectory;
    const int64_t rows = single ? 1 : num_steps + column.rows;
    char* to = column.base + (single ? slot : first) * column.row_bytes;
    if (!CopyFinite(to, sources[i], rows * column.row_bytes, column.checked)) return false;
  }
  return true;
}

bool IsOver(const Store& store, int64_t num_steps) {
  const int64_t held = store.control[kNumCommitted] + store.control[kPending];
  const int64_t final_rows = RowsOf(store, 0);
  const int64_t steps = store.control[kRowsHeld] - held * final_rows;
  return held + 1 > store.most_trajectories || steps + num_steps > store.most_steps;
}

// The trajectory to evict next; the sentinel if there is none. Skips open trajectories.
int64_t NextToEvict(Store& store) {
  const Link on = store.removal == kOldest ? kNewer : kOlder;
  int64_t slot = LinkOf(store, store.num_slots, on);
  while (slot != store.num_slots && OpenOf(store, slot) != 0) slot = LinkOf(store, slot, on);
  return slot;
}

// Rows of retired slots that become free as soon as no process reads them. An open slot, whose
// writer must first detect that it was retired, does not count: that may take long.
int64_t RowsBeingRead(Store& store) {
  const int64_t sentinel = store.num_slots + 1;
  int64_t rows = 0;
  for (int64_t slot = LinkOf(store, sentinel, kNewer); slot != sentinel;
       slot = LinkOf(store, slot, kNewer))
    rows += OpenOf(store, slot) == 0 ? store.slots[slot].num_rows : 0;
  return rows;
}

void FreeUnpinned(Store& store) {
  const int64_t sentinel = store.num_slots + 1;
  for (int64_t slot = LinkOf(store, sentinel, kNewer); slot != sentinel;) {
    const int64_t next = LinkOf(store, slot, kNewer);
    if (!IsPinned(store, slot)) Free(store, slot);
    slot = next;
  }
}

}  // namespace

int64_t Reserve(Store& store, int64_t num_rows, int64_t num_steps) {
  const int64_t slot = store.control[kFreeSlot];
  if (slot < 0) return kNoSlot;
  if (num_rows > store.control[kFreeRows]) return kNoRows;
  const int64_t behind = FindGap(store, num_rows);
  if (behind < 0) return kScattered;
  const Slot& before = store.slots[behind];
  Slot& record = store.slots[slot];
  store.control[kFreeSlot] = LinkOf(store, slot, kAfter);
  ++record.generation;
  record.first_row = behind == store.num_slots ? 0 : before.first_row + before.num_rows;
  record.num_steps = num_steps;
  record.num_rows = num_rows;
  record.owner = store.peer;
  __atomic_store_n(&record.state, kReserved, __ATOMIC_RELEASE);
  InsertBehind(store, behind, slot, kBefore, kAfter);
  store.control[kRover] = slot;
  store.control[kFreeRows] -= num_rows;
  OpenOf(store, slot) = 0;
  CountPending(store, record, 1);
  store.control[kRowsHeld] += num_rows;
  return slot;
}

int64_t Commit(Store& store, int64_t slot, int64_t num_steps, int64_t num_rows, int64_t born) {
  Slot& record = store.slots[slot];
  store.control[kFreeRows] += record.num_rows - num_rows;
  store.control[kRowsHeld] += num_rows - record.num_rows;
  CountPending(store, record, -1);
  record.num_steps = num_steps;
  record.num_rows = num_rows;
  record.born = born;
  record.id = store.control[kNextId] * store.id_count + store.id_index;
  ++store.control[kNextId];
  std::fill_n(store.retention + slot * kRetentionWords, kOpen, 0);
  // The commit point: pairs with the acquire of processes that read the state without the lock.
  __atomic_store_n(&record.state, kCommitted, __ATOMIC_RELEASE);
  InsertBehind(store, LinkOf(store, store.num_slots, kOlder), slot, kOlder, kNewer);
  ++store.control[kNumCommitted];
  store.control[kStepsCommitted] += num_steps;
  ++store.control[kInserted];
  store.control[kStepsInserted] += num_steps;
  Note(store, slot);
  return record.id;
}

void Retire(Store& store, int64_t slot) {
  Slot& record = store.slots[slot];
  __atomic_store_n(&record.state, kRetired, __ATOMIC_RELEASE);
  TakeOut(store, slot, kOlder, kNewer);
  InsertBehind(store, LinkOf(store, store.num_slots + 1, kOlder), slot, kOlder, kNewer);
  --store.control[kNumCommitted];
  store.control[kStepsCommitted] -= record.num_steps;
  store.control[kRowsHeld] -= record.num_rows;
  Note(store, slot);
}

void Free(Store& store, int64_t slot) {
  Slot& record = store.slots[slot];
  if (record.state == kRetired) TakeOut(store, slot, kOlder, kNewer);
  if (record.state == kReserved) {
    store.control[kRowsHeld] -= record.num_rows;
    CountPending(store, record, -1);
  }
  if (store.control[kRover] == slot) store.control[kRover] = LinkOf(store, slot, kBefore);
  TakeOut(store, slot, kBefore, kAfter);
  LinkOf(store, slot, kAfter) = store.control[kFreeSlot];
  store.control[kFreeSlot] = slot;
  store.control[kFreeRows] += record.num_rows;
  __atomic_store_n(&record.state, kFree, __ATOMIC_RELEASE);
}

bool IsPinned(const Store& store, int64_t slot) {
  if (OpenOf(store, slot) != 0) return true;  // its writer has not yet detected that it was retired
  for (const Pins& pins : store.pins) {
    const int64_t drawn = pins.last_drawn[slot];
    for (int64_t peer = 0; peer < pins.num_peers; ++peer) {
      // Pairs with the release of a process that has copied its rows of the selection.
      if (__atomic_load_n(&pins.consumed[peer], __ATOMIC_ACQUIRE) <= drawn) return true;
    }
  }
  return false;
}

bool MayInsert(const Store& store, int64_t num_steps) {
  const Rate& rate = store.rate;
  if (!rate.limited) return true;
  int64_t* control = store.control;
  const int64_t added = rate.per_step ? num_steps : 1;
  const int64_t pending = rate.per_step ? control[kStepsPending] : control[kPending];
  const int64_t inserted = (rate.per_step ? control[kStepsInserted] : control[kInserted]) + pending;
  if (store.id_count > 1 && std::isfinite(rate.most)) {
    if (inserted + added <= control[kQuota]) return true;
    control[kWanted] = std::max(control[kWanted], added);
    return false;
  }
  const int64_t size = rate.per_step ? control[kStepsCommitted] : control[kNumCommitted];
  if (size + pending + added <= rate.min_size) return true;
  const double ahead = static_cast<double>(inserted + added) * rate.samples_per_insert;
  const int64_t sampled = store.position == nullptr ? 0 : store.position[1];
  return ahead - static_cast<double>(sampled) <= rate.most;
}

int64_t ReserveWithRemoval(Store& store, int64_t num_rows, int64_t num_steps) {
  bool freed = false;
  while (true) {
    int64_t found =
        IsOver(store, num_steps) ? int64_t{kNoRows} : Reserve(store, num_rows, num_steps);
    if (found >= 0) return found;
    if (!freed) {
      FreeUnpinned(store);
      freed = true;
      continue;
    }
    if (store.removal == kNoEviction || store.removal == kByCaller) return found;
    const int64_t left = store.control[kFreeRows] - num_rows;
    if (found == kScattered && left >= store.least_free_rows) return found;
    const int64_t waiting = RowsBeingRead(store);
    const bool fits = waiting > 0 && store.control[kFreeRows] + waiting >= num_rows;
    if (store.control[kSelecting] != 0 || (fits && !IsOver(store, num_steps))) return kPinned;
    const int64_t slot = NextToEvict(store);
    if (slot == store.num_slots) {
      const bool comes = waiting > 0 || store.control[kPending] > 0;
      return comes ? int64_t{kPinned} : found;
    }
    Retire(store, slot);
    if (!IsPinned(store, slot)) Free(store, slot);
  }
}

Added Add(Store& store, const void* const* sources, int64_t num_steps, double timeout_s) {
  int64_t slot = -1;
  {
    const Held held(store.mutex, store.holder, timeout_s);
    if (RefusalOf(held) != 0) return {RefusalOf(held), -1};
    if (!MayInsert(store, num_steps)) return {kRateLimited, -1};
    slot = ReserveWithRemoval(store, RowsOf(store, num_steps), num_steps);
    if (slot < 0) return {slot, -1};
  }
  const bool finite = Write(store, slot, sources, num_steps);  // the rows belong to this process
  const Held held(store.mutex, store.holder, timeout_s);
  if (!finite) {
    if (RefusalOf(held) != 0) return {kNotFinite, slot};
    Free(store, slot);
    return {kNotFinite, -1};
  }
  if (RefusalOf(held) != 0) return {RefusalOf(held), slot};
  const int64_t born = store.position == nullptr ? 0 : store.position[0];
  return {Commit(store, slot, num_steps, store.slots[slot].num_rows, born), slot};
}

namespace {

// Whether a slot is still its writer's own, and was not evicted since.
bool Stands(const Store& store, const Growing& growing) {
  const Slot& record = store.slots[growing.slot];
  const bool is_same = record.generation == growing.generation && record.owner == store.peer &&
                       store.control[kLoads] == growing.loads;
  return is_same && record.state == kCommitted && OpenOf(store, growing.slot) != 0;
}

// Copies steps [published, num_steps) into the slot's rows, which no process reads yet.
void WriteSteps(Store& store, const Staged& staged, const Growing& growing, int64_t num_steps) {
  const int64_t to = store.slots[growing.slot].first_row, from = staged.first_row + growing.first;
  for (size_t i = 0; i < store.columns.size(); ++i) {
    const ColumnOf& column = store.columns[i];
    if (column.rows == kPerTrajectory) continue;
    const int64_t begin = growing.published + column.rows, end = num_steps + column.rows;
    char* rows = column.base + (to + begin) * column.row_bytes;
    const auto num_bytes = static_cast<size_t>((end - begin) * column.row_bytes);
    if (staged.columns[i] == nullptr)
      std::memset(rows, 0, num_bytes);
    else
      std::memcpy(rows, staged.columns[i] + (from + begin) * column.row_bytes, num_bytes);
  }
}

}  // namespace

int64_t Grow(Store& store, const Staged* staged, Growing* growing, int64_t count,
             int64_t most_steps, double timeout_s) {
  const Held held(store.mutex, store.holder, timeout_s);
  if (RefusalOf(held) != 0) return count;
  int64_t left = 0;
  for (int64_t i = 0; i < count; ++i) {
    Growing& one = growing[i];
    const int64_t num_steps = staged[i].num_steps - one.first, more = num_steps - one.published;
    if (staged[i].num_steps == 0 || (one.slot >= 0 && more <= 0)) continue;
    const bool goes = one.slot >= 0 && one.published > 0 && num_steps <= most_steps &&
                      Stands(store, one) && (!store.rate.per_step || MayInsert(store, more));
    if (!goes) {
      ++left;
      continue;
    }
    WriteSteps(store, staged[i], one, num_steps);
    one.published = num_steps;
    // The commit point: pairs with the acquire of processes that read the slot without the lock.
    __atomic_store_n(&store.slots[one.slot].num_steps, num_steps, __ATOMIC_RELEASE);
    store.control[kStepsCommitted] += more;
    store.control[kStepsInserted] += more;
    Note(store, one.slot);
  }
  return left;
}

}  // namespace gear::cpu
