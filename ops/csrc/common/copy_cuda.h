// Copies bytes by a team of lanes, 16 bytes a lane at any alignment of source and target.
#pragma once
#include <cuda_runtime.h>

#include "common/launch_cuda.h"

namespace gear::cuda {

// Which lane of its team a thread is.
struct Lane {
  int index, team;
};

inline constexpr int kLine = 128, kVectorBytes = 16;  // bytes of a line of the caches, of a vector

inline constexpr int64_t kMostVectors = 0x7FFFFFFF - 4096;  // of a copy, so that an index is an int

// Lanes of a team that copies so many bytes, `each` a lane.
GEAR_HOST_DEVICE int TeamOf(int64_t bytes, int64_t each, int most) {
  int team = 4;
  while (team < most && team * each < bytes) team *= 2;
  return team;
}

// Lanes of a team that has the loads of all of a copy under way at once: four vectors a lane, in
// lines that the first one does not begin. With half a line or less, four lanes do; else as many at
// least as a line has vectors.
GEAR_HOST_DEVICE int TeamOfCopy(int64_t bytes, int most) {
  const int team = TeamOf(bytes + kLine - kVectorBytes, 4 * kVectorBytes, most);
  return bytes <= kLine / 2 ? team : Max(team, kLine / kVectorBytes);
}

// Copies `count` items by `load` and `store`, kInFlight of each lane at once: all their loads are
// issued before the first store, which would wait for its own load and so hold back the others.
// Items that do not exist are skipped one by one, so a lane with two items has both loads under
// way. `lead`: items that lanes leave out in front of the first one.
template <int kInFlight, typename Load, typename Store>
__device__ void CopyItems(int count, int lead, Lane lane, const Load& load, const Store& store) {
  const auto is_item = [&](int i) {  // neither in front of the first one nor after the last
    return static_cast<unsigned>(i) < static_cast<unsigned>(count);
  };
  for (int i = lane.index - lead; i < count; i += kInFlight * lane.team) {
    decltype(load(i)) parts[kInFlight] = {};
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (is_item(i + k * lane.team)) parts[k] = load(i + k * lane.team);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k)
      if (is_item(i + k * lane.team)) store(i + k * lane.team, parts[k]);
  }
}

// Vectors of a line in front of an address. Lanes leave them out, so that eight neighbouring ones
// read one line: over PCIe each line is then one request, which has the least overhead a byte.
// Source: Min et al., "EMOGI: efficient memory-access for out-of-memory graph-traversal in GPUs",
// VLDB 2021.
__device__ inline int LeadOf(const uint4* from) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(from) & (kLine - 1)) / kVectorBytes;
}

// Both aligned to 16 bytes. The rows are read once, so they are not kept in the caches.
__device__ inline void CopyAligned(const uint4* __restrict__ from, uint4* __restrict__ to,
                                   int count, Lane lane) {
  CopyItems<4>(
      count, LeadOf(from), lane, [&](int i) { return __ldcs(from + i); },
      [&](int i, uint4 part) { to[i] = part; });
}

// The 16 bytes that begin `offset` bytes into two neighbouring vectors. The offset is known only at
// run time, so that teams of a warp whose sources lie differently do not take turns.
__device__ inline uint4 JoinAt(uint4 low, uint4 high, unsigned offset) {
  if (offset & 8) {
    low = {low.z, low.w, high.x, high.y};
    high = {high.z, high.w, 0, 0};
  }
  if (offset & 4) {
    low = {low.y, low.z, low.w, high.x};
    high.x = high.y;
  }
  const unsigned bits = (offset & 3) * 8;
  return {__funnelshift_r(low.x, low.y, bits), __funnelshift_r(low.y, low.z, bits),
          __funnelshift_r(low.z, low.w, bits), __funnelshift_r(low.w, high.x, bits)};
}

// The target is aligned to 16 bytes, the source lies `offset` bytes after `from`. Whole vectors are
// read, where they are shifted one more than are written.
__device__ inline void CopyShifted(const uint4* __restrict__ from, unsigned offset,
                                   uint4* __restrict__ to, int count, Lane lane) {
  struct Pair {
    uint4 low, high;
  };
  CopyItems<2>(
      count, LeadOf(from), lane,
      [&](int i) { return Pair{__ldcs(from + i), offset != 0 ? from[i + 1] : uint4{}}; },
      [&](int i, Pair pair) { to[i] = JoinAt(pair.low, pair.high, offset); });
}

// `end`: of the memory that `from` points into. Nothing after it is read; bytes before `from`, down
// to a multiple of 16, may be read, because allocations begin at such addresses. Callers check that
// there are at most kMostVectors.
__device__ inline void CopyBytes(const char* from, const char* end, char* to, int64_t bytes,
                                 Lane lane) {
  // Few words, as of rows of scalars: all of them under way at once, without edges. More than half
  // a line is read by vectors, so that over PCIe a line stays one request.
  const auto odd =
      static_cast<unsigned>(reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                            static_cast<uintptr_t>(bytes)) &
      3;
  if (odd == 0 && bytes <= kLine / 2) {
    const auto* source = reinterpret_cast<const uint32_t*>(from);
    auto* target = reinterpret_cast<uint32_t*>(to);
    CopyItems<4>(
        static_cast<int>(bytes) / 4, 0, lane, [&](int i) { return source[i]; },
        [&](int i, uint32_t word) { target[i] = word; });
    return;
  }
  const int64_t head = Min<int64_t>(bytes, (16 - (reinterpret_cast<uintptr_t>(to) & 15)) & 15);
  const char* begin = from + head;
  const auto offset = static_cast<unsigned>(reinterpret_cast<uintptr_t>(begin) & 15);
  auto* target = reinterpret_cast<uint4*>(to + head);
  const auto* source = reinterpret_cast<const uint4*>(begin - offset);
  int64_t whole = (bytes - head) >> 4;
  if (offset != 0) whole = Clamp<int64_t>(((end - begin + offset) >> 4) - 1, 0, whole);
  const auto vectors = static_cast<int>(whole);
  // The bytes before and after the vectors, at most 46. Each lane's first one is under way with the
  // vectors, because a store waits for its load and would hold back the loads after it.
  const auto place = [&](int i) { return i < head ? i : i + (whole << 4); };
  const auto edges = static_cast<int>(bytes - (whole << 4));
  const bool has_edge = lane.index < edges;
  const char edge = has_edge ? from[place(lane.index)] : char{0};
  if (offset == 0 && lane.team >= kWarp)
    CopyAligned(source, target, vectors, lane);
  else
    CopyShifted(source, offset, target, vectors, lane);
  if (has_edge) to[place(lane.index)] = edge;
  CopyItems<4>(  // of few lanes
      edges, -lane.team, lane, [&](int i) { return from[place(i)]; },
      [&](int i, char byte) { to[place(i)] = byte; });
}

}  // namespace gear::cuda
