// The native store of a table: its words in shared memory, columns, streams and settings.
//
// Everything lies in shared memory and follows from the slot table: after the death of a process it
// is rebuilt from there, by deepspeed_gear/store/row_allocator.py. What is done with it:
//   slots.h                reserve, commit, retire and free a slot; the log of changes
//   reserve_rows.h         the gate for all writers: frees, moves and evicts until rows are free
//   rate_limiter.h         whether writers may add
//   eviction.h             which trajectory is evicted, and what keeps the rows of evicted ones
//   compact.h              moves of extents
//   whole_trajectories.h   trajectories and groups of leases that are stored at once
//   open_trajectories.h    trajectories that grow, whose first steps are published
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

// What functions return instead of a slot or an id.
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

// Whether the rows after a slot's are left for its writer.
inline bool IsLeft(const Store& store, int64_t slot) {
  return !store.left_by.empty() && store.control[kNumCommitted] > kMany && slot < store.num_slots &&
         store.left_by[slot] == store.slots[slot].generation;
}

inline int64_t& LinkOf(const Store& store, int64_t slot, Link word) {
  return store.links[slot * kLinkWords + word];
}

// Whether the trajectory of a slot still grows.
inline int64_t& OpenOf(const Store& store, int64_t slot) {
  return store.retention[slot * kRetentionWords + kOpen];
}

// The rows of a trajectory: one more than its steps where a column has a row after the last step.
inline int64_t RowsOf(const Store& store, int64_t num_steps) {
  for (const ColumnOf& column : store.columns) {
    if (column.rows == kPerStepAndEnd) return num_steps + 1;
  }
  return num_steps;
}

}  // namespace gear::cpu
