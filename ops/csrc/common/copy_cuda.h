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

inline constexpr int kInFlight = 4;  // loads of a lane under way at once

// Both aligned to 16 bytes. The rows are read once, so they are not kept in the caches.
__device__ inline void CopyAligned(const uint4* __restrict__ from, uint4* __restrict__ to,
                                   int64_t count, Lane lane) {
  int64_t i = lane.index;
  for (; i + (kInFlight - 1) * lane.team < count; i += kInFlight * lane.team) {
    uint4 parts[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) parts[k] = __ldcs(from + i + k * lane.team);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) to[i + k * lane.team] = parts[k];
  }
  for (; i < count; i += lane.team) to[i] = __ldcs(from + i);
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
#pragma unroll 2
  for (int64_t i = lane.index; i < count; i += lane.team)
    to[i] = Join<kWords>(from[i], from[i + 1], bits);
}

// `end`: of the memory that `from` points into. Nothing after it is read; bytes before `from`, down
// to a multiple of 16, may be read, because allocations begin at such addresses.
__device__ inline void CopyBytes(const char* from, const char* end, char* to, int64_t bytes,
                                 Lane lane) {
  const int64_t head = Min<int64_t>(bytes, (16 - (reinterpret_cast<uintptr_t>(to) & 15)) & 15);
  for (int64_t i = lane.index; i < head; i += lane.team) to[i] = from[i];
  from += head, to += head, bytes -= head;
  const auto offset = static_cast<unsigned>(reinterpret_cast<uintptr_t>(from) & 15);
  auto* target = reinterpret_cast<uint4*>(to);
  const auto* source = reinterpret_cast<const uint4*>(from - offset);
  const unsigned bits = (offset & 3) * 8;
  int64_t vectors = bytes >> 4;
  if (offset != 0) vectors = Clamp<int64_t>(((end - from + offset) >> 4) - 1, 0, vectors);
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
  for (int64_t i = (vectors << 4) + lane.index; i < bytes; i += lane.team) to[i] = from[i];
}

}  // namespace gear::cuda
