// What one GPU and its link to host memory can do, without gear and without torch: the ceilings
// that the figures of gpu.py are judged by, and variants of copies to choose from.
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -cudart=static -o gpu_ceilings gpu_ceilings.cu
//   ./gpu_ceilings [--quick]
//
// One JSON object a line, as soon as it is measured. The first one describes the device. "us" is
// the median of several runs, "gb_per_s" counts every byte once that is read and once that is
// written. Exit code 2: there is no device; 1: a call failed.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

namespace {

constexpr int kThreads = 256, kRuns = 7;
constexpr int64_t kVector = sizeof(uint4);

void Check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("{\"error\": \"%s: %s\"}\n", what, cudaGetErrorString(error));
  std::exit(1);
}
#define CHECK(call) Check(call, #call)

// ---- kernels ----------------------------------------------------------------------------------

__global__ void Empty() {}

__device__ int64_t Thread() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t Threads() { return int64_t{gridDim.x} * blockDim.x; }

// Each thread has `kLoads` loads in flight before its first store.
template <int kLoads>
__global__ void Copy(const uint4* __restrict__ from, uint4* __restrict__ to, int64_t count) {
  const int64_t step = Threads();
  for (int64_t i = Thread(); i < count; i += step * kLoads) {
    uint4 held[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (i + k * step < count) held[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (i + k * step < count) to[i + k * step] = held[k];
  }
}

// Reads and keeps nothing; the sum stops the compiler from leaving the reads out.
template <int kLoads>
__global__ void Read(const uint4* __restrict__ from, int64_t count, unsigned* sum) {
  const int64_t step = Threads();
  unsigned all = 0;
  for (int64_t i = Thread(); i < count; i += step * kLoads) {
    uint4 held[kLoads] = {};
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (i + k * step < count) held[k] = from[i + k * step];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) all += held[k].x ^ held[k].y ^ held[k].z ^ held[k].w;
  }
  if (all == 0x9E3779B9u) *sum = all;
}

// A warp copies a row: what a gather of windows comes down to.
template <int kLoads>
__global__ void Rows(const uint4* __restrict__ table, const int64_t* __restrict__ rows,
                     int64_t num_rows, int64_t vectors, uint4* __restrict__ out) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = Thread() / 32; row < num_rows; row += Threads() / 32) {
    const uint4* from = table + rows[row] * vectors;
    uint4* to = out + row * vectors;
    for (int64_t i = lane; i < vectors; i += 32 * kLoads) {
      uint4 held[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        if (i + 32 * k < vectors) held[k] = from[i + 32 * k];
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        if (i + 32 * k < vectors) to[i + 32 * k] = held[k];
    }
  }
}

// Every load depends on the one before; the next call goes on where this one ends.
__global__ void Chase(const int64_t* next, int64_t steps, int64_t* last) {
  int64_t at = *last;
  for (int64_t i = 0; i < steps; ++i) at = next[at];
  *last = at;
}

__global__ void FillCycle(int64_t* next, int64_t count, int64_t stride) {
  for (int64_t i = Thread(); i < count; i += Threads()) next[i] = (i + stride) % count;
}

__global__ void FillRandom(int64_t* rows, int64_t count, int64_t num_rows) {
  for (int64_t i = Thread(); i < count; i += Threads()) {
    uint64_t x = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    rows[i] = static_cast<int64_t>((x ^ (x >> 31)) % static_cast<uint64_t>(num_rows));
  }
}

// ---- time -------------------------------------------------------------------------------------

