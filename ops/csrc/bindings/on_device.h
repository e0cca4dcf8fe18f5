// Helpers of the bindings of the kernels.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace gear {

// Makes the tensors' device current, and gives its current stream.
class OnDevice {
 public:
  explicit OnDevice(const at::Tensor& out) : guard_(out.device()) {
    TORCH_CHECK(aoti_torch_get_current_cuda_stream(out.get_device(), &stream_) == 0,
                "gear: torch gives no stream of ", out.device());
  }
  void* stream() const { return stream_; }

 private:
  c10::DeviceGuard guard_;
  void* stream_ = nullptr;
};

inline void CheckDevice(const at::Tensor& tensor, const at::Tensor& out, const char* name) {
  TORCH_CHECK(tensor.device() == out.device(), "gear: ", name, " must be on ", out.device(),
              ", got ", tensor.device());
}

// From torch's allocator: it is reused only after this stream's kernels.
inline at::Tensor ScratchFor(int64_t words, const at::Tensor& like) {
  return at::empty({words}, like.options().dtype(at::kLong));
}

}  // namespace gear
