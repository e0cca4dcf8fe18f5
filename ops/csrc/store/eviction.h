// Eviction: which trajectory goes by the policy, what pins its rows, and when they become free.
//
// Requires the lock. Victims of groups and of a user's class are chosen by
// deepspeed_gear/store/eviction.py.
#pragma once
#include <cstdint>

#include "store/store.h"

namespace gear::cpu {

// ---- victims
// The oldest (kNewer) or newest (kOlder) trajectory that does not grow; -1: none.
int64_t FirstComplete(const Store& store, Link link);
// The trajectory that the policy evicts next; -1: none, or the caller must choose.
int64_t Victim(const Store& store);
// The priority of a trajectory, or the highest of its steps, in the first stream with priorities;
// infinite if it is newer than the latest selection: it has none yet.
float PriorityOf(const Store& store, int64_t slot);
// Evicts a trajectory; returns whether its rows are free now.
bool Evict(Store& store, int64_t slot);

// ---- pins
// Whether a pass is under way in a stream, whose items stay until its end.
bool IsFrozen(const StreamView& stream);
// Whether a selection has drawn from a slot that some process still reads.
bool IsRead(const Store& store, int64_t slot);
// Whether a retired slot is read or may be drawn by a pass that is under way.
bool IsHeld(const Store& store, int64_t slot);
// Whether the rows of a retired slot are not free yet: it is held, or its writer has not detected
// that it was retired.
bool IsPinned(const Store& store, int64_t slot);

// ---- rows that become free
struct Freed {
  int64_t count;
  bool all;
};
// Frees retired slots that are not pinned, of a store that frees in parts the oldest ones only.
Freed FreeRetired(Store& store);
// Rows of retired slots that become free as soon as no process reads them. An open slot, whose
// writer must first detect that it was retired, does not count: that may take long.
int64_t RowsBeingRead(const Store& store);

}  // namespace gear::cpu
