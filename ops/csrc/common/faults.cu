// The word of the faults that end kernels (common/faults_cuda.h), on the host.
#include <atomic>

#include "common/faults_cuda.h"
#include "common/found_fault_cuda.h"
#include "common/launch_cuda.h"

namespace gear::cuda {
namespace {

struct Words {
  const char *op, *tensor, *rule, *remedy;
};

constexpr Words kWords[] = {{"", "", "", ""},
#define GEAR_FAULT_WORDS(name, op, tensor, rule, remedy) {op, tensor, rule, remedy},
                            GEAR_FAULTS(GEAR_FAULT_WORDS)
#undef GEAR_FAULT_WORDS
};
static_assert(sizeof kWords / sizeof kWords[0] == kNumFaults, "words for each fault");

std::atomic<volatile uint64_t*> allocated{nullptr};

uint64_t* Allocate() {
  // A thread that captures a graph may allocate only in this mode.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  Check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  void* memory = nullptr;
  // Portable: kernels of all devices have it at this address.
  const cudaError_t error =
      cudaHostAlloc(&memory, sizeof(uint64_t), cudaHostAllocMapped | cudaHostAllocPortable);
  Check(cudaThreadExchangeStreamCaptureMode(&mode), "cudaThreadExchangeStreamCaptureMode");
  Check(error, "cudaHostAlloc");
  auto* word = static_cast<uint64_t*>(memory);
  *word = kNoFault;
  allocated.store(word, std::memory_order_release);  // pairs with the load in FindFault
  return word;
}

}  // namespace

Faults FaultsOfProcess() {
  static uint64_t* const word = Allocate();
  return {word};
}

std::optional<FoundFault> FindFault() {
  const volatile uint64_t* word = allocated.load(std::memory_order_acquire);
  const uint64_t left = word == nullptr ? uint64_t{kNoFault} : *word;
  const uint64_t fault = left & ((1u << kFaultBits) - 1);
  if (fault == kNoFault || fault >= kNumFaults) return std::nullopt;
  const Words& words = kWords[fault];
  const int64_t index = static_cast<int64_t>(left) >> kFaultBits;
  return FoundFault{std::string(words.op) + ": " + words.tensor + "[" + std::to_string(index) + "]",
                    words.rule,
                    std::string(words.remedy) +
                        ". The CUDA context of this process is lost: start the process again"};
}

}  // namespace gear::cuda
