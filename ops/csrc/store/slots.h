// Slots of a store: reserved, committed, retired and freed; their lists, and the log of changes.
//
// Requires the lock. Two lists run through the slots, each with a sentinel: extents by address, and
// trajectories by age, those that are committed and those that are retired. A state word is written
// last, so a death in between leaves the state before, from which the lists are derived anew.
#pragma once
#include <cstdint>
#include <vector>

#include "store/store.h"

namespace gear::cpu {

// Puts a slot behind another one in a list, and takes it out.
void InsertBehind(Store& store, int64_t where, int64_t slot, Link back, Link on);
void TakeOut(Store& store, int64_t slot, Link back, Link on);
// Logs a changed slot, and wakes a sampler that waits.
void Note(Store& store, int64_t slot);

// Reserves a slot and a run of rows, searching from the end of the last search. Returns the slot,
// or kNoSlot, kNoRows or kScattered.
int64_t Reserve(Store& store, int64_t num_rows, int64_t num_steps);
// As `Reserve`, but searches `most` extents only.
int64_t ReserveAmong(Store& store, int64_t num_rows, int64_t num_steps, int64_t most);

// Words of a slot that come with its trajectory: bits of the late columns that it has, and the
// policy version of its group.
struct Marks {
  int64_t present = 0, version = 0;
};

// The global batch that is selected next.
inline int64_t BornNow(const Store& store) {
  return store.position == nullptr ? 0 : store.position[0];
}

// Commits a reserved slot, and frees the rows after its first `num_rows`. Returns the id.
// `block`: the moments of its rows, where they were computed before; null: here.
int64_t Commit(Store& store, int64_t slot, int64_t num_steps, int64_t num_rows, int64_t born,
               const std::vector<double>* block = nullptr, Marks marks = {});
void Retire(Store& store, int64_t slot);
void Free(Store& store, int64_t slot);

}  // namespace gear::cpu
