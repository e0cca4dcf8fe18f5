// Changes the state of slots, their lists and counters, and logs the changes.
#include "store/slots.h"

#include <algorithm>
#include <chrono>

#include "store/futex.h"

namespace gear::cpu {

namespace {

// Adds a reserved slot's trajectory and steps to the pending counts, or subtracts them.
void CountPending(Store& store, const Slot& record, int64_t sign) {
  store.control[kPending] += sign;
  store.control[kStepsPending] += sign * record.num_steps;
}

// The extent after which `num_rows` rows are free, among the next `most` ones; -1 if there is none.
// Rows that are left for a writer are found by a search of all.
int64_t FindGap(Store& store, int64_t num_rows, int64_t most) {
  const int64_t sentinel = store.num_slots, start = store.control[kRover];
  const bool all = most == INT64_MAX;
  int64_t at = start;
  do {
    const int64_t next = LinkOf(store, at, kAfter);
    const Slot& here = store.slots[at];
    const int64_t begin = at == sentinel ? 0 : here.first_row + here.num_rows;
    const int64_t end = next == sentinel ? store.num_rows : store.slots[next].first_row;
    if (end - begin >= num_rows && (all || !IsLeft(store, at))) return at;
    at = next;
  } while (at != start && --most > 0);
  return -1;
}

// Resets the words of a reserved slot's group, before its commit. Time: of Python's monotonic_ns.
void BeginGroup(Store& store, int64_t slot) {
  if (store.groups == nullptr) return;
  int64_t* words = store.groups + slot * kGroupWords;
  std::fill_n(words, kGroupWords, 0);
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  words[kGroupTime] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace

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
    FutexNotify(reinterpret_cast<uint32_t*>(&store.control[kEvent]));
  }
}

int64_t ReserveAmong(Store& store, int64_t num_rows, int64_t num_steps, int64_t most) {
  const int64_t slot = store.control[kFreeSlot];
  if (slot < 0) return kNoSlot;
  if (num_rows > store.control[kFreeRows]) return kNoRows;
  const int64_t behind = FindGap(store, num_rows, most);
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

int64_t Reserve(Store& store, int64_t num_rows, int64_t num_steps) {
  return ReserveAmong(store, num_rows, num_steps, INT64_MAX);
}

int64_t Commit(Store& store, int64_t slot, int64_t num_steps, int64_t num_rows, int64_t born,
               const std::vector<double>* block, Marks marks) {
  BeginGroup(store, slot);
  Slot& record = store.slots[slot];
  const bool counts = store.moments.head != nullptr;
  if (counts)
    StageMoments(store, slot, num_steps,
                 block == nullptr ? MomentsOf(store, slot, 0, num_steps) : *block);
  store.control[kFreeRows] += record.num_rows - num_rows;
  store.control[kRowsHeld] += num_rows - record.num_rows;
  CountPending(store, record, -1);
  record.num_steps = num_steps;
  record.num_rows = num_rows;
  record.born = born;
  record.id = store.control[kNextId] * store.id_count + store.id_index;
  ++store.control[kNextId];
  int64_t* retention = store.retention + slot * kRetentionWords;
  std::fill_n(retention, kOpen, 0);
  retention[kPresent] = marks.present;
  retention[kVersion] = marks.version;
  // The commit point: pairs with the acquire of processes that read the state without the lock.
  __atomic_store_n(&record.state, kCommitted, __ATOMIC_RELEASE);
  if (counts) PublishMoments(store);
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
  for (const Control rover : {kRover, kShortRover}) {
    if (store.control[rover] == slot) store.control[rover] = LinkOf(store, slot, kBefore);
  }
  TakeOut(store, slot, kBefore, kAfter);
  LinkOf(store, slot, kAfter) = store.control[kFreeSlot];
  store.control[kFreeSlot] = slot;
  store.control[kFreeRows] += record.num_rows;
  __atomic_store_n(&record.state, kFree, __ATOMIC_RELEASE);
}

}  // namespace gear::cpu
