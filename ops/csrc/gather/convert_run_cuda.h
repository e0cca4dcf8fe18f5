// Converts runs of elements: a team of lanes reads a run by vectors of 16 bytes of any type,
// several of a lane under way at once, and converts them in registers.
#pragma once
#include <cstring>
#include <type_traits>

#include "common/convert.h"
#include "common/copy_cuda.h"
#include "gather/gather.h"

namespace gear::cuda {

inline constexpr int kVector = 16;  // bytes
inline constexpr int kUnits = 3;    // of a lane under way at once: with more, registers are too few

// The vectors in which a run lies, and the units of 16 bytes into which it is divided. The first
// unit begins up to three elements before the run, so that a converted unit is aligned; so units
// need not begin at vectors.
struct Source {
  const uint4* vectors;
  unsigned offset;  // of units in vectors, in bytes
  int first, last;  // vectors [first, last) have bytes of the run
  int whole;        // of them [first, whole) lie in its column; all or all but one
  unsigned rest;    // bytes that the column has of that one
};

// The first bytes of a vector.
__device__ inline uint4 LoadFirst(const uint4* from, unsigned count) {
  uint4 bytes{};
#pragma unroll 1
  for (unsigned i = count; i-- > 0;) {
    bytes.w = __funnelshift_r(bytes.z, bytes.w, 24);
    bytes.z = __funnelshift_r(bytes.y, bytes.z, 24);
    bytes.y = __funnelshift_r(bytes.x, bytes.y, 24);
    bytes.x = bytes.x << 8 | reinterpret_cast<const uint8_t*>(from)[i];
  }
  return bytes;
}

// Vectors without bytes of the run are not read, nor a vector that crosses the end of its column.
// Bytes before the run in its first vector are read, because allocations begin at vectors.
__device__ inline uint4 LoadVector(const Source& source, int i) {
  return i >= source.first && i < source.whole ? __ldcs(source.vectors + i) : uint4{};
}

// Reads the units `unit`, `unit` + `step` and so on. All loads are given out before one is used.
__device__ inline void LoadUnits(const Source& source, int unit, int step, uint4 (&units)[kUnits]) {
  uint4 next[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    units[k] = LoadVector(source, unit + k * step);
    next[k] = source.offset != 0 ? LoadVector(source, unit + k * step + 1) : uint4{};
  }
  if (source.whole < source.last) {
    const uint4 cut = LoadFirst(source.vectors + source.whole, source.rest);
#pragma unroll
    for (int k = 0; k < kUnits; ++k) {
      if (unit + k * step == source.whole) units[k] = cut;
      if (unit + k * step + 1 == source.whole) next[k] = cut;
    }
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k) units[k] = JoinAt(units[k], next[k], source.offset);
}

// Elements that are converted at once, and with one or two stores written.
GEAR_HOST_DEVICE constexpr int GroupOf(int64_t from_bytes) { return from_bytes == 8 ? 2 : 4; }

// How such a group is aligned where it is written.
GEAR_HOST_DEVICE constexpr int64_t AlignmentOf(int64_t from_bytes, int64_t to_bytes) {
  return GroupOf(from_bytes) * to_bytes < kVector ? GroupOf(from_bytes) * to_bytes : kVector;
}

// (x - shift) * gain; shift and gain repeat every `period` elements.
template <typename F, typename T>
struct ConvertedElements {
  using From = F;
  using To = T;
  using C = std::conditional_t<kNeedsDouble<F> || kNeedsDouble<T>, double, float>;
  static constexpr int kGroup = GroupOf(sizeof(F));

  struct alignas(AlignmentOf(sizeof(F), sizeof(T))) Stored {
    T elements[AlignmentOf(sizeof(F), sizeof(T)) / sizeof(T)];
  };
  struct Group {
    Stored stored[kGroup * sizeof(T) / sizeof(Stored)];
  };

  __device__ static T At(const Field& field, const F* from, int64_t element, int64_t scale) {
    return Convert(field, from[element], scale);
  }

