// Where an op runs: on the host, or on the device of its tensors and the current stream.
//
// The latter in a source that defines GEAR_ON_DEVICE. An op that runs on both is written once: it
// calls `on::Kernel` by a Device.
#pragma once
#include <ATen/core/Tensor.h>

#include <utility>

#if defined(GEAR_ON_DEVICE)
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#endif

namespace gear {

namespace cpu {}
namespace cuda {}

#if defined(GEAR_ON_DEVICE)

namespace on = cuda;

// Makes a tensor's device current, and gives kernels its current stream.
class Device {
 public:
  static constexpr bool kIsHost = false;

  // `names`: of the other tensors of the op, which must be on the same device.
  template <typename... Others>
  Device(const at::Tensor& first, const char* names, const Others&... others)
      : first_(first), guard_(first.device()) {
    (Check(names, others), ...);
    TORCH_CHECK(aoti_torch_get_current_cuda_stream(first.get_device(), &stream_) == 0,
                "gear: torch gives no stream of ", first.device());
  }

  void Check(const char* name, const at::Tensor& other) const {
    TORCH_CHECK(other.device() == first_.device(), "gear: ", name, " must be on ", first_.device(),
                ", got ", other.device());
  }
  void Check(const char* name, const std::optional<at::Tensor>& other) const {
    if (other) Check(name, *other);
  }
  void Check(const char* name, at::TensorList others) const {
    for (const at::Tensor& other : others) Check(name, other);
  }

  void* stream() const { return stream_; }

  template <typename Kernel, typename... Arguments>
  void Run(const Kernel& kernel, Arguments&&... arguments) const {
    kernel(std::forward<Arguments>(arguments)..., stream_);
  }

  // With words of scratch memory from torch's allocator: it is reused only after this stream's
  // kernels.
  template <typename Kernel, typename... Arguments>
  void RunWith(int64_t scratch_words, const Kernel& kernel, Arguments&&... arguments) const {
    at::Tensor scratch = at::empty({scratch_words}, first_.options().dtype(at::kLong));
    Run(kernel, std::forward<Arguments>(arguments)..., scratch.mutable_data_ptr<int64_t>());
  }

 private:
  const at::Tensor& first_;
  c10::DeviceGuard guard_;
  void* stream_ = nullptr;
};

#else

namespace on = cpu;

class Device {
 public:
  static constexpr bool kIsHost = true;

  template <typename... Others>
  explicit Device(const at::Tensor&, const char*, const Others&...) {}

  void Check(const char*, const at::Tensor&) const {}
  void* stream() const { return nullptr; }

  template <typename Kernel, typename... Arguments>
  auto Run(const Kernel& kernel, Arguments&&... arguments) const {
    return kernel(std::forward<Arguments>(arguments)...);
  }

  template <typename Kernel, typename... Arguments>
  void RunWith(int64_t, const Kernel& kernel, Arguments&&... arguments) const {
    kernel(std::forward<Arguments>(arguments)...);
  }
};

#endif

}  // namespace gear
