// A hash table, in scratch or shared memory, that finds, of updates of the same item, the last one.
#pragma once
#include "common/launch_cuda.h"
#include "common/permutation.h"

namespace gear::cuda {

// Open addressing: keys[h] = item + 1 or 0, last[h] = position of the item's last update + 1 or 0.
struct Table {
  unsigned long long* keys;
  unsigned long long* last;
  uint64_t mask;

  // The place of an item; claims a free place if the item has none yet.
  __device__ uint64_t Claim(int64_t item) const {
    const auto key = static_cast<unsigned long long>(item) + 1;
    uint64_t at = Mix(key) & mask;
    for (;; at = (at + 1) & mask) {
      const unsigned long long found = atomicCAS(&keys[at], 0ull, key);
      if (found == 0 || found == key) return at;
    }
  }

  // Makes update i the last of its item, unless a later one already is.
  __device__ void Put(int64_t item, int64_t i) const {
    atomicMax(&last[Claim(item)], static_cast<unsigned long long>(i) + 1);
  }

  // Whether update i is the last of its item; after a launch or a barrier before which all were
  // put.
  __device__ bool IsLast(int64_t item, int64_t i) const {
    const auto key = static_cast<unsigned long long>(item) + 1;
    uint64_t at = Mix(key) & mask;
    while (keys[at] != key) at = (at + 1) & mask;
    return last[at] == static_cast<unsigned long long>(i) + 1;
  }
};

// At most half of the table is used.
constexpr int64_t TableSize(int64_t count) {
  int64_t size = 2;
  while (size < 2 * count) size *= 2;
  return size;
}

constexpr int64_t TableWords(int64_t count) { return 2 * TableSize(count); }

// An empty table in `TableWords(count)` words.
inline Table MakeTable(int64_t* words, int64_t count, void* stream) {
  const int64_t size = TableSize(count);
  auto* keys = reinterpret_cast<unsigned long long*>(words);
  Check(
      cudaMemsetAsync(words, 0, static_cast<size_t>(2 * size) * sizeof(int64_t), AsStream(stream)),
      "cudaMemsetAsync");
  return {keys, keys + size, static_cast<uint64_t>(size) - 1};
}

}  // namespace gear::cuda
