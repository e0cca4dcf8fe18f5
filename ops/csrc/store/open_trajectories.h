// Open trajectories, which still grow: their first steps are published, and later they end.
//
// Requires the lock, but for PrefetchSteps. The same for rows that are not staged, which needs no
// buffers of the stored form: deepspeed_gear/writer/partial_publish.py.
#pragma once
#include <cstdint>

#include "store/reserve_rows.h"
#include "store/store.h"

namespace gear::cpu {

// A trajectory that grows: its slot as its writer reserved it, and what is published of it.
struct Growing {
  int64_t slot;  // -1: nothing is published
  int64_t generation, loads;
  int64_t first;      // steps before the stored ones, which belong to an evicted trajectory
  int64_t published;  // stored steps that batches may hold
  int64_t id;         // once steps are published
  SlotUse latest;     // of the writer's latest published trajectory that has ended
};
static_assert(sizeof(Growing) == 64, "a growing trajectory is a row of 8 int64");

// Where the rows of a trajectory lie until they are stored; each value was checked when it came.
struct Staged {
  const char* const* columns;  // by column of the store; null: late
  int64_t first_row;           // row of its first step
  int64_t num_steps;
  int64_t env;  // row of its values per trajectory
};

// Starts the loads of the rows that a trajectory's next step is written to.
void PrefetchSteps(const Store& store, const Growing& growing);
// Publishes the first `num_steps` steps of an open trajectory, whose rows are written.
void PublishSteps(Store& store, int64_t slot, int64_t num_steps);
// Ends a trajectory: frees the rows after its steps, or all if nothing is published. `truncated`:
// marks its last step as truncated unless it is terminated; `returns`: its writer, in this process,
// comes back for the rows after it.
void End(Store& store, int64_t slot, bool truncated, bool returns);

// ---- of staged rows
// Publishes the new steps of a trajectory that is published already. False, and nothing has
// changed: its slot was evicted, it has more than `most_steps`, or the rate limiter holds it back.
bool Grow(Store& store, const Staged& staged, Growing& growing, int64_t most_steps);
// Publishes the first steps of a trajectory, with rows for `most_steps`. Returns 0 or a refusal.
int64_t Begin(Store& store, const Staged& staged, Growing& growing, int64_t most_steps);
// Ends a published trajectory that stands; the next one of its writer has not begun.
void EndGrowth(Store& store, Growing& growing, bool truncated);
// Stores a whole trajectory. Returns its id, or a refusal.
int64_t AddStaged(Store& store, const Staged& staged);

}  // namespace gear::cpu