class Bench {
 public:
  explicit Bench(bool is_quick) : is_quick_(is_quick) {
    CHECK(cudaGetDeviceProperties(&facts_, 0));
    CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&begin_));
    CHECK(cudaEventCreate(&end_));
  }

  cudaStream_t stream() const { return stream_; }
  int multiprocessors() const { return facts_.multiProcessorCount; }
  const cudaDeviceProp& facts() const { return facts_; }
  int64_t bytes() const { return is_quick_ ? int64_t{64} << 20 : int64_t{1} << 30; }

  // Microseconds of a call that enqueues work; the median of several.
  double Us(const std::function<void()>& enqueue, int calls = 1) {
    std::vector<float> taken;
    for (int run = 0; run <= kRuns; ++run) {
      CHECK(cudaEventRecord(begin_, stream_));
      for (int call = 0; call < calls; ++call) enqueue();
      CHECK(cudaEventRecord(end_, stream_));
      CHECK(cudaEventSynchronize(end_));
      CHECK(cudaGetLastError());
      float ms = 0;
      CHECK(cudaEventElapsedTime(&ms, begin_, end_));
      if (run > 0) taken.push_back(ms);  // the first one warms up
    }
    std::nth_element(taken.begin(), taken.begin() + kRuns / 2, taken.end());
    return taken[kRuns / 2] * 1e3 / calls;
  }

  void Report(const char* what, const char* variant, double us, int64_t bytes = 0) {
    std::printf("{\"what\": \"%s\", \"variant\": \"%s\", \"us\": %.3f", what, variant, us);
    if (bytes > 0) std::printf(", \"gb_per_s\": %.2f", static_cast<double>(bytes) / us / 1e3);
    std::printf("}\n");
    std::fflush(stdout);
  }

 private:
  const bool is_quick_;
  cudaDeviceProp facts_;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

char* OnDevice(int64_t bytes) {
  void* memory = nullptr;
  CHECK(cudaMalloc(&memory, static_cast<size_t>(bytes)));
  CHECK(cudaMemset(memory, 1, static_cast<size_t>(bytes)));
  CHECK(
      cudaDeviceSynchronize());  // the stream of the measurements does not wait for the default one
  return static_cast<char*>(memory);
}

// Memory of the host as gear's stores have it: registered, not allocated, by CUDA.
class Registered {
 public:
  explicit Registered(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    memory_ = std::aligned_alloc(4096, bytes_);
    std::memset(memory_, 1, bytes_);
    CHECK(cudaHostRegister(memory_, bytes_, cudaHostRegisterPortable | cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&mapped_, memory_, 0));
  }
  ~Registered() {
    cudaHostUnregister(memory_);
    std::free(memory_);
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;
  void* host() const { return memory_; }
  const void* mapped() const { return mapped_; }

 private:
  const size_t bytes_;
  void *memory_ = nullptr, *mapped_ = nullptr;
};

// ---- what is measured -------------------------------------------------------------------------

template <int kLoads>
void CopyVariants(Bench& bench, const char* from, char* to) {
  const int64_t count = bench.bytes() / kVector;
  for (int per : {2, 4, 8, 16}) {
    const auto blocks = static_cast<unsigned>(per * bench.multiprocessors());
    const double us = bench.Us([&] {
      Copy<kLoads><<<blocks, kThreads, 0, bench.stream()>>>(reinterpret_cast<const uint4*>(from),
                                                            reinterpret_cast<uint4*>(to), count);
    });
    char variant[80];
    std::snprintf(variant, sizeof variant, "%d loads in flight, %d blocks an SM", kLoads, per);
    bench.Report("device copy by a kernel", variant, us, 2 * bench.bytes());
  }
}

template <int kLoads>
void RowVariants(Bench& bench, const void* table, const char* what, int64_t row_bytes,
                 int64_t* rows, int64_t num_rows, char* out, const std::vector<int>& blocks,
                 int times) {
  FillRandom<<<256, kThreads, 0, bench.stream()>>>(rows, num_rows, bench.bytes() / row_bytes);
  for (int count : blocks) {
    const double us = bench.Us([&] {
      Rows<kLoads><<<static_cast<unsigned>(count), kThreads, 0, bench.stream()>>>(
          static_cast<const uint4*>(table), rows, num_rows, row_bytes / kVector,
          reinterpret_cast<uint4*>(out));
    });
    char variant[80];
    std::snprintf(variant, sizeof variant, "%lld rows of %lld B, %d loads in flight, %d blocks",
                  static_cast<long long>(num_rows), static_cast<long long>(row_bytes), kLoads,
                  count);
    bench.Report(what, variant, us, times * num_rows * row_bytes);
  }
}

void Device(Bench& bench) {
  char *from = OnDevice(bench.bytes()), *to = OnDevice(bench.bytes());
  const auto bytes = static_cast<size_t>(bench.bytes());
  bench.Report("device copy", "cudaMemcpyAsync", bench.Us([&] {
    CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, bench.stream()));
  }),
               2 * bench.bytes());
  CopyVariants<1>(bench, from, to);
  CopyVariants<2>(bench, from, to);
  CopyVariants<4>(bench, from, to);
  auto* rows = reinterpret_cast<int64_t*>(OnDevice(bench.bytes() / 64 * 8));
  const std::vector<int> blocks = {4 * bench.multiprocessors(), 8 * bench.multiprocessors()};
  for (int64_t row_bytes : {64, 256, 1280}) {
    const int64_t count = std::min(bench.bytes() / row_bytes, int64_t{1} << 17);
    const char* what = "random rows of device memory";
    RowVariants<1>(bench, from, what, row_bytes, rows, count, to, blocks, 2);
    RowVariants<2>(bench, from, what, row_bytes, rows, count, to, blocks, 2);
    RowVariants<4>(bench, from, what, row_bytes, rows, count, to, blocks, 2);
  }
  for (char* memory : {from, to, reinterpret_cast<char*>(rows)}) CHECK(cudaFree(memory));
}

