// A hash table, in scratch or shared memory, that finds, of updates of the same item, the last one.
#pragma once
#include "common/launch_cuda.h"
#include "common/slot.h"

namespace gear::cuda {

// Open addressing: keys[h] = item + 1 or 0, last[h] = position of the item's last update + 1 or 0.
// Items and positions are below 2^31 (kMostIndices).
struct Table {
  uint32_t* keys;
  uint32_t* last;
  uint32_t mask;

  // Where the search for a key begins. Source: Knuth, TAOCP vol. 3, 6.4, multiplicative hashing.
  __device__ uint32_t Begin(uint32_t key) const {
    const uint32_t product = key * 0x9E3779B1u;
    return (product ^ (product >> 15)) & mask;
  }

  // The place of an item; claims a free place if the item has none yet.
  __device__ uint32_t Claim(int64_t item) const {
    const uint32_t key = static_cast<uint32_t>(item) + 1;
    for (uint32_t at = Begin(key);; at = (at + 1) & mask) {
      const uint32_t found = atomicCAS(&keys[at], 0u, key);
      if (found == 0 || found == key) return at;
    }
  }

  // Makes update i the last of its item, unless a later one already is.
  __device__ void Put(int64_t item, int64_t i) const {
    atomicMax(&last[Claim(item)], static_cast<uint32_t>(i) + 1);
  }

  // Whether update i is the last of its item; after a launch or a barrier before which all were
  // put.
  __device__ bool IsLast(int64_t item, int64_t i) const {
    const uint32_t key = static_cast<uint32_t>(item) + 1;
    uint32_t at = Begin(key);
    while (keys[at] != key) at = (at + 1) & mask;
    return last[at] == static_cast<uint32_t>(i) + 1;
  }
};

// At most half of the table is used.
constexpr int64_t TableSize(int64_t count) {
  int64_t size = 2;
  while (size < 2 * count) size *= 2;
  return size;
}

// Words of 64 bits: keys and positions have a half each.
constexpr int64_t TableWords(int64_t count) { return TableSize(count); }

// An empty table in `TableWords(count)` words.
inline Table MakeTable(int64_t* words, int64_t count, void* stream) {
  const int64_t size = TableSize(count);
  auto* keys = reinterpret_cast<uint32_t*>(words);
  Check(cudaMemsetAsync(words, 0, static_cast<size_t>(size) * sizeof(int64_t), AsStream(stream)),
        "cudaMemsetAsync");
  return {keys, keys + size, static_cast<uint32_t>(size - 1)};
}

}  // namespace gear::cuda
