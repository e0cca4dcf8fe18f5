// Reserves rows for new trajectories, the gate for all writers: frees, moves and evicts for them.
#pragma once
#include <cstdint>

#include "store/store.h"

namespace gear::cpu {

// A slot as it was used by one trajectory.
struct SlotUse {
  int64_t slot = -1, generation = 0;  // -1: none
};

// Rows that a writer needs.
struct Wanted {
  int64_t num_rows, num_steps;
  int64_t inserts;            // of the steps, that are inserted now
  SlotUse last = {};          // what the writer has stored before, whose surroundings may be free
  bool samples = false;       // the process samples too, and must not wait for what it reads itself
  bool selects = true;        // whether kSelecting counts: there are ranks, whose selections go on
  bool has_victim = true;     // whether the caller can evict one
  bool has_released = false;  // whether the caller has just released what dead processes hold
};

// Reserves a slot with rows, in this order: frees retired slots that are not pinned, moves extents
// where that costs less than rows, evicts until the rows fit. Returns the slot or a refusal; after
// kNeedsVictim and kNeedsRelease the caller does what they say, and calls again. Requires the lock.
int64_t ReserveWithRemoval(Store& store, const Wanted& wanted);

}  // namespace gear::cpu