  __device__ static T Convert(const Field& field, F from, int64_t scale) {
    if (field.gain == nullptr) return Store<T>(Load<C>(from));
    const double shift = __ldg(static_cast<const double*>(field.shift) + scale);
    const double gain = __ldg(static_cast<const double*>(field.gain) + scale);
    return Store<T>((Load<double>(from) - shift) * gain);
  }

  // Writes a group from element `first` of a run of `count` on, as far as it lies in it.
  __device__ static void Write(const T (&made)[kGroup], T* to, int first, int count) {
    if (first >= 0 && first + kGroup <= count) {
      Group group;
      memcpy(&group, made, sizeof group);
      *reinterpret_cast<Group*>(to + first) = group;
      return;
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i)
      if (first + i >= 0 && first + i < count) to[first + i] = made[i];
  }

  // Converts a unit, whose first element is `first` of the run and has the shift and gain `scale`.
  // One group after the other: the code of all pairs of types stays small.
  __device__ static void Unit(const Field& field, uint4 unit, T* to, int first, int count,
                              int scale) {
#pragma unroll 1
    for (int done = 0; done < static_cast<int>(kVector / sizeof(F)); done += kGroup) {
      F from[kGroup];
      memcpy(from, &unit, sizeof from);
      if (sizeof from == 4) unit = {unit.y, unit.z, unit.w, 0};
      if (sizeof from == 8) unit = {unit.z, unit.w, 0, 0};
      T made[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        made[i] = Convert(field, from[i], scale);
        if (++scale >= field.period) scale = 0;
      }
      Write(made, to, first + done, count);
    }
  }
};

inline constexpr int64_t kMostElements = (int64_t{1} << 31) - 4096;  // of a window

// Where a run of bytes lies in a column that ends at `end`; `lead`: bytes in front of it.
__device__ inline Source SourceOf(const char* from, int64_t bytes, const char* end, int lead) {
  const char* first = from - lead;
  const auto offset = static_cast<unsigned>(reinterpret_cast<uintptr_t>(first) & (kVector - 1));
  const char* vectors = first - offset;
  const int64_t last = (from + bytes - vectors + kVector - 1) / kVector;
  const int64_t whole = Min<int64_t>((end - vectors) / kVector, last);
  return {reinterpret_cast<const uint4*>(vectors),
          offset,
          static_cast<int>(offset + lead) / kVector,
          static_cast<int>(last),
          static_cast<int>(whole),
          static_cast<unsigned>(end - vectors) & (kVector - 1)};
}

// Converts `count` elements. `end`: of the memory in which `from` lies. `write` is called with a
// unit of 16 bytes, which element of the run is its first, and that one's shift and gain.
template <typename Write>
__device__ void ConvertRun(const Field& field, const char* from, const char* end, const char* to,
                           int count, Lane lane, const Write& write) {
  if (count == 0) return;  // then `from` may be invalid
  const int from_bytes = static_cast<int>(SizeOf(field.from)), elements = kVector / from_bytes;
  const int to_bytes = static_cast<int>(field.to_bytes);
  const auto beyond = static_cast<unsigned>(reinterpret_cast<uintptr_t>(to)) &
                      static_cast<unsigned>(AlignmentOf(from_bytes, to_bytes) - 1);
  const int lead = static_cast<int>(beyond) / to_bytes;
  const int units = (lead + count + elements - 1) / elements;
  const Source source = SourceOf(from, int64_t{count} * from_bytes, end, lead * from_bytes);
  const auto period = static_cast<unsigned>(Max<int64_t>(field.period, 1));
  const unsigned step = static_cast<unsigned>(lane.team * elements) % period;
  unsigned scale = (static_cast<unsigned>(lane.index * elements) + period - lead % period) % period;
  for (int unit = lane.index; unit < units; unit += kUnits * lane.team) {
    uint4 parts[kUnits];
    LoadUnits(source, unit, lane.team, parts);
#pragma unroll 1
    for (int at = unit; at < units && at < unit + kUnits * lane.team; at += lane.team) {
      write(parts[0], at * elements - lead, static_cast<int>(scale));
#pragma unroll
      for (int k = 1; k < kUnits; ++k) parts[k - 1] = parts[k];
      scale += step;
      if (scale >= period) scale -= period;
    }
  }
}

}  // namespace gear::cuda
