// Decides between free rows, retired slots, moves and evictions until rows fit.
#include "store/reserve_rows.h"

#include <chrono>

#include "store/compact.h"
#include "store/eviction.h"
#include "store/rate_limiter.h"
#include "store/slots.h"

namespace gear::cpu {

namespace {

constexpr int kBack = 8;  // extents before a writer's latest one, where its search begins

bool IsOver(const Store& store, int64_t num_steps) {
  const int64_t held = store.control[kNumCommitted] + store.control[kPending];
  const int64_t final_rows = RowsOf(store, 0);
  const int64_t steps = store.control[kRowsHeld] - held * final_rows;
  return held + 1 > store.most_trajectories || steps + num_steps > store.most_steps;
}

double SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool MovesExtents(const Store& store) {
  return store.spare_rows > 0 && store.control[kSelecting] == 0;
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

}  // namespace gear::cpu
