// The fault that has ended a kernel of this process (common/faults_cuda.h), in words. Needs no
// header of the toolkit.
#pragma once
#include <optional>
#include <string>

namespace gear::cuda {

// A fault in words.
struct FoundFault {
  std::string name, rule, remedy;  // name: "gather_: resolutions[17]"

  std::string Text() const { return "gear: " + name + " " + rule + "; " + remedy; }
};

// What a kernel of this process has left. Neither waits for a device nor touches it.
std::optional<FoundFault> FindFault();

}  // namespace gear::cuda
