// Priorities of a store's rows, which move with their trajectories and end with them.
#pragma once
#include <cstdint>

#include "priorities/priorities.h"

namespace gear::cpu {

// A stream's priorities of rows, all else of which derives from `target.values`. The row arrays
// that a move copies include them; a death between the copy and the functions here is repaired by
// the stream (deepspeed_gear/store/step_priorities.py), which derives masses and counts anew.
struct StepPriorities {
  Priorities target;
  int64_t* counts;  // by UpdateCount
};

// ---- with the lock held
// Clears the priorities of rows, so that another trajectory can use them.
void ForgetRows(const StepPriorities& steps, int64_t first_row, int64_t num_rows);
// Moves the masses of rows to those where their priorities have been copied, and clears the
// priorities of the rows that are free now. `spare_row`, `spare_rows`: what the copy went through.
void MoveMasses(const StepPriorities& steps, int64_t source, int64_t to, int64_t num_rows,
                int64_t spare_row, int64_t spare_rows);

}  // namespace gear::cpu
