// Random draws, sum trees of masses and their updates, the resolution of coordinates to samples,
// and hindsight goals.
#pragma once
#include <cstdint>

#include "common/slot.h"

namespace gear::cpu {

// coordinates[i] = a point in [0, total) for sample first + i.
void Draw(uint64_t seed, uint32_t stream, int64_t first, uint64_t total, int64_t count,
          int64_t* coordinates);

// coordinates[i] = the image of index first + i in the epoch's permutation of [0, size).
void Permute(uint64_t seed, uint32_t stream, int64_t epoch, int64_t first, uint64_t size,
             int64_t count, int64_t* coordinates);

// Sums every inner node of a tree whose leaves are set.
void TreeBuild(uint64_t* sums, int64_t num_items);

// Sets leaves and repairs the nodes above them; of equal items the last wins. Cost: levels
// additions an item.
void TreeUpdate(uint64_t* sums, int64_t num_items, const int64_t* items, const int64_t* masses,
                int64_t count);
// Sets the masses of the slots that entries [first, last) of a ring name.
void SlotMasses(uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* log,
                int64_t log_size, int64_t first, int64_t last, const AnchorRule& rule,
                int64_t unit);

// What each coordinate hits: slot, anchor, mass, and the sample number first + i.
void Resolve(const uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* coordinates,
             int64_t count, const AnchorRule& rule, int64_t unit, uint64_t seed, uint32_t stream,
             int64_t first, Resolution* resolutions);

// What each coordinate hits in a tree whose items are the rows of the store. Returns `count`, or
// the index of the first draw whose row is no step of its slot: the draws before it are written.
int64_t ResolveRows(const uint64_t* sums, const Slot* slots, int64_t num_slots,
                    const int32_t* row_slots, int64_t num_rows, const int64_t* coordinates,
                    int64_t count, int64_t first, Resolution* resolutions);

// Which rows of a trajectory may give a sample another goal.
enum GoalStrategy : int64_t { kFuture = 0, kFinal = 1, kEpisode = 2 };

// The row of the achieved goal that each sample gets, -1 for its own goal: with the probability
// `fraction` (Q62), where there is such a row. A trajectory has `final_row` rows more than steps.
void DrawGoals(const Resolution* resolutions, int64_t count, uint64_t seed, uint32_t stream,
               int64_t strategy, uint64_t fraction, int64_t final_row, int64_t* goal_step);

}  // namespace gear::cpu

namespace gear::cuda {

void TreeBuild(uint64_t* sums, int64_t num_items, void* stream);

}  // namespace gear::cuda
