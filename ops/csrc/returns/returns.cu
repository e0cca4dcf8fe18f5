// Sums of rewards: a thread for each trajectory or sample, because the order of the additions is
// part of the result.
#include "common/convert.h"
#include "common/launch_cuda.h"
#include "common/window.h"
#include "returns/returns.h"

namespace gear::cuda {
namespace {

template <typename T>
__global__ void SuffixSumKernel(const T* __restrict__ reward, const int64_t* __restrict__ extents,
                                int64_t num_extents, int64_t num_rows, float* __restrict__ out) {
  for (int64_t i = GlobalThread(); i < num_extents; i += GlobalThreads()) {
    const int64_t first = extents[2 * i], steps = extents[2 * i + 1];
    Require(first >= 0 && steps >= 0 && steps <= num_rows - first);
    double sum = 0;
    for (int64_t row = first + steps - 1; row >= first; --row) {
      sum += Load<double>(reward[row]);
      out[row] = Store<float, double>::From(sum);
    }
  }
}

template <typename T>
__global__ void NStepKernel(const T* __restrict__ reward, const NStep n_step, int64_t num_rows,
                            const Resolution* __restrict__ resolutions, int64_t count,
                            float* __restrict__ returns, float* __restrict__ discount,
                            int64_t* __restrict__ steps) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const Resolution r = resolutions[i];
    if (IsNoSample(r)) {
      returns[i] = discount[i] = 0.0f;
      steps[i] = 0;
      continue;
    }
    Require(IsAnchored(r));
    const int64_t most = Min(n_step.n, r.num_steps - r.anchor), first = r.first_row + r.anchor;
    Require(IsInside(r.first_row, r.anchor, r.anchor + most, num_rows));
    double sum = 0;
    bool terminated = false, stop = false;
    int64_t k = 0;
    while (k < most && !stop) {
      const int64_t row = first + k;
      // Never fused, with any compiler flags: two roundings, as on the CPU.
      sum = __dadd_rn(sum, __dmul_rn(n_step.powers[k], Load<double>(reward[row])));
      terminated = n_step.terminated[row];
      stop = terminated || (n_step.truncated != nullptr && n_step.truncated[row]);
      ++k;
    }
    returns[i] = Store<float, double>::From(sum);
    discount[i] = terminated ? 0.0f : static_cast<float>(n_step.powers[k]);
    steps[i] = k;
  }
}

// Calls `visit` (on the host) with the reward's elements by their type.
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
               int64_t num_rows, float* out, void* stream) {
  if (num_extents == 0) return;
  WithReward(reward, dtype, [&](const auto* rewards) {
    SuffixSumKernel<<<Blocks(num_extents), kThreads, 0, AsStream(stream)>>>(
        rewards, extents, num_extents, num_rows, out);
  });
  CheckLaunch("SuffixSum");
}

void NStepReturn(const NStep& n_step, int64_t num_rows, const Resolution* resolutions,
                 int64_t count, float* returns, float* discount, int64_t* steps, void* stream) {
  if (count == 0) return;
  WithReward(n_step.reward, n_step.dtype, [&](const auto* rewards) {
    NStepKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(
        rewards, n_step, num_rows, resolutions, count, returns, discount, steps);
  });
  CheckLaunch("NStepReturn");
}

}  // namespace gear::cuda
