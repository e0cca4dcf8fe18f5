// Sums of rewards: returns-to-go and n-step returns.
#include "common/convert.h"
#include "returns/returns.h"

namespace gear::cpu {
namespace {

template <typename Visit>
void WithReward(const void* data, int64_t dtype, const Visit& visit) {
  switch (dtype) {
    case kBool:
    case kUint8:
      return visit(static_cast<const uint8_t*>(data));
    case kInt8:
      return visit(static_cast<const int8_t*>(data));
    case kInt16:
      return visit(static_cast<const int16_t*>(data));
    case kInt32:
      return visit(static_cast<const int32_t*>(data));
    case kInt64:
      return visit(static_cast<const int64_t*>(data));
    case kFloat16:
      return visit(static_cast<const Half*>(data));
    case kBfloat16:
      return visit(static_cast<const Bfloat*>(data));
    case kFloat32:
      return visit(static_cast<const float*>(data));
    default:
      return visit(static_cast<const double*>(data));
  }
}

}  // namespace

void SuffixSum(const void* reward, int64_t dtype, const int64_t* extents, int64_t num_extents,
               float* out) {
  WithReward(reward, dtype, [&](const auto* rewards) {
    for (int64_t i = 0; i < num_extents; ++i) {
      const int64_t first = extents[2 * i];
      double sum = 0;
      for (int64_t row = first + extents[2 * i + 1] - 1; row >= first; --row) {
        sum += Load<double>(rewards[row]);
        out[row] = Store<float, double>::From(sum);
      }
    }
  });
}

void NStepReturn(const NStep& n_step, const Resolution* resolutions, int64_t count, float* returns,
                 float* discount, int64_t* steps) {
  WithReward(n_step.reward, n_step.dtype, [&](const auto* rewards) {
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
      returns[i] = Store<float, double>::From(sum);
      discount[i] = terminated ? 0.0f : static_cast<float>(n_step.powers[k]);
      steps[i] = k;
    }
  });
}

}  // namespace gear::cpu
