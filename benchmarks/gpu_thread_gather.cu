// The baseline of benchmarks/gpu.py: every thread copies 64 contiguous bytes, in the order of the samples.
// Neighbouring threads so read and write addresses that lie 64 bytes apart.
#include <cstdint>

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;

__global__ void ThreadGather(const uint4* __restrict__ table, const int64_t* __restrict__ first_rows,
                             int64_t count, int64_t length, uint4* __restrict__ out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count * length) return;
  const uint4* from = table + (first_rows[i / length] + i % length) * 4;
  uint4* to = out + i * 4;
  for (int part = 0; part < 4; ++part) to[part] = from[part];
}

}  // namespace

// Rows of 64 bytes: table [rows, 64], first_rows [count], out [count, length, 64]. Returns the launch's error.
extern "C" __attribute__((visibility("default"))) int GatherByThreads(
    const void* table, const int64_t* first_rows, int64_t count, int64_t length, void* out,
    void* stream) {
  if (count * length == 0) return 0;
  const auto blocks = static_cast<unsigned>((count * length + kThreads - 1) / kThreads);
  ThreadGather<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(table), first_rows, count, length, static_cast<uint4*>(out));
  return static_cast<int>(cudaGetLastError());
}