template <int kLoads>
void ReadVariants(Bench& bench, const void* mapped, unsigned* sum) {
  const int64_t count = bench.bytes() / kVector;
  for (int blocks : {16, 32, 64, 4 * bench.multiprocessors()}) {
    const double us = bench.Us([&] {
      Read<kLoads><<<static_cast<unsigned>(blocks), kThreads, 0, bench.stream()>>>(
          static_cast<const uint4*>(mapped), count, sum);
    });
    char variant[80];
    std::snprintf(variant, sizeof variant, "%d loads in flight, %d blocks", kLoads, blocks);
    bench.Report("host memory read in order by a kernel", variant, us, bench.bytes());
  }
}

void Host(Bench& bench) {
  const Registered memory(bench.bytes());
  char* out = OnDevice(bench.bytes());
  ReadVariants<1>(bench, memory.mapped(), reinterpret_cast<unsigned*>(out));
  ReadVariants<2>(bench, memory.mapped(), reinterpret_cast<unsigned*>(out));
  ReadVariants<4>(bench, memory.mapped(), reinterpret_cast<unsigned*>(out));
  auto* rows = reinterpret_cast<int64_t*>(OnDevice(bench.bytes() / 256 * 8));
  for (int64_t row_bytes : {256, 4096, 65536}) {
    const int64_t count = bench.bytes() / 16 / row_bytes;
    const char* what = "random rows of host memory by a kernel";
    const std::vector<int> blocks = {32, 64, 4 * bench.multiprocessors()};
    RowVariants<1>(bench, memory.mapped(), what, row_bytes, rows, count, out, blocks, 1);
    RowVariants<4>(bench, memory.mapped(), what, row_bytes, rows, count, out, blocks, 1);
  }
  for (int64_t piece : {int64_t{4096}, int64_t{65536}, bench.bytes() / 4}) {
    const int64_t count = std::min(bench.bytes() / piece, int64_t{1024});
    const auto copy = [&](cudaMemcpyKind kind) {
      return bench.Us([&] {
        for (int64_t i = 0; i < count; ++i) {
          char *device = out + i * piece, *host = static_cast<char*>(memory.host()) + i * piece;
          const bool is_up = kind == cudaMemcpyHostToDevice;
          CHECK(cudaMemcpyAsync(is_up ? device : host, is_up ? host : device,
                                static_cast<size_t>(piece), kind, bench.stream()));
        }
      });
    };
    char variant[80];
    std::snprintf(variant, sizeof variant, "%lld pieces of %lld B", static_cast<long long>(count),
                  static_cast<long long>(piece));
    bench.Report("copy engine, host to device", variant, copy(cudaMemcpyHostToDevice),
                 count * piece);
    bench.Report("copy engine, device to host", variant, copy(cudaMemcpyDeviceToHost),
                 count * piece);
  }
  CHECK(cudaFree(out));
  CHECK(cudaFree(rows));
}

