// Whole trajectories: adds one at once, and the group of a lease, which is whole or absent.
#pragma once
#include <cstdint>

#include "store/store.h"

namespace gear::cpu {

// A whole trajectory in the stored form, in the memory of the program.
struct Whole {
  // By column of the store, its rows one after the other; null: a late column that it has not.
  const void* const* sources;
  int64_t num_steps;
  int64_t present;  // bits of the late columns that it has
};

struct Added {
  int64_t id;    // or a refusal
  int64_t slot;  // reserved and written; -1 if nothing was
};

// ---- takes the lock
// Reserves, copies and commits a trajectory. Values are checked while they are copied; after
// kNotFinite the slot is free again, but what was evicted for it stays evicted. With a slot and
// another refusal the caller has to commit it; with a slot and kNotFinite, to free it: the lock
// could not be taken.
Added Add(Store& store, const Whole& whole, double timeout_s);
// Reserves and writes the trajectories of a group of a lease, `slots` [count], and lets the first
// one hold the first `shared` [count] steps of the others; `shared[0]` is 0. Values were checked
// before. Returns 0 or a refusal; then nothing is reserved. A caller that dies or ends frees the
// slots, or CommitGroup publishes them.
int64_t WriteGroup(Store& store, const Whole* members, int64_t count, const int64_t* shared,
                   int64_t* slots, double timeout_s);

// ---- with the lock held
// Commits the written slots of a group, one after the other: `ids` [count]. A group is whole once
// its ledger's entry is held (store/prompt_ledger.py), which is written after this.
void CommitGroup(Store& store, const int64_t* slots, const int64_t* present, int64_t count,
                 int64_t version, int64_t born, int64_t* ids);

}  // namespace gear::cpu
