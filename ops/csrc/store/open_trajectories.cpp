// Publishes steps of open trajectories, grows them, and ends them.
#include "store/open_trajectories.h"

#include <cstring>

#include "common/row_copies.h"
#include "store/rate_limiter.h"
#include "store/reserve_rows.h"
#include "store/slots.h"

namespace gear::cpu {

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

void PrefetchSteps(const Store& store, const Growing& growing) {
  if (growing.slot < 0) return;
  const int64_t row = store.slots[growing.slot].first_row + growing.published;
  for (const ColumnOf& column : store.columns) {
    if (column.rows != kPerTrajectory)
      __builtin_prefetch(column.base + (row + column.rows) * column.row_bytes, 1);
  }
}

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
  return Commit(store, slot, staged.num_steps, num_rows, BornNow(store));
}

}  // namespace gear::cpu
