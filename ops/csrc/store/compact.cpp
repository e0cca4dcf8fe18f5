#include "store/compact.h"

#include <cstring>
#include <vector>

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
  const bool can_move = record.state == kCommitted && record.num_rows <= store.spare_rows;
  return {slot, record.first_row, record.first_row + record.num_rows, can_move};
}

// Copies an extent to free rows, then publishes its new place.
void Place(Store& store, int64_t slot, int64_t to) {
  Slot& record = store.slots[slot];
  for (const ColumnOf& column : store.columns) {
    if (column.rows == kPerTrajectory) continue;
    std::memcpy(column.base + to * column.row_bytes,
                column.base + record.first_row * column.row_bytes,
                static_cast<size_t>(record.num_rows * column.row_bytes));
  }
  // After the copy: a process that dies before it leaves the extent where it was.
  __atomic_store_n(&record.first_row, to, __ATOMIC_RELEASE);
}

void Slide(Store& store, int64_t slot, int64_t to) {
  const Slot& record = store.slots[slot];
  if (record.first_row == to) return;
  if (record.first_row - to < record.num_rows) Place(store, slot, store.num_rows);  // spare rows
  Place(store, slot, to);
}

}  // namespace

bool MakeRun(Store& store, int64_t num_rows) {
  const auto next_of = [&store](int64_t slot) { return store.links[slot * kLinkWords + kAfter]; };
  const int64_t sentinel = store.num_slots;
  const int64_t highest = store.links[sentinel * kLinkWords + kBefore];
  if (highest != sentinel && store.slots[highest].first_row >= store.num_rows)
    return false;  // a dead process has left an extent in the spare rows
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
  const auto gap = [&near](size_t i) { return near[i + 1].begin - near[i].end; };
  const auto take = [&](size_t i, int64_t sign) {  // the extent after gap i
    moved += sign * (near[i + 1].end - near[i + 1].begin);
    fixed += sign * (near[i + 1].can_move ? 0 : 1);
  };
  bool is_end = false;
  const auto look_at_next = [&] {
    if (near.size() > kMostLookedAt) return false;
    const int64_t slot = next_of(near.back().slot);
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
      if (!IsPinned(store, near[i].slot)) continue;
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
  for (int64_t* ahead : store.ahead) *ahead = -1;  // draws made ahead hold old rows
  int64_t to = near[best_first].end;
  for (size_t i = best_first + 1; i <= best_last; ++i) {
    Slide(store, near[i].slot, to);
    to += store.slots[near[i].slot].num_rows;
  }
  store.control[kRover] = near[best_last].slot;
  return true;
}

}  // namespace gear::cpu
