// A table in the memory of one device: rows and slots are rings, the oldest trajectories are
// evicted. Its state is in device memory too, so that every op that changes it can be captured in a
// graph.
//
// Rows and trajectories are numbered for ever: row r of the ring is number r modulo `num_rows`, and
// trajectory `id` lies in slot id modulo `num_slots`. The stored ones are [tail, next), and their
// rows follow each other in this order.
#pragma once
#include "common/power.h"
#include "common/slot.h"
#include "common/tree.h"

namespace gear {

// Words of the state; deepspeed_gear/ops/constants.py has them too.
enum RingWord : int64_t {
  kRingHead = 0,          // number of the row after the newest trajectory
  kRingNext = 1,          // id of the next trajectory
  kRingTail = 2,          // id of the oldest one
  kRingSamples = 3,       // sample number of the next global batch
  kRingBatch = 4,         // number of the next global batch
  kRingTotal = 5,         // total mass that the latest one was drawn from
  kRingSteps = 6,         // steps that are stored
  kRingRefused = 7,       // invalid lengths and priorities, which have changed nothing
  kRingCounts = 8,        // of priority updates: the words of UpdateCount
  kRingLeast = 13,        // while a batch is drawn: the complement of its least mass
  kRingEmpty = 14,        // global batches without samples: no item had a mass
  kRingDropped = 15,      // steps of open trajectories that the same call has evicted
  kRingEvictedFrom = 16,  // of the latest add, for the kernels after it: evicted ids,
  kRingEvictedTo = 17,    //
  kRingFreedFrom = 18,    // their items (numbers of rows, or ids),
  kRingFreedTo = 19,      //
  kRingAddedFrom = 20,    // and the items of the added ones
  kRingAddedTo = 21,      //
  kRingInitial = 22,      // highest priority so far when the latest batch was drawn: float32 bits
  kRingEpoch = 23,        // number of the latest epoch,
  kRingEpochFirst = 24,   // number of its first sample,
  kRingEpochSize = 25,    // and its items; 0: none has begun
  kRingEpochNext = 26,    // what the table was when a batch of it was last drawn: next,
  kRingEpochTail = 27,    // tail,
  kRingEpochSteps = 28,   // and steps
  kRingEpochsCut = 29,    // epochs that ended early, because the table had changed
  kRingBlocks = 31,       // in a kernel whose last block goes on: blocks that have ended
  kRingWords = 32
};

// A row of `placed`: slot and rows of an added trajectory; slot -1: it was not added.
struct Placed {
  int64_t slot, first_row, num_steps, id, begin;
};
static_assert(sizeof(Placed) == 40, "a place is a row of 5 int64");

// The items of the ring and their masses. Priorities of steps: an item for each row; else one for
// each slot.
struct RingRule {
  AnchorRule anchors;
  int64_t unit;
  bool has_priorities;
  bool by_row;
  MassScale scale;
};

struct RingShape {
  int64_t num_rows, num_slots;
  int64_t final_row;   // 1 where columns have a row more than steps
  int64_t most_steps;  // of a trajectory
};

// Where a trajectory of `rows` rows begins, if the one before it ends at `head`: it never wraps.
GEAR_HOST_DEVICE int64_t BeginInRing(int64_t head, int64_t rows, int64_t num_rows) {
  const int64_t at = head % num_rows;
  return at + rows <= num_rows ? head : head - at + num_rows;
}

// Whether a trajectory that begins at `begin` is evicted when rows up to `head` are written and ids
// up to `next` are assigned.
GEAR_HOST_DEVICE bool IsEvicted(const RingShape& shape, int64_t id, int64_t begin, int64_t head,
                                int64_t next) {
  return begin + shape.num_rows < head || id < next - shape.num_slots;
}

// How often a trajectory was drawn, where that is limited. A new one's slot begins with 0.
GEAR_HOST_DEVICE int64_t& TimesSampled(Slot& slot) { return slot.owner; }

// The item that is first in the order of ids, which goes on round the end.
GEAR_HOST_DEVICE int64_t OldestItem(const int64_t* state, const Slot* slots, const RingShape& shape,
                                    const RingRule& rule) {
  const int64_t slot = state[kRingTail] % shape.num_slots;
  return rule.by_row ? slots[slot].first_row : slot;
}

GEAR_HOST_DEVICE Slot SlotOfPlaced(const RingShape& shape, const Placed& placed, int64_t born) {
  return {kCommitted,       placed.id / shape.num_slots,        placed.id, placed.first_row,
          placed.num_steps, placed.num_steps + shape.final_row, 0,         born};
}

// The state after a batch; total 0: it has no samples. By one thread.
GEAR_HOST_DEVICE void Advance(int64_t* state, uint64_t total, int64_t count) {
  state[kRingTotal] = static_cast<int64_t>(total);
  if (total != 0) {
    state[kRingSamples] += count;
    state[kRingBatch] += 1;
  }
  state[kRingEmpty] += total == 0;
  state[kRingInitial] = (state + kRingCounts)[kHighestPriority];
  state[kRingLeast] = 0;
}

// The j-th of `count` coordinates in the j-th of as many equal parts of the total:
// floor((j * total + coordinate) / count). Totals stay below 2^62, counts below 2^31.
GEAR_HOST_DEVICE uint64_t Stratify(uint64_t coordinate, uint64_t total, uint64_t j,
                                   uint64_t count) {
  const uint64_t whole = total / count, rest = total % count;
  return j * whole + (j * rest + coordinate) / count;
}

}  // namespace gear
