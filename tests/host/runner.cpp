// Kernels with the faults that the runner of cuda_runtime.h shows. Arguments: the name of one.
#include "cuda_runtime.h"

#include <cstdio>
#include <string>

namespace {

// Blocks that take numbers in their own order.
std::string Order() {
  std::string order;
  for (int launch = 0; launch < 2; ++launch) {
    gear_host::Launch(4, 1, [&] { order += std::to_string(blockIdx.x); });
    order += ' ';
  }
  return order;
}

// Each block counts in shared memory that it has not cleared.
std::string Uncleared() {
  uint32_t last = 0;
  gear_host::Launch(3, 1, [&] {
    __shared__ uint32_t count;
    gear_host::Share(count);
    last = ++count;
  });
  return std::to_string(last - 0xA5A5A5A5u);
}

std::string Misaligned() {
  alignas(16) char bytes[64] = {};
  uint32_t read = 0;
  const char* from = bytes + 4;
  gear_host::Launch(1, 1, [&] { read = reinterpret_cast<const uint4*>(from)->x; });
  return std::to_string(read);
}

}  // namespace

int main(int, char** arguments) {
  const std::string which = arguments[1];
  try {
    const std::string found = which == "order"       ? Order()
                              : which == "uncleared" ? Uncleared()
                                                     : Misaligned();
    std::puts(found.c_str());
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
}
