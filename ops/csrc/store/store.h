// The extents and slots of a store: free rows, the age order of trajectories, the log of changes.
//
// Everything lies in shared memory and follows from the slot table: after the death of a process it
// is rebuilt from there, by deepspeed_gear/store/row_allocator.py.
#pragma once
#include <cstdint>
#include <vector>

#include "common/slot.h"
#include "store/finite_checks.h"
#include "store/moments.h"
#include "store/mutex.h"
#include "store/step_priorities.h"

namespace gear::cpu {

// States of a slot.
enum : int64_t { kFree = 0, kReserved = 1, kRetired = 3 };  // kCommitted is 2

// Control words.
enum Control : int64_t {
  kChanged,  // entries ever written to the log of changed slots
  kNextId,
  kNumCommitted,
  kStepsCommitted,
  kRover,     // the extent after which the search for free rows begins
  kFreeSlot,  // the first free slot; its kAfter is the next one
  kFreeRows,
  kInserted,  // trajectories, and steps, that were ever committed
  kStepsInserted,
  kRecoveries,  // how often derived state was rebuilt after a death
  kSelecting,   // selections over several nodes are under way: nothing may be retired
  kPolicy,      // newest policy version
  kRowsHeld,    // rows that are reserved or committed
  kLoads,       // how often everything was replaced by a checkpoint
  // Of rate limiters: trajectories and steps that are reserved and not committed; over several
  // nodes, the items that this node's writers may ever add, by the last round of quotas, and the
  // most items of an addition that the quota has refused since then.
  kPending = 16,
  kStepsPending,
  kQuota,
  kWanted,
  kListening,  // whether a sampler waits for a change; set and cleared with the lock held
  kEvent,      // the counter that it waits for; store/futex.h
  kMoving,     // slot + 1 of the extent that is moved; 0: none
  kMoveFrom,   // its old first row, its new one, and twice the rows that are done
  kMoveTo,
  kMoveDone,
  kShortRover,  // the extent after which the search for rows of an extent that is moved out begins
};

// Words of a slot's links. Two lists, each with a sentinel: extents by address, and trajectories
// by age, those that are committed and those that are retired.
enum Link : int64_t { kBefore, kAfter, kOlder, kNewer, kLinkWords };

// Of a slot: how often it was drawn and so on, 0 at first. kPresent: bits of the late columns that
// were filled; kVersion: policy version; kOpen: its trajectory still grows.
inline constexpr int64_t kRetentionWords = 4, kPresent = 1, kVersion = 2, kOpen = 3;

// What `Reserve` and `Add` return instead of a slot or an id.
enum Refusal : int64_t {
  kNoSlot = -1,
  kNoRows = -2,
  kScattered = -3,    // enough rows are free, but no run is long enough
  kPinned = -4,       // the trajectory to evict is still read
  kRateLimited = -5,  // too many items were added for the samples drawn
  kLockTimeout = -6,
  kLockBroken = -7,
  kMustRecover = -8,   // a process died inside: lock as Python does, which repairs
  kNotFinite = -9,     // a column holds NaN or an infinity and must not
  kNeedsVictim = -10,  // the caller must evict one: policies that choose in Python, and groups
  // The caller must release what dead processes have reserved and read, and call again.
  kNeedsRelease = -11,
  kGroupFull = -12,  // the group has its most trajectories
};

// What writers read of a batch stream and, where rows move or become free, change.
struct StreamView {
  int64_t* position;          // words of its position: SelectionWord of select/stream.h
  const int64_t* last_drawn;  // the newest global batch that drew from each slot. [slots]
  const int64_t* consumed;    // the newest one that each process has released, plus 1. [peers]
  int64_t num_peers;
  const int64_t* held;  // masses of slots, not 0 where an epoch under way has the item; null: none
  const float* priorities;     // of slots, or of rows; null: none
  const int64_t* generations;  // of the trajectories of the slots that have priorities
  StepPriorities steps;        // of rows; no sums: there are none
};

// Words of an attached process, and of a slot in a table of groups, as records.py and group_spec.py
// of deepspeed_gear/store have them.
enum PeerWord : int64_t { kPid, kPeerWords = 8 };
enum GroupWord : int64_t { kLeader, kGroupTime = 2, kGroupWords = 9 };
enum GroupCount : int64_t { kGroupsHeld = 2, kGroupsInserted };

struct ColumnOf {
  char* base;
  int64_t row_bytes;
  int64_t rows;  // of T steps: T, T + 1, or 1 per trajectory
  Exponents checked;
};
enum : int64_t { kPerStep = 0, kPerStepAndEnd = 1, kPerTrajectory = 2 };

// An array of a row for each row of the store.
struct RowArray {
  char* base;
  int64_t row_bytes;
};

// Eviction policy of a full store.
enum Removal : int64_t {
  kNoEviction,
  kOldest,
  kNewest,
  kByCaller,  // kNeedsVictim is returned where one must be evicted
  kUniform,   // each with the same probability, keyed by the next id: runs are reproducible
  kLowestPriority,
  kLowestValue,  // of a column of one number per trajectory; NaN is lower than all
};

// The rate limiter of writers: Cassirer et al., "Reverb", 2021, section 3.3. The same for samplers:
// deepspeed_gear/store/rate_limiter.py.
enum RateUnit : int64_t { kTrajectories, kSteps, kGroups };
struct Rate {
  bool limited = false;
  RateUnit unit = kTrajectories;
  int64_t min_size = 0;
  double samples_per_insert = 0, most = 0;
};

struct Store {
  SharedMutex* mutex;
  int64_t* holder;
  int64_t *control, *links, *log, *retention;
  Slot* slots;
  int64_t num_slots, num_rows, log_size, id_index, id_count, peer;
  int64_t most_trajectories, most_steps;  // limits below the capacity
  const int64_t*
      position;  // of the training stream: global batch that is selected next, samples; or null
  int64_t least_free_rows;  // besides those requested: from there on extents move
  bool *terminated = nullptr, *truncated = nullptr;  // columns of these roles, by row; null: none
  std::vector<ColumnOf> columns;
  std::vector<StreamView> streams;
  const int64_t* peers = nullptr;         // [peers, kPeerWords]
  int64_t* groups = nullptr;              // [slots, kGroupWords]; null: the table has no groups
  const int64_t* group_counts = nullptr;  // by GroupCount; null likewise
  size_t group_column = 0;                // of the groups' numbers
  int64_t most_of_group = 0;              // trajectories; 0: any number may come
  // Of each slot: first steps that another slot holds, and this one; null: the table has no
  // prompts.
  int64_t* shared_prompts = nullptr;
  RunningMoments moments;
  Removal removal = kNoEviction;
  size_t value_column = 0;  // of kLowestValue, with the code of its dtype
  int64_t value_dtype = 0;
  bool frees_in_parts = false;  // retired trajectories are kept for a job that starts again
  Rate rate;
  int64_t spare_rows = 0;            // after `num_rows`: extents move through them; 0: none moves
  std::vector<RowArray> row_arrays;  // all that is stored by row, which moves together
  // When this process looks for dead ones again before it evicts, in seconds of the steady clock.
  double next_look_s = 0;
  // Of each slot: the generation whose writer, in this process, comes back for the rows that it has
  // left free; 0: none. In tables of many trajectories no others are put there.
  std::vector<int64_t> left_by;
};

// So many committed trajectories are many: searches look at some of them.
inline constexpr int64_t kMany = 128;

// A slot as it was used by one trajectory.
struct SlotUse {
  int64_t slot = -1, generation = 0;  // -1: none
};

// Whether the rows after a slot's are left for its writer.
inline bool IsLeft(const Store& store, int64_t slot) {
  return !store.left_by.empty() && store.control[kNumCommitted] > kMany && slot < store.num_slots &&
         store.left_by[slot] == store.slots[slot].generation;
}

inline int64_t& LinkOf(const Store& store, int64_t slot, Link word) {
  return store.links[slot * kLinkWords + word];
}

// ---- with the lock held
// Puts a slot behind another one in a list, and takes it out.
void InsertBehind(Store& store, int64_t where, int64_t slot, Link back, Link on);
void TakeOut(Store& store, int64_t slot, Link back, Link on);
// Logs a changed slot, and wakes a sampler that waits.
void Note(Store& store, int64_t slot);
int64_t Reserve(Store& store, int64_t num_rows, int64_t num_steps);  // a slot, or a refusal
// Words of a slot that come with its trajectory: bits of the late columns that it has, and the
// policy version of its group.
struct Marks {
  int64_t present = 0, version = 0;
};

// `block`: the moments of its rows, where they were computed before; null: here.
int64_t Commit(Store& store, int64_t slot, int64_t num_steps, int64_t num_rows, int64_t born,
               const std::vector<double>* block = nullptr, Marks marks = {});
void Retire(Store& store, int64_t slot);
void Free(Store& store, int64_t slot);
// Whether a pass is under way in a stream, whose items stay until its end.
bool IsFrozen(const StreamView& stream);
// Whether a selection has drawn from a slot that some process still reads.
bool IsRead(const Store& store, int64_t slot);
// Whether a retired slot is read or may be drawn by a pass that is under way.
bool IsHeld(const Store& store, int64_t slot);
// Whether the rows of a retired slot are not free yet: it is held, or its writer has not detected
// that it was retired.
bool IsPinned(const Store& store, int64_t slot);
// Frees retired slots that are not pinned, of a store that frees in parts the oldest ones only.
struct Freed {
  int64_t count;
  bool all;
};
Freed FreeRetired(Store& store);
// The oldest (kNewer) or newest (kOlder) trajectory that does not grow; -1: none.
int64_t FirstComplete(const Store& store, Link link);
// The trajectory that the policy evicts next; -1: none, or the caller must choose.
int64_t Victim(const Store& store);
// Whether the rate limiter admits so many steps, in one trajectory. Of groups the counts are those
// of the last update (deepspeed_gear/store/groups.py).
bool MayInsert(const Store& store, int64_t num_steps);

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
// kNeedsVictim and kNeedsRelease the caller does what they say, and calls again.
int64_t ReserveWithRemoval(Store& store, const Wanted& wanted);

// A whole trajectory in the stored form, in the memory of the program.
struct Whole {
  // By column of the store, its rows one after the other; null: a late column that it has not.
  const void* const* sources;
  int64_t num_steps;
  int64_t present;  // bits of the late columns that it has
};

// ---- takes the lock
struct Added {
  int64_t id;    // or a refusal
  int64_t slot;  // reserved and written; -1 if nothing was
};
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

// ---- with the lock held
// Publishes the first `num_steps` steps of an open trajectory, whose rows are written.
void PublishSteps(Store& store, int64_t slot, int64_t num_steps);
// Ends a trajectory: frees the rows after its steps, or all if nothing is published. `truncated`:
// marks its last step as truncated unless it is terminated; `returns`: its writer, in this process,
// comes back for the rows after it.
void End(Store& store, int64_t slot, bool truncated, bool returns);

// ---- with the lock held; the same for rows that are not staged, which needs no buffers of the
// stored form: deepspeed_gear/writer/partial_publish.py
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
