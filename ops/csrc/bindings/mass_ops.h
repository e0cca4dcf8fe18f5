// The ops on masses that run on the host and on devices.
#pragma once
#include "bindings/device.h"
#include "bindings/tensors.h"
#include "priorities/priorities.h"
#include "select/select.h"

namespace gear {

inline void TreeBuild(at::Tensor& sums, int64_t num_items) {
  const Device device(sums, "");
  device.Run(on::TreeBuild, TreeOf(sums, num_items), num_items);
}

inline void MinimaBuild(at::Tensor& minima, const at::Tensor& sums, int64_t num_items) {
  const Device device(minima, "sums", sums);
  device.Run(on::MinimaBuild, TreeOf(sums, num_items), num_items, MinimaOf(minima, num_items));
}

inline void MassOf(at::Tensor& masses, const at::Tensor& priorities, int64_t alpha,
                   int64_t most_bits) {
  const MassScale scale = ScaleOf(alpha, most_bits);
  const int64_t count = priorities.numel();
  const float* values = Values<float>(priorities, "priorities");
  int64_t* out = Values<int64_t>(masses, "masses", count);
  if constexpr (Device::kIsHost) CheckPriorities(values, count);
  const Device device(masses, "priorities", priorities);
  device.Run(on::MassOf, values, count, scale, out);
}

}  // namespace gear
