// Compaction: moves extents where enough rows are free but no run of them is long enough.
#pragma once
#include <cstdint>

#include "store/store.h"

namespace gear::cpu {

// Slides neighbouring extents together until a run of `num_rows` rows is free where the next search
// begins. False: extents that cannot move separate the free rows here, eviction is cheaper, or a
// selection over several nodes is under way. Extents that a process reads, open and reserved ones
// stay; without spare rows all do. Requires the lock.
//
// Cost: of the neighbours in order, the first ones that have at most 4 * `num_rows` rows move, else
// those with the fewest. Where one of n rows is free, they have at most about n rows for each row
// of the run, and those whose gap is too short are copied twice. A table is compacted as long as
// more than one of 32 rows is free: 2.8 rows were copied for each row added, with uniform eviction
// and random lengths (docs/design/0020-reserving-rows.md).
bool MakeRun(Store& store, int64_t num_rows);

// Moves an extent to free rows before it; the order of the extents stays. It moves in pieces: a
// piece is as long as the distance, so that it overlaps no row that is still to be copied, or as
// the spare rows, through which it goes then. Control words hold the move and how many of its rows
// are done, so a death at any instruction leaves it to the next owner of the lock (`FinishMove`): a
// piece that is copied again is copied from rows that are as they were. Requires the lock.
void Slide(Store& store, int64_t slot, int64_t to);

// Finishes the move that a dead process has left, if there is one; what follows from the rows'
// places is derived anew by the caller. Requires the lock.
void FinishMove(Store& store);

enum class MovedOut { kYes, kNoRows, kNever };

// Moves a complete trajectory, which is short beside the rows that were reserved for it, to free
// rows near those that were evicted last: with the free rows on both sides its place is a run of
// `num_rows` rows, where the next search begins. kNoRows, or kNever, and nothing has changed: there
// is no gap among `most` extents; it is read, or there would be no run. Requires the lock, and that
// extents move here. Cost: one copy of its rows.
MovedOut MoveOut(Store& store, int64_t slot, int64_t num_rows, int most);

// Lets the next search begin up to so many extents before a slot's. Requires the lock.
void SearchNear(Store& store, int64_t slot, int distance);

}  // namespace gear::cpu
