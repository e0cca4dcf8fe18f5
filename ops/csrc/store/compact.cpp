// Moves extents in steps that survive a death, and searches for the cheapest run of rows.
#include "store/compact.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "select/stream.h"
#include "store/eviction.h"
#include "store/slots.h"

namespace gear::cpu {

namespace {

constexpr size_t kMostLookedAt = 1024;  // extents, from where rows were last found
constexpr int64_t kCheap = 4;           // so many rows may move for each one of the run

struct Extent {
  int64_t slot, begin, end;  // the sentinel begins after all rows and ends at 0
  bool can_move;  // unless a process reads it, which is looked at where it would be moved
};

Extent ExtentOf(const Store& store, int64_t slot) {
  if (slot == store.num_slots) return {slot, store.num_rows, 0, false};
  const Slot& record = store.slots[slot];
  const bool can_move =
      record.state == kCommitted && OpenOf(store, slot) == 0 && !IsLeft(store, slot);
  return {slot, record.first_row, record.first_row + record.num_rows, can_move};
}

void CopyRows(Store& store, int64_t from, int64_t to, int64_t count) {
  for (const RowArray& rows : store.row_arrays)
    std::memcpy(rows.base + to * rows.row_bytes, rows.base + from * rows.row_bytes,
                static_cast<size_t>(count * rows.row_bytes));
}

// Between copies, so that none crosses it: what follows a death sees the word and all before it.
void Publish(int64_t& word, int64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_SEQ_CST);
  __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

// Copies what is left of the move that the control words hold, and publishes the new place.
void FinishCopy(Store& store) {
  int64_t* const control = store.control;
  Slot& record = store.slots[control[kMoving] - 1];
  const int64_t source = control[kMoveFrom], to = control[kMoveTo];
  const int64_t num_rows = record.num_rows, distance = source - to;
  const int64_t longest = std::max(distance, store.spare_rows);
  // kMoveDone is twice the rows that are done, and 1 if the next piece lies in the spare rows: one
  // word, one store. Of 7 rows that move by 2, with 4 spare rows: 0, 1, 8, 9, 14. Each piece is
  // longer than the distance, so it goes through the spare rows: copied straight, its first rows
  // would overwrite its last ones before these are copied.
  while (control[kMoveDone] < 2 * num_rows) {
    const int64_t done = control[kMoveDone] / 2;
    const bool is_spare = control[kMoveDone] % 2 == 1;
    const int64_t count = std::min(longest, num_rows - done);
    int64_t from = source + done;
    if (count > distance) {
      if (!is_spare) {
        CopyRows(store, from, store.num_rows, count);
        Publish(control[kMoveDone], 2 * done + 1);
      }
      from = store.num_rows;
    }
    CopyRows(store, from, to + done, count);
    Publish(control[kMoveDone], 2 * (done + count));
  }
  Publish(record.first_row, to);
}

// Derives anew what follows from the rows' places, which are published.
void MoveDerived(const Store& store, int64_t source, int64_t to, int64_t num_rows) {
  for (const StreamView& stream : store.streams) {
    if (stream.steps.target.sums != nullptr)
      MoveMasses(stream.steps, source, to, num_rows, store.num_rows, store.spare_rows);
  }
}

void ForgetAhead(Store& store) {
  // Draws made ahead hold old rows.
  for (const StreamView& stream : store.streams) stream.position[kAhead] = kNothing;
}

// The extent after which `num_rows` rows are free, away from a slot's; -1 if there is none among
// `most` extents before the rows that were evicted or filled last.
int64_t FindGapAway(const Store& store, int64_t slot, int64_t num_rows, int most) {
  int64_t at = store.control[kShortRover], after = LinkOf(store, at, kAfter);
  for (int i = 0; i < most; ++i) {
    const int64_t free = ExtentOf(store, after).begin - ExtentOf(store, at).end;
    if (free >= num_rows && !IsLeft(store, at) && at != slot && after != slot) return at;
    after = at;
    at = LinkOf(store, at, kBefore);
  }
  return -1;
}

}  // namespace

void Slide(Store& store, int64_t slot, int64_t to) {
  const int64_t source = store.slots[slot].first_row;
  if (source == to) return;
  int64_t* const control = store.control;
  control[kMoveFrom] = source;
  control[kMoveTo] = to;
  control[kMoveDone] = 0;
  Publish(control[kMoving], slot + 1);  // from here on the next owner of the lock finishes it
  FinishCopy(store);
  MoveDerived(store, source, to, store.slots[slot].num_rows);
  Publish(control[kMoving], 0);
}

void FinishMove(Store& store) {
  if (store.control[kMoving] == 0) return;
  FinishCopy(store);
  Publish(store.control[kMoving], 0);
}

MovedOut MoveOut(Store& store, int64_t slot, int64_t num_rows, int most) {
  const int64_t short_rows = store.slots[slot].num_rows;
  const int64_t before = LinkOf(store, slot, kBefore), after = LinkOf(store, slot, kAfter);
  const int64_t freed = ExtentOf(store, after).begin - ExtentOf(store, before).end;
  const bool stays = OpenOf(store, slot) != 0 || IsRead(store, slot);
  if (freed < num_rows || stays) return MovedOut::kNever;
  const int64_t behind = FindGapAway(store, slot, short_rows, most);
  if (behind < 0) return MovedOut::kNoRows;
  ForgetAhead(store);
  const int64_t source = store.slots[slot].first_row, to = ExtentOf(store, behind).end;
  CopyRows(store, source, to, short_rows);  // which overlap no stored ones
  Publish(store.slots[slot].first_row, to);
  MoveDerived(store, source, to, short_rows);
  TakeOut(store, slot, kBefore, kAfter);  // after a death the lists are derived anew
  InsertBehind(store, behind, slot, kBefore, kAfter);
  store.control[kShortRover] = slot;
  store.control[kRover] = before;
  return MovedOut::kYes;
}

void SearchNear(Store& store, int64_t slot, int distance) {
  for (int i = 0; i < distance; ++i) {
    const int64_t before = LinkOf(store, slot, kBefore);
    if (before == store.num_slots || OpenOf(store, before) != 0) break;
    slot = before;
  }
  store.control[kRover] = slot;
}

bool MakeRun(Store& store, int64_t num_rows) {
  if (store.spare_rows == 0 || store.control[kSelecting] != 0) return false;
  if (store.control[kFreeRows] - num_rows < store.least_free_rows) return false;
  const int64_t sentinel = store.num_slots;
  const int64_t held = store.control[kNumCommitted] + store.control[kPending];
  const bool are_few = held <= static_cast<int64_t>(kMostLookedAt);
  const int64_t start = are_few ? sentinel : store.control[kRover];
  std::vector<Extent> near;
  near.reserve(64);
  near.push_back(ExtentOf(store, start));
  // Gap i lies between near[i] and near[i + 1]. Window [first, last] of gaps: `free` rows in them,
  // `moved` rows and `fixed` extents between them.
  size_t best_first = 0, best_last = 0;
  int64_t best = -1, free = 0, moved = 0, fixed = 0;
  const auto gap = [&](size_t i) {
    return IsLeft(store, near[i].slot) ? 0 : near[i + 1].begin - near[i].end;
  };
  const auto take = [&](size_t i, int64_t sign) {  // the extent after gap i
    moved += sign * (near[i + 1].end - near[i + 1].begin);
    fixed += sign * (near[i + 1].can_move ? 0 : 1);
  };
  bool is_end = false;
  const auto look_at_next = [&] {
    if (near.size() > kMostLookedAt) return false;
    const int64_t slot = LinkOf(store, near.back().slot, kAfter);
    near.push_back(ExtentOf(store, slot));
    is_end = slot == start;
    return true;
  };
  size_t first = 0, last = 0;  // the window holds gaps [first, last)
  while (true) {
    while (free < num_rows || last <= first) {
      if (last > first) take(last - 1, 1);
      if (last + 1 >= near.size() && (is_end || !look_at_next())) {
        first = SIZE_MAX;
        break;
      }
      free += gap(last);
      ++last;
    }
    if (first == SIZE_MAX) break;
    const bool is_better = fixed == 0 && (best < 0 || moved < best);
    for (size_t i = first + 1; is_better && i < last; ++i) {
      if (!IsRead(store, near[i].slot)) continue;
      near[i].can_move = false;
      ++fixed;
    }
    if (is_better && fixed == 0) {
      best = moved;
      best_first = first;
      best_last = last - 1;
    }
    if (best >= 0 && best <= kCheap * num_rows) break;
    free -= gap(first);
    if (last > first + 1) take(first, -1);
    ++first;
  }
  if (best < 0) {
    if (!are_few) store.control[kRover] = near.back().slot;  // the next search looks elsewhere
    return false;
  }
  ForgetAhead(store);
  int64_t to = near[best_first].end;
  for (size_t i = best_first + 1; i <= best_last; ++i) {
    Slide(store, near[i].slot, to);
    to += store.slots[near[i].slot].num_rows;
  }
  store.control[kRover] = near[best_last].slot;
  return true;
}

}  // namespace gear::cpu
