// Returns-to-go and n-step returns.
// gear::cpu takes raw pointers and sizes; gear::cuda the same on a GPU, with a stream at the end.
// Every launch is followed by an error check, which throws std::runtime_error; an empty input
// returns before it. No call waits for the device: indices in device memory are checked there, and
// a wrong one ends the kernel with an error before it reads or writes outside.
#pragma once
#include <cstdint>

#include "common/slot.h"

namespace gear {

// The rows of a trajectory.
struct Extent {
  int64_t first, steps;
};
static_assert(sizeof(Extent) == 16, "an extent is a row of 2 int64");

GEAR_HOST_DEVICE bool IsIn(const Extent& extent, int64_t num_rows) {
  return extent.first >= 0 && extent.steps >= 0 && extent.steps <= num_rows - extent.first;
}

}  // namespace gear

namespace gear::cpu {

// out[row] = sum of reward over [row, end of its trajectory), summed in double from the end.
void SuffixSum(const void* reward, int64_t dtype, const Extent* extents, int64_t num_extents,
               int64_t num_rows, float* out);

// The n-step return, discount and number of steps of each resolution. powers[k] = gamma^k, k <= n.
struct NStep {
  const void* reward;
  int64_t dtype;
  const bool* terminated;
  const bool* truncated;  // null: never
  const double* powers;
  int64_t n;
  int64_t num_rows;  // that all columns have
};
void NStepReturn(const NStep& n_step, const Resolution* resolutions, int64_t count, float* returns,
                 float* discount, int64_t* steps);

}  // namespace gear::cpu

namespace gear::cuda {

using cpu::NStep;

void SuffixSum(const void* reward, int64_t dtype, const Extent* extents, int64_t num_extents,
               int64_t num_rows, float* out, void* stream);

void NStepReturn(const NStep& n_step, const Resolution* resolutions, int64_t count, float* returns,
                 float* discount, int64_t* steps, void* stream);

}  // namespace gear::cuda
