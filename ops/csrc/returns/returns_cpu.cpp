// Sums of rewards: returns-to-go, n-step returns and advantages.
#include "returns/returns.h"

namespace gear::cpu {
void SuffixSum(const void* reward, int64_t dtype, const Extent* extents, int64_t num_extents,
               int64_t, float* out) {
  WithType(dtype, [&](auto one) {
    const auto* rewards = static_cast<const decltype(one)*>(reward);
    for (int64_t i = 0; i < num_extents; ++i) {
      const auto [first, steps] = extents[i];
      double sum = 0;
      for (int64_t row = first + steps - 1; row >= first; --row) {
        sum += Load<double>(rewards[row]);
        out[row] = Store<float>(sum);
      }
    }
  });
}

void NStepReturn(const NStep& n_step, const Resolution* resolutions, int64_t count, float* returns,
                 float* discount, int64_t* steps) {
  WithType(n_step.dtype, [&](auto one) {
    const auto* rewards = static_cast<const decltype(one)*>(n_step.reward);
    for (int64_t i = 0; i < count; ++i) {
      const Resolution& r = resolutions[i];
      if (IsNoSample(r)) {
        returns[i] = discount[i] = 0.0f;
        steps[i] = 0;
        continue;
      }
      const int64_t most = Min(n_step.n, r.num_steps - r.anchor), first = r.first_row + r.anchor;
      double sum = 0;
      bool terminated = false, stop = false;
      int64_t k = 0;
      while (k < most && !stop) {
        const int64_t row = first + k;
        const double term = n_step.powers[k] * Load<double>(rewards[row]);
        sum += term;
        terminated = n_step.terminated[row];
        stop = terminated || (n_step.truncated != nullptr && n_step.truncated[row]);
        ++k;
      }
      returns[i] = Store<float>(sum);
      discount[i] = terminated ? 0.0f : static_cast<float>(n_step.powers[k]);
      steps[i] = k;
    }
  });
}

void Estimate(const Advantage& a, float* advantage, float* target) {
  for (int64_t row = 0; row < a.rows; ++row) EstimateRow(a, row, advantage, target);
}

}  // namespace gear::cpu
