// Masses from priorities, PER weights, trees of least masses, top-k, and priority updates.
#pragma once
#include <cstdint>
#include <vector>

#include "common/power.h"
#include "common/slot.h"

namespace gear::cpu {

// The mass of each priority. All are finite and at least 0.
void MassOf(const float* priorities, int64_t count, MassScale scale, int64_t* masses);

// weights[i] = (numerator / (count * mass of resolution i))^beta, for `size` resolutions.
void Importance(const Resolution* resolutions, int64_t size, uint64_t numerator, uint64_t count,
                uint64_t beta, float* weights);

// Sets every node of the tree of minima above leaves that are set.
void MinimaBuild(const uint64_t* sums, int64_t num_items, uint64_t* minima);

// Repairs the minima above leaves that have changed; items may repeat.
void MinimaUpdate(const uint64_t* sums, int64_t num_items, const int64_t* items, int64_t count,
                  uint64_t* minima);

// The k leaves of highest priority that have a mass, descending, ties by number; -1 after the last.
// Cost: about one pass over the priorities.
void TopK(const float* priorities, const uint64_t* sums, int64_t num_items, int64_t k,
          int64_t* items);

// Writes the new priorities of samples into a ring of reports, from `tail` modulo its size on.
void AppendReports(Report* log, int64_t size, const Resolution* resolutions,
                   const float* priorities, int64_t count, int64_t tail, int64_t batch);

// Sorts reports by batch and sample number, stably. Returns the reports themselves if they are in
// order, else a copy in `sorted`.
const Report* InOrder(const Report* reports, int64_t count, std::vector<Report>* sorted);

// Updates, each at the beginning of a row: a PriorityUpdate or a Report.
struct Updates {
  const int64_t* rows;
  int64_t row_words;

  const PriorityUpdate& operator[](int64_t i) const {
    return *reinterpret_cast<const PriorityUpdate*>(rows + i * row_words);
  }
};

// The item of each update, -1 where it does not apply (`IsCurrent`). Returns `count`, or the index
// of the first update whose item would lie outside.
int64_t ItemsOf(const Slot* slots, int64_t num_slots, const AnchorRule& rule, int64_t unit,
                const Updates& updates, int64_t count, int64_t num_items, int64_t* items);

// The arrays that an update changes; `minima` is null if they are not maintained.
struct Priorities {
  uint64_t* sums;
  uint64_t* minima;
  float* values;  // [num_items]
  int64_t num_items;
};

// Sets priorities in order, so that the last of equal items wins, and repairs sums and minima.
void Prioritize(const Priorities& priorities, const Updates& updates, const int64_t* items,
                int64_t count, MassScale scale, int64_t* counts);

// What is kept of the slots whose items have priorities.
struct PrioritizedSlots {
  int64_t* bases;        // mass by the rule, before priorities
  int64_t* generations;  // of the trajectory whose items have priorities
  int64_t* steps;        // steps with a priority; null where items are trajectories
  int32_t* row_slots;    // the slot of each row; null likewise
};

// Sets the first priority of the new items of slots that entries [first, last) of a ring name, and
// clears those of evicted ones; items that have one keep it. Returns `last`, or the first entry
// whose rows lie outside; those before it are done.
int64_t SlotPriorities(const Priorities& priorities, const PrioritizedSlots& known,
                       const Slot* slots, const int64_t* log, int64_t log_size, int64_t first,
                       int64_t last, const AnchorRule& rule, int64_t unit, uint32_t initial,
                       MassScale scale, int64_t* counts);

}  // namespace gear::cpu

namespace gear::cuda {

void MassOf(const float* priorities, int64_t count, MassScale scale, int64_t* masses, void* stream);

void MinimaBuild(const uint64_t* sums, int64_t num_items, uint64_t* minima, void* stream);

// Words of scratch memory that TopK needs.
int64_t TopKScratch(int64_t num_items, int64_t k);
// `first`: a word in device memory, the leaf from which on equal ones are taken, round the end.
void TopK(const float* priorities, const uint64_t* sums, int64_t num_items, int64_t k,
          const int64_t* first, int64_t* items, int64_t* scratch, void* stream);

}  // namespace gear::cuda