void Latency(Bench& bench) {
  bench.Report("launch", "one of 1,000 empty kernels",
               bench.Us([&] { Empty<<<1, 32, 0, bench.stream()>>>(); }, 1000));
  std::vector<double> waits;
  for (int run = 0; run < 200; ++run) {
    const auto begin = std::chrono::steady_clock::now();
    Empty<<<1, 32, 0, bench.stream()>>>();
    CHECK(cudaStreamSynchronize(bench.stream()));
    waits.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
            .count());
  }
  std::nth_element(waits.begin(), waits.begin() + 100, waits.end());
  bench.Report("launch", "one empty kernel and the wait for it, of the host's clock", waits[100]);
  char* memory = OnDevice(int64_t{1} << 20);
  const auto graph_of = [&](int nodes, int kind) {
    cudaGraph_t graph;
    cudaGraphExec_t run;
    CHECK(cudaStreamBeginCapture(bench.stream(), cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < nodes; ++i) {
      if (kind == 0) Empty<<<1, 32, 0, bench.stream()>>>();
      if (kind == 1)
        Empty<<<static_cast<unsigned>(bench.multiprocessors()), 256, 0, bench.stream()>>>();
      if (kind == 2) CHECK(cudaMemsetAsync(memory, 0, 1024, bench.stream()));
      if (kind == 3)
        CHECK(cudaMemcpyAsync(memory, memory + 65536, 1024, cudaMemcpyDeviceToDevice,
                              bench.stream()));
    }
    CHECK(cudaStreamEndCapture(bench.stream(), &graph));
    CHECK(cudaGraphInstantiate(&run, graph, 0));
    CHECK(cudaGraphDestroy(graph));
    const double us = bench.Us([&] { CHECK(cudaGraphLaunch(run, bench.stream())); }, 50);
    CHECK(cudaGraphExecDestroy(run));
    return us;
  };
  const char* names[] = {"empty kernel, 1 block", "empty kernel, a block an SM", "memset of 1 KiB",
                         "device copy of 1 KiB"};
  for (int kind = 0; kind < 4; ++kind) {
    const double few = graph_of(8, kind), many = graph_of(108, kind);
    bench.Report("node of a graph", names[kind], (many - few) / 100);
    if (kind == 0) bench.Report("graph", "of 8 empty kernels", few);
  }
  auto* last = reinterpret_cast<int64_t*>(memory);
  const int64_t most = int64_t{1} << 26, steps = 2000;  // 512 MiB: more than any L2
  auto* next = reinterpret_cast<int64_t*>(OnDevice(most * 8));
  for (int64_t count : {int64_t{1} << 10, int64_t{1} << 17, most}) {
    FillCycle<<<256, kThreads, 0, bench.stream()>>>(next, count, count / 2 + 4097);
    CHECK(cudaMemsetAsync(last, 0, 8, bench.stream()));
    char variant[80];
    std::snprintf(variant, sizeof variant, "in %lld KiB of device memory",
                  static_cast<long long>(count * 8 >> 10));
    bench.Report("dependent load", variant,
                 bench.Us([&] { Chase<<<1, 1, 0, bench.stream()>>>(next, steps, last); }) / steps);
  }
  CHECK(cudaFree(next));
  CHECK(cudaFree(memory));
}

int Attribute(cudaDeviceAttr attribute) {
  int value = 0;
  CHECK(cudaDeviceGetAttribute(&value, attribute, 0));
  return value;
}

void Facts(const Bench& bench) {
  int driver = 0, runtime = 0;
  CHECK(cudaDriverGetVersion(&driver));
  CHECK(cudaRuntimeGetVersion(&runtime));
  const cudaDeviceProp& facts = bench.facts();
  std::printf(
      "{\"device\": \"%s\", \"capability\": \"%d.%d\", \"multiprocessors\": %d, \"memory_bytes\": "
      "%zu, "
      "\"l2_bytes\": %d, \"driver\": %d, \"runtime\": %d, \"copy_engines\": %d, "
      "\"host_pointer_of_registered\": %d, \"pageable_access\": %d, \"register_read_only\": %d}\n",
      facts.name, facts.major, facts.minor, facts.multiProcessorCount, facts.totalGlobalMem,
      facts.l2CacheSize, driver, runtime, facts.asyncEngineCount,
      Attribute(cudaDevAttrCanUseHostPointerForRegisteredMem),
      Attribute(cudaDevAttrPageableMemoryAccess),
      Attribute(cudaDevAttrHostRegisterReadOnlySupported));
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    std::printf("{\"error\": \"no CUDA device: %s\"}\n", cudaGetErrorString(error));
    return 2;
  }
  Bench bench(count > 1 && std::strcmp(arguments[1], "--quick") == 0);
  Facts(bench);
  Latency(bench);
  Device(bench);
  Host(bench);
  return 0;
}
