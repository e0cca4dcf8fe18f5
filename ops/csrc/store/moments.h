// Running moments of the elements of columns, over all rows that were ever committed.
//
// Two copies lie in shared memory: a commit is staged in the copy that is not the current one, and
// becomes current after the commit point. So a process may die at any instruction: the next owner
// of the lock (deepspeed_gear/store/row_allocator.py) finds from the slot whether a staged copy
// counts.
#pragma once
#include <cstdint>
#include <vector>

namespace gear::cpu {

struct Store;

// Arrays of the moments, each with one double an element. Elements without a finite value are zero.
enum MomentWord : int64_t {
  kMomentCount,    // finite values
  kMomentFirst,    // the first one, from which distances are taken: time stamps keep their bits
  kMomentMean,     // less the first one
  kMomentSquares,  // sum of squared deviations from the mean
  kMomentLeast,
  kMomentGreatest,
  kMomentWords,
};

// Words that say which copy counts.
enum MomentHead : int64_t {
  kCurrent,
  kStaged,      // 1 + the copy that holds a commit which is under way; 0: none
  kStagedSlot,  // of that commit: it has happened once the slot is committed with so many steps
  kStagedGeneration,
  kStagedSteps,
  kMomentHeadWords = 8,
};

struct CountedColumn {
  int64_t column, dtype, num_elements, first;  // first: of its elements among those of all columns
};

struct RunningMoments {
  int64_t* head = nullptr;  // null: nothing is counted
  double* words = nullptr;  // [2, kMomentWords, num_elements]
  int64_t num_elements = 0;
  std::vector<CountedColumn> columns;

  int64_t size() const { return kMomentWords * num_elements; }
};

// Returns the moments of the steps [known, num_steps) of a slot, which are written, and with its
// first ones of its first row of T+1 and of its values per trajectory. Needs no lock where the slot
// belongs to this process. Cost: two passes over the rows of the counted columns.
std::vector<double> MomentsOf(const Store& store, int64_t slot, int64_t known, int64_t num_steps);
// Adds a block to moments, element by element.
// Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
// Variances", 1979, equation 1.5b.
void MergeMoments(double* into, const double* block, int64_t num_elements);

// ---- with the lock held
// Stages the moments of steps before the commit that publishes `num_steps` steps of their slot.
void StageMoments(Store& store, int64_t slot, int64_t num_steps, const std::vector<double>& block);
// Makes what was staged current, after the commit point.
void PublishMoments(Store& store);

}  // namespace gear::cpu
