// Returns-to-go, n-step returns, and advantages by GAE and V-trace.
#pragma once
#include <cstdint>

#include "common/convert.h"
#include "common/power.h"
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

// Windows of steps whose advantages are estimated: `rows` of `length` places.
struct Advantage {
  const double *reward, *value, *next_value;
  const double *log_prob, *behaviour_log_prob;  // null: the policy that is trained has acted
  const bool *terminated, *truncated, *mask;    // truncated: null: never. mask: false: padding
  double gamma, lambda, rho_bar, c_bar;
  int64_t rows, length;
};

// a + b * c with two roundings, whatever flags a compiler gets.
GEAR_HOST_DEVICE double AddProduct(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, __dmul_rn(b, c));
#else
  return a + b * c;
#endif
}

// e^x by the integers of common/power.h, rounded to float; 0 below 2^-126.
GEAR_HOST_DEVICE double Exp(double x) {
  if (x != x) return x;
  const double log = Clamp(x * 1.4426950408889634, -128.0, 128.0);  // log2(e)
  return BitCast<float>(FloatBits(Exp2(static_cast<int64_t>(log * (int64_t{1} << kLogBits)))));
}

// The advantages and value targets of a row, from its last step back: what a window does not hold
// is bootstrapped from the value after its last step.
GEAR_HOST_DEVICE void EstimateRow(const Advantage& a, int64_t row, float* advantage,
                                  float* target) {
  double later = 0;  // target - value of the step after
  for (int64_t i = (row + 1) * a.length - 1; i >= row * a.length; --i) {
    if (!a.mask[i] || a.terminated[i] || (a.truncated != nullptr && a.truncated[i])) later = 0;
    advantage[i] = target[i] = 0;
    if (!a.mask[i]) continue;
    const double next = a.terminated[i] ? 0 : a.next_value[i];
    const double error = AddProduct(a.reward[i], a.gamma, next) - a.value[i];
    double rho = 1, c = a.lambda, own = error;
    if (a.log_prob != nullptr) {
      const double ratio = Exp(a.log_prob[i] - a.behaviour_log_prob[i]);
      rho = ratio > a.rho_bar ? a.rho_bar : ratio;
      c *= ratio > a.c_bar ? a.c_bar : ratio;
      own = rho * AddProduct(error, a.gamma, later);
    }
    later = AddProduct(rho * error, c * a.gamma, later);
    advantage[i] = Store<float>(a.log_prob != nullptr ? own : later);
    target[i] = Store<float>(a.value[i] + later);
  }
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

void Estimate(const Advantage& a, float* advantage, float* target);

}  // namespace gear::cpu

namespace gear::cuda {

using cpu::NStep;

void SuffixSum(const void* reward, int64_t dtype, const Extent* extents, int64_t num_extents,
               int64_t num_rows, float* out, void* stream);

void NStepReturn(const NStep& n_step, const Resolution* resolutions, int64_t count, float* returns,
                 float* discount, int64_t* steps, void* stream);

void Estimate(const Advantage& a, float* advantage, float* target, void* stream);

}  // namespace gear::cuda
