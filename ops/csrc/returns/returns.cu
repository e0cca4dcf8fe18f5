// Sums of rewards: a warp for each trajectory or sample. Its lanes load at once; they add one after
// the other, because the order of the additions is part of the result.
#include "common/launch_cuda.h"
#include "common/window.h"
#include "returns/returns.h"

namespace gear::cuda {
namespace {

constexpr int kGroup = 8;

// The values of kGroup lanes from `first` on, in every lane.
__device__ void ShareGroup(double value, int first, double (&group)[kGroup]) {
#pragma unroll
  for (int i = 0; i < kGroup; ++i) group[i] = __shfl_sync(kAllLanes, value, first + i);
}

// Adds a warp's values to a sum one after the other, lane 0 first. Lane i gets the sum up to its
// own value. Never fused, with any compiler flags, and in this order, as on the CPU: every lane
// repeats the additions. The shuffles of a group are given out before the additions of the one
// ahead of it, so that only the latency of an addition counts for each value.
__device__ double SumInOrder(double* sum, double value) {
  const int lane = LaneOfWarp();
  double own = 0, now[kGroup], next[kGroup] = {};
  ShareGroup(value, 0, now);
#pragma unroll
  for (int first = 0; first < kWarp; first += kGroup) {
    if (first + kGroup < kWarp) ShareGroup(value, first + kGroup, next);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      *sum = __dadd_rn(*sum, now[i]);
      if (lane == first + i) own = *sum;
      now[i] = next[i];
    }
  }
  return own;
}

// A warp for each trajectory: 32 rewards at a time, the last one first, and those of the next turn
// under way while they are added.
template <typename T>
__global__ void SuffixSumKernel(const T* __restrict__ reward, const Extent* __restrict__ extents,
                                int64_t num_extents, int64_t num_rows, const Faults faults,
                                float* __restrict__ out) {
  const int lane = LaneOfWarp();
  for (int64_t i = GlobalThread() / kWarp; i < num_extents; i += GlobalThreads() / kWarp) {
    const Extent extent = extents[i];
    faults.Require(IsIn(extent, num_rows), kSuffixSumExtent, i);
    const int64_t first = extent.first;
    int64_t row = first + extent.steps - 1 - lane;
    // After the first row nothing is added to what counts: the sums of lanes there are not kept.
    double sum = 0, value = row >= first ? Load<double>(reward[row]) : 0;
    for (int64_t left = extent.steps; left > 0; left -= kWarp) {
      const int64_t next = row - kWarp;
      const double following = next >= first ? Load<double>(reward[next]) : 0;
      const double own = SumInOrder(&sum, value);
      if (row >= first) out[row] = Store<float>(own);
      row = next, value = following;
    }
  }
}

// A warp for each sample, a lane for each step of its window: all are loaded at once, also those
// after its end.
template <typename T>
__global__ void NStepKernel(const T* __restrict__ reward, const NStep n_step,
                            const Resolution* __restrict__ resolutions, int64_t count,
                            const Faults faults, float* __restrict__ returns,
                            float* __restrict__ discount, int64_t* __restrict__ steps) {
  const int lane = LaneOfWarp();
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    const Resolution r = resolutions[i];
    double sum = 0;
    bool is_terminated = false;
    int64_t k = 0;
    if (!IsNoSample(r)) {
      faults.Require(IsAnchored(r), kNStepAnchor, i);
      const int64_t most = Min(n_step.n, r.num_steps - r.anchor), first = r.first_row + r.anchor;
      faults.Require(IsInside(r.first_row, r.anchor, r.anchor + most, n_step.num_rows), kNStepRows,
                     i);
      for (bool is_end = false; k < most && !is_end;) {
        const bool is_step = k + lane < most;
        const int64_t row = first + k + lane;
        const double power = is_step ? n_step.powers[k + lane] : 0;
        const double value = is_step ? Load<double>(reward[row]) : 0;
        const bool terminated = is_step && n_step.terminated[row];
        const bool truncated = is_step && n_step.truncated != nullptr && n_step.truncated[row];
        const unsigned ends = __ballot_sync(kAllLanes, terminated || truncated);
        const int end = ends != 0 ? __ffs(static_cast<int>(ends)) : kWarp;  // after the last step
        const auto now = static_cast<int>(Min<int64_t>(end, most - k));
        // Never fused, with any compiler flags: two roundings, as on the CPU.
        const double term = __dmul_rn(power, value);
        for (int step = 0; step < now; ++step)
          sum = __dadd_rn(sum, __shfl_sync(kAllLanes, term, step));
        is_end = ends != 0;
        is_terminated = is_end && __shfl_sync(kAllLanes, terminated, end - 1);
        k += now;
      }
    }
    if (lane != 0) continue;
    returns[i] = Store<float>(sum);
    discount[i] = is_terminated || IsNoSample(r) ? 0.0f : static_cast<float>(n_step.powers[k]);
    steps[i] = k;
  }
}

// A thread for each row: every step needs the one after it.
__global__ void EstimateKernel(const Advantage a, float* __restrict__ advantage,
                               float* __restrict__ target) {
  for (int64_t row = GlobalThread(); row < a.rows; row += GlobalThreads())
    EstimateRow(a, row, advantage, target);
}

}  // namespace

void SuffixSum(const void* reward, int64_t dtype, const Extent* extents, int64_t num_extents,
               int64_t num_rows, float* out, void* stream) {
  if (num_extents == 0) return;
  WithType(dtype, [&](auto one) {
    const auto* rewards = static_cast<const decltype(one)*>(reward);
    // Blocks of one warp: shuffles are limited by multiprocessor, and so each has few of them.
    const auto blocks = static_cast<unsigned>(Min(num_extents, kMostBlocks));
    Launch("SuffixSum", SuffixSumKernel<decltype(one)>, blocks, kWarp, stream, rewards, extents,
           num_extents, num_rows, FaultsOfProcess(), out);
  });
}

void NStepReturn(const NStep& n_step, const Resolution* resolutions, int64_t count, float* returns,
                 float* discount, int64_t* steps, void* stream) {
  if (count == 0) return;
  WithType(n_step.dtype, [&](auto one) {
    const auto* rewards = static_cast<const decltype(one)*>(n_step.reward);
    Launch("NStepReturn", NStepKernel<decltype(one)>, Blocks(count * kWarp), kThreads, stream,
           rewards, n_step, resolutions, count, FaultsOfProcess(), returns, discount, steps);
  });
}

void Estimate(const Advantage& a, float* advantage, float* target, void* stream) {
  if (a.rows == 0) return;
  Launch("Estimate", EstimateKernel, Blocks(a.rows), kThreads, stream, a, advantage, target);
}

}  // namespace gear::cuda
