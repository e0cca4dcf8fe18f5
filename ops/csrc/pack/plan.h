// The packing plan: which trajectory goes into which micro batch of which rank.
#pragma once
#include <cstdint>

namespace gear::cpu {

struct PackBudget {
  int64_t tokens;             // of a pack at most; no trajectory has more
  int64_t linear, quadratic;  // a trajectory of l tokens costs linear * l + quadratic * l * l
  int64_t trajectories;       // of a pack at most
};

inline constexpr int64_t kMostPackTokens = (int64_t{1} << 31) - 1;  // cu_seqlens are int32
inline constexpr int64_t kMostPackWidth = int64_t{1} << 20;

// Sets the micro step and the rank of each trajectory. Every rank of `width` has the same number of
// packs, which is returned; none is empty if there are as many trajectories as packs. All costs
// together must be below 2^62.
// O(n log n) for each number of packs that is tried, and O(packs) of the search that balances.
int64_t PlanPacks(const int64_t* lengths, int64_t count, const PackBudget& budget, int64_t width,
                  int64_t* micro_step, int64_t* rank);

}  // namespace gear::cpu
