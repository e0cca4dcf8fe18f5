// Work in blocks whose cache misses overlap.
#pragma once
#include <cstdint>

#include "common/tree.h"

namespace gear::cpu {

// Draws or updates that wait for memory together.
inline constexpr int64_t kBlock = 64;

// The children of a node: whole cache lines.
inline void PrefetchNode(const uint64_t* children) {
  constexpr int kLineWords = 8;
  for (int i = 0; i < kFanOut; i += kLineWords) __builtin_prefetch(children + i);
}

// Starts the load of records[index]. The index may be wrong: nothing is read, and the address is
// computed without a pointer that leaves its array.
template <typename Record>
void Prefetch(const Record* records, int64_t index) {
  const auto at =
      reinterpret_cast<uintptr_t>(records) + static_cast<uintptr_t>(index) * sizeof(Record);
  __builtin_prefetch(reinterpret_cast<const void*>(at));
}

}  // namespace gear::cpu
