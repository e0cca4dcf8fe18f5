// Keys: unsigned integers in the order of the values of a type.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/convert.h"

namespace gear::cpu {

// The unsigned integers in the order of a type's values. Those of infinities and NaN are outside of
// the finite ones.
template <typename T>
struct OrderOf {
  using Key = std::conditional_t<sizeof(T) <= 4, uint32_t, uint64_t>;
  static constexpr bool kIsFloat = std::is_class_v<T> || std::is_floating_point_v<T>;
  using Bits = std::conditional_t<
      sizeof(T) == 1, uint8_t,
      std::conditional_t<sizeof(T) == 2, uint16_t,
                         std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;
  static constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(T) - 1));
  static constexpr bool kIsSigned = kIsFloat || std::is_signed_v<T>;

  static Key KeyOf(T x) {
    Bits bits = BitCast<Bits>(x);
    if constexpr (kIsFloat)
      bits = static_cast<Bits>((bits & kSign) != 0 ? ~bits : (bits | kSign));
    else if constexpr (kIsSigned)
      bits = static_cast<Bits>(bits ^ kSign);
    return bits;
  }

  static double ValueOf(Key key) {
    auto bits = static_cast<Bits>(key);
    if constexpr (kIsFloat)
      bits = static_cast<Bits>((bits & kSign) != 0 ? (bits & ~kSign) : ~bits);
    else if constexpr (kIsSigned)
      bits = static_cast<Bits>(bits ^ kSign);
    return Load<double>(BitCast<T>(bits));
  }

  static bool IsFinite(T x) {
    if constexpr (!kIsFloat) return true;
    const double value = Load<double>(x);
    return value - value == 0;
  }
};

// Moves the keys of ascending ranks to their places, as if the keys [begin, end) were sorted.
// ranks: places among all keys, those of [first, last) lie in [begin, end).
template <typename Key>
void Select(Key* keys, int64_t begin, int64_t end, const int64_t* first, const int64_t* last) {
  if (first == last || end - begin < 2) return;
  const int64_t* middle = first + (last - first) / 2;
  std::nth_element(keys + begin, keys + *middle, keys + end);
  const int64_t* below = middle;
  while (below > first && *(below - 1) == *middle) --below;
  const int64_t* above = middle;
  while (above < last && *above == *middle) ++above;
  Select(keys, begin, *middle, first, below);
  Select(keys, *middle + 1, end, above, last);
}

// Where wanted ranks lie among keys that were counted in ascending bins. For counts [2, 0, 3] and
// the rank 4: is_wanted [0, 0, 1], bin 2, place 2 of the 3 keys in wanted bins.
struct WantedBins {
  std::vector<uint8_t> is_wanted;  // [bins]
  std::vector<int64_t> bins;       // of each rank
  std::vector<int64_t> places;     // of each rank, among the sorted keys of the wanted bins
  int64_t num_keys = 0;            // in the wanted bins
};

// ranks: ascending, each below the sum of the counts.
template <typename Count>
WantedBins FindBins(const Count* counts, int64_t num_bins, const int64_t* ranks,
                    int64_t num_ranks) {
  WantedBins wanted;
  wanted.is_wanted.assign(static_cast<size_t>(num_bins), 0);
  int64_t before = 0, next = 0;
  for (int64_t bin = 0; bin < num_bins && next < num_ranks; ++bin) {
    const int64_t until = before + counts[bin];
    if (ranks[next] < until) {
      wanted.is_wanted[bin] = 1;
      for (; next < num_ranks && ranks[next] < until; ++next) {
        wanted.bins.push_back(bin);
        wanted.places.push_back(wanted.num_keys + ranks[next] - before);
      }
      wanted.num_keys += counts[bin];
    }
    before = until;
  }
  return wanted;
}

}  // namespace gear::cpu
