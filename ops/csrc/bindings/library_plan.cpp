// The op `plan_packs_`: which trajectory goes into which pack.
#include "bindings/checks.h"
#include "bindings/ops.h"
#include "pack/plan.h"

namespace gear {

void PlanPacks(at::Tensor& micro, at::Tensor& rank, at::Tensor& num_micro,
               const at::Tensor& lengths, int64_t tokens, int64_t linear, int64_t quadratic,
               int64_t width, int64_t trajectories) {
  const int64_t count = lengths.numel();
  CheckTensor(lengths, "lengths", at::kLong);
  CheckTensor(micro, "micro", at::kLong);
  CheckTensor(rank, "rank", at::kLong);
  CheckTensor(num_micro, "num_micro", at::kLong);
  TORCH_CHECK(micro.numel() == count && rank.numel() == count && num_micro.numel() == 1,
              "gear: micro and rank must have a value per length, num_micro one");
  TORCH_CHECK(tokens >= 1 && tokens <= cpu::kMostPackTokens,
              "gear: tokens must be in [1, 2^31), got ", tokens);
  TORCH_CHECK(width >= 1 && width <= cpu::kMostPackWidth, "gear: width must be in [1, 2^20], got ",
              width);
  TORCH_CHECK(trajectories >= 1 && trajectories <= cpu::kMostPackTokens,
              "gear: trajectories must be in [1, 2^31), got ", trajectories);
  constexpr int64_t kEnd = int64_t{1} << 62;  // of the cost of all trajectories
  TORCH_CHECK(
      linear >= 0 && quadratic >= 0 && linear < kEnd && quadratic < kEnd && linear + quadratic > 0,
      "gear: linear and quadratic must be in [0, 2^62), and not both 0");
  const int64_t* values = lengths.const_data_ptr<int64_t>();
  unsigned __int128 cost = 0;
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(values[i] >= 1 && values[i] <= tokens, "gear: length ", i, " must be in [1, ",
                tokens, "], got ", values[i]);
    const auto length = static_cast<unsigned __int128>(values[i]);
    cost += (static_cast<unsigned __int128>(linear) + quadratic * length) * length;
    TORCH_CHECK(cost < static_cast<unsigned __int128>(kEnd),
                "gear: the cost of all trajectories must be below 2^62");
  }
  num_micro.mutable_data_ptr<int64_t>()[0] =
      cpu::PlanPacks(values, count, {tokens, linear, quadratic, trajectories}, width,
                     micro.mutable_data_ptr<int64_t>(), rank.mutable_data_ptr<int64_t>());
}

}  // namespace gear
