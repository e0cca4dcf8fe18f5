// Prefetches of tree nodes, records and rows, for work in blocks whose cache misses overlap.
#pragma once
#include <cstdint>

#include "common/host_device.h"
#include "common/tree.h"

namespace gear::cpu {

// Draws or updates that wait for memory together.
inline constexpr int64_t kBlock = 64;

// The children of a node: whole cache lines.
inline void PrefetchNode(const uint64_t* children) {
  constexpr int kLineWords = 8;
  for (int i = 0; i < kFanOut; i += kLineWords) __builtin_prefetch(children + i);
}

// The address of a row, computed without a pointer that leaves its array: the row may lie outside
// as long as it is not read.
inline const char* RowAt(const void* rows, int64_t first_row, int64_t step, int64_t row_bytes) {
  const uint64_t row = static_cast<uint64_t>(first_row) + static_cast<uint64_t>(step);
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(rows) +
                                       row * static_cast<uint64_t>(row_bytes));
}

// Starts the load of records[index]. The index may be wrong: nothing is read.
template <typename Record>
void Prefetch(const Record* records, int64_t index) {
  __builtin_prefetch(RowAt(records, index, 0, sizeof(Record)));
}

// Starts the load of the first bytes at an address, which may be wrong: the hardware's own
// prefetcher fetches what follows.
inline void PrefetchBytes(const char* data, int64_t bytes) {
  constexpr int64_t kLineBytes = 64, kMostPrefetch = 1024;
  const auto at = reinterpret_cast<uintptr_t>(data);
  const auto end = static_cast<uintptr_t>(Min(bytes, kMostPrefetch));
  for (uintptr_t i = 0; i < end; i += kLineBytes)
    __builtin_prefetch(reinterpret_cast<const void*>(at + i), 0, 0);
}

}  // namespace gear::cpu
