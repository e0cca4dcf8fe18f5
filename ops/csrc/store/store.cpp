#include "store/store.h"
#include "common/convert.h"
#include "common/row_copies.h"
#include "select/stream.h"
#include "store/compact.h"
#include "store/futex.h"
#include "store/scoped_lock.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

namespace gear::cpu {

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

namespace {

int64_t& OpenOf(const Store& store, int64_t slot) {
  return store.retention[slot * kRetentionWords + kOpen];
}

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

int64_t RowsOf(const Store& store, int64_t num_steps) {
  for (const ColumnOf& column : store.columns) {
    if (column.rows == kPerStepAndEnd) return num_steps + 1;
  }
  return num_steps;
}

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

// Resets the words of a reserved slot's group, before its commit: TableGroups.begin.
void BeginGroup(Store& store, int64_t slot) {
  if (store.groups == nullptr) return;
  int64_t* words = store.groups + slot * kGroupWords;
  std::fill_n(words, kGroupWords, 0);
  const auto now = std::chrono::steady_clock::now().time_since_epoch();  // Python's monotonic_ns
  words[kGroupTime] = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
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

// The global batch that is selected next.
int64_t BornNow(const Store& store) { return store.position == nullptr ? 0 : store.position[0]; }

bool IsOver(const Store& store, int64_t num_steps) {
  const int64_t held = store.control[kNumCommitted] + store.control[kPending];
  const int64_t final_rows = RowsOf(store, 0);
  const int64_t steps = store.control[kRowsHeld] - held * final_rows;
  return held + 1 > store.most_trajectories || steps + num_steps > store.most_steps;
}

double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Whether a trajectory is stored and does not grow.
bool IsComplete(const Store& store, int64_t slot) {
  return store.slots[slot].state == kCommitted && OpenOf(store, slot) == 0;
}

int64_t AnyComplete(const Store& store) {
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot < store.num_slots; ++slot) {
    if (IsComplete(store, slot)) slots.push_back(slot);
  }
  if (slots.empty()) return -1;
  const auto number = static_cast<uint64_t>(store.control[kNextId]);
  return slots[Coordinate(Philox(0, number, 0, kForEviction), slots.size())];
}

// The complete trajectory of the lowest value, of equal ones that of the lowest id; -1: none.
template <typename ValueOf>
int64_t LowestComplete(const Store& store, const ValueOf& value_of) {
  int64_t lowest = -1;
  double least = 0;
  for (int64_t slot = 0; slot < store.num_slots; ++slot) {
    if (!IsComplete(store, slot)) continue;
    const double value = value_of(slot);
    const bool is_lower = lowest < 0 || value < least ||
                          (value == least && store.slots[slot].id < store.slots[lowest].id);
    if (!is_lower) continue;
    lowest = slot;
    least = value;
  }
  return lowest;
}

// The priority of a trajectory, or the highest of its steps; infinite if it is newer than the
// latest selection: it has none yet.
double PriorityOf(const Store& store, const StreamView& stream, int64_t slot) {
  const Slot& record = store.slots[slot];
  if (stream.generations[slot] != record.generation) return INFINITY;
  if (stream.steps.target.sums == nullptr) return stream.priorities[slot];
  const float* first = stream.priorities + record.first_row;
  return *std::max_element(first, first + record.num_rows);
}

double ValueOf(const Store& store, int64_t slot) {
  const ColumnOf& column = store.columns[store.value_column];
  const char* at = column.base + slot * column.row_bytes;
  const double value = WithType(store.value_dtype, [at](auto one) {
    return Load<double>(*reinterpret_cast<const decltype(one)*>(at));
  });
  return std::isnan(value) ? -INFINITY : value;
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

// Frees a retired slot: priorities of its rows must not be those of the next trajectory there.
void FreeWithPriorities(Store& store, int64_t slot) {
  const Slot& record = store.slots[slot];
  for (const StreamView& stream : store.streams) {
    if (stream.steps.target.sums != nullptr)
      ForgetRows(stream.steps, record.first_row, record.num_rows);
  }
  Free(store, slot);
}

constexpr int kBack = 8;  // extents before a writer's latest one, where its search begins

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

bool MovesExtents(const Store& store) {
  return store.spare_rows > 0 && store.control[kSelecting] == 0;
}

// Evicts a trajectory; returns whether its rows are free now.
bool Evict(Store& store, int64_t slot) {
  Retire(store, slot);
  if (IsPinned(store, slot)) return false;
  store.control[kShortRover] = LinkOf(store, slot, kBefore);
  FreeWithPriorities(store, slot);
  return true;
}

// Lets the search for a long run begin where it is likely to be found. In a full table of many
// trajectories the latest one of the same writer moves out of what was reserved for it, to rows of
// others, which are evicted for it; else the search begins near it.
void PrepareRun(Store& store, SlotUse last, int64_t num_rows) {
  constexpr int kMostEvicted = 4;
  const Slot& record = store.slots[last.slot];
  if (record.state != kCommitted || record.generation != last.generation) return;
  store.left_by[last.slot] = 0;
  const int64_t free = store.control[kFreeRows] - num_rows, least = store.least_free_rows;
  const bool is_full = free < 3 * least && store.control[kNumCommitted] > kMany;
  if (!is_full || record.num_rows >= num_rows / 2 || !MovesExtents(store)) {
    SearchNear(store, last.slot, kBack);
    return;
  }
  // With a margin, so that compaction, which evicts below `least`, is not needed. What is free
  // above it lies in gaps, which a longer search finds.
  const bool evicts = free < 3 * least / 2 && store.removal != kNoEviction;
  for (int evicted = 0;; ++evicted) {
    const MovedOut found = MoveOut(store, last.slot, num_rows, evicts ? 32 : 1024);
    if (found == MovedOut::kYes) return;
    if (found == MovedOut::kNever || evicted == kMostEvicted || !evicts) break;
    const int64_t slot = Victim(store);
    if (slot < 0 || slot == last.slot || !Evict(store, slot)) break;
  }
  SearchNear(store, store.control[kShortRover], 4 * kBack);
}

}  // namespace

int64_t Reserve(Store& store, int64_t num_rows, int64_t num_steps) {
  return ReserveAmong(store, num_rows, num_steps, INT64_MAX);
}

int64_t Commit(Store& store, int64_t slot, int64_t num_steps, int64_t num_rows, int64_t born,
               const std::vector<double>* block, Marks marks) {
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

bool IsFrozen(const StreamView& stream) {
  if (stream.held == nullptr) return false;
  const int64_t* position = stream.position;
  const int64_t walked = position[kSamples] + position[kDone] - position[kEpochFirst];
  return walked < position[kEpochSize];
}

bool IsRead(const Store& store, int64_t slot) {
  for (const StreamView& stream : store.streams) {
    const int64_t drawn = stream.last_drawn[slot];
    for (int64_t peer = 0; peer < stream.num_peers; ++peer) {
      if (store.peers[peer * kPeerWords + kPid] == 0) continue;  // no process has this place
      // Pairs with the release of a process that has copied its rows of the selection.
      if (__atomic_load_n(&stream.consumed[peer], __ATOMIC_ACQUIRE) <= drawn) return true;
    }
  }
  return false;
}

bool IsHeld(const Store& store, int64_t slot) {
  if (IsRead(store, slot)) return true;
  int64_t item = slot;  // of a group its leader, which represents it in trees
  if (store.groups != nullptr && store.groups[slot * kGroupWords + kLeader] > 0)
    item = store.groups[slot * kGroupWords + kLeader] - 1;
  for (const StreamView& stream : store.streams) {
    if (IsFrozen(stream) && stream.held[item] != 0) return true;
  }
  return false;
}

bool IsPinned(const Store& store, int64_t slot) {
  return OpenOf(store, slot) != 0 || IsHeld(store, slot);
}

Freed FreeRetired(Store& store) {
  constexpr size_t kParts = 4;  // of a store that frees in parts, a fourth goes at once
  const int64_t sentinel = store.num_slots + 1;
  std::vector<int64_t> free;  // by age
  for (int64_t slot = LinkOf(store, sentinel, kNewer); slot != sentinel;
       slot = LinkOf(store, slot, kNewer)) {
    if (!IsPinned(store, slot)) free.push_back(slot);
  }
  const size_t count = store.frees_in_parts ? (free.size() + kParts - 1) / kParts : free.size();
  for (size_t i = 0; i < count; ++i) FreeWithPriorities(store, free[i]);
  return {static_cast<int64_t>(count), count == free.size()};
}

int64_t FirstComplete(const Store& store, Link link) {
  const int64_t sentinel = store.num_slots;
  int64_t slot = LinkOf(store, sentinel, link);
  while (slot != sentinel && OpenOf(store, slot) != 0) slot = LinkOf(store, slot, link);
  return slot == sentinel ? -1 : slot;
}

int64_t Victim(const Store& store) {
  switch (store.removal) {
    case kOldest:
      return FirstComplete(store, kNewer);
    case kNewest:
      return FirstComplete(store, kOlder);
    case kUniform:
      return AnyComplete(store);
    case kLowestPriority:
      for (const StreamView& stream : store.streams) {
        if (stream.priorities == nullptr) continue;
        return LowestComplete(store, [&](int64_t slot) { return PriorityOf(store, stream, slot); });
      }
      return -1;
    case kLowestValue:
      return LowestComplete(store, [&](int64_t slot) { return ValueOf(store, slot); });
    default:
      return -1;
  }
}

bool MayInsert(const Store& store, int64_t num_steps) {
  const Rate& rate = store.rate;
  if (!rate.limited) return true;
  int64_t* control = store.control;
  const bool by_step = rate.unit == kSteps;
  const int64_t added = by_step ? num_steps : 1;
  // Of groups: each trajectory that is being written may complete one.
  const int64_t pending = by_step ? control[kStepsPending] : control[kPending];
  int64_t size = by_step ? control[kStepsCommitted] : control[kNumCommitted];
  int64_t inserted = by_step ? control[kStepsInserted] : control[kInserted];
  if (rate.unit == kGroups) {
    size = store.group_counts[kGroupsHeld];
    inserted = store.group_counts[kGroupsInserted];
  }
  inserted += pending;
  if (store.id_count > 1 && std::isfinite(rate.most)) {
    if (inserted + added <= control[kQuota]) return true;
    control[kWanted] = std::max(control[kWanted], added);
    return false;
  }
  if (size + pending + added <= rate.min_size) return true;
  const double ahead = static_cast<double>(inserted + added) * rate.samples_per_insert;
  const int64_t sampled = store.position == nullptr ? 0 : store.position[kSamples];
  return ahead - static_cast<double>(sampled) <= rate.most;
}

int64_t ReserveWithRemoval(Store& store, const Wanted& wanted) {
  // A search of all extents takes longer than moving a few near ones, and so does a compaction that
  // fails: in a table of many it is tried again when more rows are free.
  constexpr int64_t kNear = 2 * kBack;
  constexpr double kLookEvery_s = 1;
  const int64_t num_rows = wanted.num_rows;
  if (wanted.has_released) store.next_look_s = SteadySeconds() + kLookEvery_s;
  if (!MayInsert(store, wanted.inserts)) return kRateLimited;
  bool is_clear = false, is_near = wanted.last.slot >= 0;
  int64_t compact_from = 0;
  // Behind the newest extent of all writers lie rows never used, or those that are evicted next.
  const int64_t newest = store.control[kRover];
  if (is_near) PrepareRun(store, wanted.last, num_rows);
  while (true) {
    const bool is_over = IsOver(store, wanted.num_steps);
    int64_t found = kNoRows;
    if (!is_over && store.frees_in_parts) {
      // A retired group that is freed is generated again by the next job: search everywhere first.
      found = Reserve(store, num_rows, wanted.inserts);
    } else if (!is_over) {
      found = ReserveAmong(store, num_rows, wanted.inserts, kNear);
    }
    if (found >= 0) return found;
    if (is_near && found == kScattered) {
      is_near = false;
      const bool is_there = newest == store.num_slots || store.slots[newest].state != kFree;
      if (is_there) store.control[kRover] = newest;
      continue;
    }
    if (!is_clear) {
      is_clear = FreeRetired(store).all;
      continue;
    }
    const int64_t free = store.control[kFreeRows];
    const bool pays = free - num_rows >= store.least_free_rows;  // to move rather than to evict
    if (found == kScattered && (free - num_rows) / 3 >= store.least_free_rows) {  // far from full
      found = Reserve(store, num_rows, wanted.inserts);
      if (found >= 0) return found;
    }
    const bool moves = found == kScattered && MovesExtents(store);
    const bool are_many = store.control[kNumCommitted] > kMany;
    if (moves && pays && free >= compact_from) {
      if (MakeRun(store, num_rows)) continue;
      if (are_many) compact_from = free + num_rows / 2;
    }
    const bool asks = store.removal == kByCaller && wanted.has_victim;
    const bool chooses = store.removal != kNoEviction && store.removal != kByCaller;
    const bool can_evict = asks || (chooses && FirstComplete(store, kNewer) >= 0);
    if (found == kScattered && !(moves && are_many && can_evict)) {
      found = Reserve(store, num_rows, wanted.inserts);
      if (found >= 0) return found;
    }
    const int64_t waiting = RowsBeingRead(store);
    if (store.removal != kNoEviction) {
      const bool is_selecting = wanted.selects && store.control[kSelecting] != 0;
      const bool fits = waiting > 0 && free + waiting >= num_rows;
      if (is_selecting || (fits && !is_over)) return kPinned;
      // Rows of the dead come before those of the living.
      if (can_evict && !wanted.has_released && SteadySeconds() >= store.next_look_s)
        return kNeedsRelease;
      if (asks) return kNeedsVictim;
      if (can_evict) {
        Evict(store, Victim(store));
        continue;
      }
    }
    // Rows may become free once writers or readers finish.
    const bool is_written = store.removal != kNoEviction && store.control[kPending] > 0;
    const bool is_read = waiting > 0 && !wanted.samples;
    return is_written || is_read ? int64_t{kPinned} : found;
  }
}

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
  BeginGroup(store, slot);
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
    BeginGroup(store, slots[i]);
    const Marks marks{present[i], version};
    ids[i] = Commit(store, slots[i], record.num_steps, record.num_rows, born, nullptr, marks);
  }
}

namespace {

// Whether a slot is still its writer's own, and was not evicted since.
bool Stands(const Store& store, const Growing& growing) {
  const Slot& record = store.slots[growing.slot];
  const bool is_same = record.generation == growing.generation && record.owner == store.peer &&
                       store.control[kLoads] == growing.loads;
  return is_same && record.state == kCommitted && OpenOf(store, growing.slot) != 0;
}

// Copies steps [published, num_steps) into the slot's rows, which no process reads yet; with the
// first ones also the first rows of the columns of T+1, and the values per trajectory.
void WriteSteps(Store& store, int64_t slot, const Staged& staged, int64_t first, int64_t published,
                int64_t num_steps) {
  const int64_t to = store.slots[slot].first_row, from = staged.first_row + first;
  for (size_t i = 0; i < store.columns.size(); ++i) {
    const ColumnOf& column = store.columns[i];
    const bool single = column.rows == kPerTrajectory;
    if (single && published > 0) continue;
    const int64_t begin = single || published == 0 ? 0 : published + column.rows;
    const int64_t count = single ? 1 : num_steps + column.rows - begin;
    char* rows = column.base + (single ? slot : to + begin) * column.row_bytes;
    const char* source = staged.columns[i];
    if (source == nullptr)
      std::memset(rows, 0, static_cast<size_t>(count * column.row_bytes));
    else
      WithRowBytes(count * column.row_bytes, [&](auto bytes) {
        const int64_t row = single ? staged.env : from + begin;
        std::memcpy(rows, source + row * column.row_bytes, static_cast<size_t>(bytes));
      });
  }
}

}  // namespace

void PublishSteps(Store& store, int64_t slot, int64_t num_steps) {
  Slot& record = store.slots[slot];
  const int64_t known = record.num_steps;
  const bool counts = store.moments.head != nullptr;
  if (counts) StageMoments(store, slot, num_steps, MomentsOf(store, slot, known, num_steps));
  // The commit point: pairs with the acquire of processes that read the slot without the lock.
  __atomic_store_n(&record.num_steps, num_steps, __ATOMIC_RELEASE);
  if (counts) PublishMoments(store);
  store.control[kStepsCommitted] += num_steps - known;
  store.control[kStepsInserted] += num_steps - known;
  Note(store, slot);
}

void End(Store& store, int64_t slot, bool truncated, bool returns) {
  Slot& record = store.slots[slot];
  if (record.state == kReserved) {
    OpenOf(store, slot) = 0;
    Free(store, slot);
    return;
  }
  if (record.state == kCommitted) {
    if (returns) {
      if (store.left_by.empty()) store.left_by.resize(static_cast<size_t>(store.num_slots));
      store.left_by[slot] = record.generation;
    }
    const int64_t last = record.first_row + record.num_steps - 1;
    if (truncated && store.truncated != nullptr)
      store.truncated[last] |= store.terminated == nullptr || !store.terminated[last];
    const int64_t num_rows = RowsOf(store, record.num_steps), fewer = record.num_rows - num_rows;
    record.num_rows = num_rows;
    store.control[kFreeRows] += fewer;
    store.control[kRowsHeld] -= fewer;
  }
  // Last: the next owner of the lock ends what a dead process has left open.
  OpenOf(store, slot) = 0;
}

void PrefetchSteps(const Store& store, const Growing& growing) {
  if (growing.slot < 0) return;
  const int64_t row = store.slots[growing.slot].first_row + growing.published;
  for (const ColumnOf& column : store.columns) {
    if (column.rows != kPerTrajectory)
      __builtin_prefetch(column.base + (row + column.rows) * column.row_bytes, 1);
  }
}

bool Grow(Store& store, const Staged& staged, Growing& growing, int64_t most_steps) {
  const int64_t num_steps = staged.num_steps - growing.first, more = num_steps - growing.published;
  if (!Stands(store, growing)) return false;
  if (more <= 0) return true;
  if (num_steps > most_steps) return false;
  if (store.rate.unit == kSteps && !MayInsert(store, more)) return false;
  WriteSteps(store, growing.slot, staged, growing.first, growing.published, num_steps);
  growing.published = num_steps;
  PublishSteps(store, growing.slot, num_steps);
  return true;
}

int64_t Begin(Store& store, const Staged& staged, Growing& growing, int64_t most_steps) {
  const int64_t num_steps = staged.num_steps - growing.first;
  if (num_steps > most_steps) return kNoRows;
  const int64_t num_rows = RowsOf(store, most_steps);
  const int64_t slot = ReserveWithRemoval(store, {num_rows, most_steps, num_steps, growing.latest});
  // Near the latest trajectory rows are made free once, by evictions too: a writer that waits for
  // others tries again and again.
  if (slot != kRateLimited) growing.latest = {};
  if (slot < 0) return slot;
  WriteSteps(store, slot, staged, growing.first, 0, num_steps);
  OpenOf(store, slot) = 1;  // before the commit point: an open trajectory keeps its rows
  growing.id = Commit(store, slot, num_steps, store.slots[slot].num_rows, BornNow(store));
  growing.slot = slot;
  growing.generation = store.slots[slot].generation;
  growing.loads = store.control[kLoads];
  growing.published = num_steps;
  return 0;
}

void EndGrowth(Store& store, Growing& growing, bool truncated) {
  End(store, growing.slot, truncated, true);
  const SlotUse latest{growing.slot, growing.generation};
  growing = {-1, 0, 0, 0, 0, -1, latest};
}

int64_t AddStaged(Store& store, const Staged& staged) {
  const int64_t num_rows = RowsOf(store, staged.num_steps);
  const int64_t slot = ReserveWithRemoval(store, {num_rows, staged.num_steps, staged.num_steps});
  if (slot < 0) return slot;
  WriteSteps(store, slot, staged, 0, 0, staged.num_steps);
  BeginGroup(store, slot);
  return Commit(store, slot, staged.num_steps, num_rows, BornNow(store));
}

}  // namespace gear::cpu
