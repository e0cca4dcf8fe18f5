// Copies bytes by a team of lanes, 16 bytes a lane at any alignment of source and target.
#pragma once
#include <cuda_runtime.h>

#include "common/host_device.h"

namespace gear::cuda {

// Which lane of its team a thread is.
struct Lane {
  int index, team;
};

// Lanes of a team that copies so many bytes: about 32 each.
GEAR_HOST_DEVICE int TeamOf(int64_t bytes, int most) {
  int team = 4;
  while (team < most && team * 32 < bytes) team *= 2;
  return team;
}

// Copies `count` items by `load` and `store`, kInFlight of each lane at once: all their loads are
// issued before the first store, which would wait for its own load and so hold back the others.
// Items that do not exist are skipped one by one, so a lane with two items has both loads under
// way.
template <int kInFlight, typename Load, typename Store>
__device__ void CopyItems(int64_t count, Lane lane, const Load& load, const Store& store) {
  for (int64_t i = lane.index; i < count; i += kInFlight * lane.team) {
    decltype(load(i)) parts[kInFlight] = {};
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (i + k * lane.team < count) parts[k] = load(i + k * lane.team);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (i + k * lane.team < count) store(i + k * lane.team, parts[k]);
  }
}

// Both aligned to 16 bytes. The rows are read once, so they are not kept in the caches.
__device__ inline void CopyAligned(const uint4* __restrict__ from, uint4* __restrict__ to,
                                   int64_t count, Lane lane) {
  CopyItems<4>(
      count, lane, [&](int64_t i) { return __ldcs(from + i); },
      [&](int64_t i, uint4 part) { to[i] = part; });
}

// The 16 bytes that begin `kWords` words and `bits` bits into two neighbouring vectors.
template <int kWords>
__device__ uint4 Join(uint4 low, uint4 high, unsigned bits) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  return {__funnelshift_r(words[kWords], words[kWords + 1], bits),
          __funnelshift_r(words[kWords + 1], words[kWords + 2], bits),
          __funnelshift_r(words[kWords + 2], words[kWords + 3], bits),
          __funnelshift_r(words[kWords + 3], words[(kWords + 4) % 8], bits)};
}

// The target is aligned to 16 bytes, the source lies `kWords` words and `bits` bits after `from`.
// Whole vectors are read, one more than are written.
template <int kWords>
__device__ void CopyShifted(const uint4* __restrict__ from, unsigned bits, uint4* __restrict__ to,
                            int64_t count, Lane lane) {
  struct Pair {
    uint4 low, high;
  };
  CopyItems<2>(
      count, lane, [&](int64_t i) { return Pair{from[i], from[i + 1]}; },
      [&](int64_t i, Pair pair) { to[i] = Join<kWords>(pair.low, pair.high, bits); });
}

// `end`: of the memory that `from` points into. Nothing after it is read; bytes before `from`, down
// to a multiple of 16, may be read, because allocations begin at such addresses.
__device__ inline void CopyBytes(const char* from, const char* end, char* to, int64_t bytes,
                                 Lane lane) {
  const int64_t head = Min<int64_t>(bytes, (16 - (reinterpret_cast<uintptr_t>(to) & 15)) & 15);
  const char* begin = from + head;
  const auto offset = static_cast<unsigned>(reinterpret_cast<uintptr_t>(begin) & 15);
  auto* target = reinterpret_cast<uint4*>(to + head);
  const auto* source = reinterpret_cast<const uint4*>(begin - offset);
  const unsigned bits = (offset & 3) * 8;
  int64_t vectors = (bytes - head) >> 4;
  if (offset != 0) vectors = Clamp<int64_t>(((end - begin + offset) >> 4) - 1, 0, vectors);
  const auto place = [&](int64_t i) { return i < head ? i : i + (vectors << 4); };
  CopyItems<4>(  // the bytes before and after the vectors
      bytes - (vectors << 4), lane, [&](int64_t i) { return from[place(i)]; },
      [&](int64_t i, char byte) { to[place(i)] = byte; });
  if (offset == 0)
    CopyAligned(source, target, vectors, lane);
  else if (offset < 4)
    CopyShifted<0>(source, bits, target, vectors, lane);
  else if (offset < 8)
    CopyShifted<1>(source, bits, target, vectors, lane);
  else if (offset < 12)
    CopyShifted<2>(source, bits, target, vectors, lane);
  else
    CopyShifted<3>(source, bits, target, vectors, lane);
}

}  // namespace gear::cuda
