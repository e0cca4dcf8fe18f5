// Many copies by one call of the driver, which its copy engines make without a kernel.
#include <cuda.h>
#include <dlfcn.h>

#include <vector>

#include "common/launch_cuda.h"
#include "copies/copies.h"

namespace gear::cuda {
namespace {

#if CUDA_VERSION >= 12080
using BatchCopy = CUresult (*)(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count,
                               CUmemcpyAttributes* attributes, size_t* first_of,
                               size_t num_attributes, size_t* failed, CUstream stream);

// From the driver itself: the runtime's lookup of driver functions by version is not in every
// libcudart.so.12 that torch may have loaded, and a missing symbol would make all kernels
// unloadable. The plain name has this signature in every driver that has it; CUDA 13 uses another
// name for its new signature.
BatchCopy Find() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
  return driver == nullptr ? nullptr
                           : reinterpret_cast<BatchCopy>(dlsym(driver, "cuMemcpyBatchAsync"));
}
#endif

[[noreturn]] void Refuse() {
  throw std::runtime_error(
      "gear: copies of many pieces need CUDA 12.8 or newer, in toolkit and driver");
}

}  // namespace

void CopyPieces(const void* const* from, void* const* to, const int64_t* bytes, int64_t count,
                void* stream) {
  if (count == 0) return;
#if CUDA_VERSION >= 12080
  static const BatchCopy copy = Find();
  if (copy == nullptr) Refuse();
  const auto size = static_cast<size_t>(count);
  std::vector<CUdeviceptr> sources(size), targets(size);
  for (size_t i = 0; i < size; ++i) {
    sources[i] = reinterpret_cast<CUdeviceptr>(from[i]);
    targets[i] = reinterpret_cast<CUdeviceptr>(to[i]);
  }
  std::vector<size_t> sizes(bytes, bytes + count);
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  size_t first = 0, failed = 0;
  const CUresult error = copy(targets.data(), sources.data(), sizes.data(), size, &attributes,
                              &first, 1, &failed, static_cast<CUstream>(stream));
  if (error == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    throw std::runtime_error("gear: copies of many pieces cannot be captured in a CUDA graph");
  if (error != CUDA_SUCCESS)
    throw std::runtime_error("gear: cuMemcpyBatchAsync failed with error " +
                             std::to_string(static_cast<int>(error)) + " at piece " +
                             std::to_string(failed));
#else
  (void)from, (void)to, (void)bytes, (void)stream;
  Refuse();
#endif
}

}  // namespace gear::cuda
