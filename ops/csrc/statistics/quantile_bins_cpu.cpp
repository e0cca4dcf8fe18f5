// Quantiles of a column in memory, by bins: values are counted coarsely, then those of one bin.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "common/convert.h"
#include "statistics/statistics.h"
#include "statistics/value_keys.h"

namespace gear::cpu {
namespace {

constexpr int64_t kTileRows = 256;  // rows whose elements of a group stay in the nearest cache
constexpr int64_t kGroup = 16;      // elements that are counted at a time: a cache line of float32
constexpr int64_t kMostCompared = 1 << 10;  // values that are compared without being counted first
constexpr int64_t kMostCoarse = 1 << 17;    // values for which fewer bins are faster

template <typename T>
class QuantileBins {
 public:
  using Order = OrderOf<T>;
  using Key = typename Order::Key;

  QuantileBins(const ColumnRows& rows, const int64_t* runs, int64_t num_runs, const double* levels,
               int64_t num_levels, double* found)
      : values_(reinterpret_cast<const T*>(rows.values)),
        num_elements_(rows.num_elements),
        runs_(runs),
        num_runs_(num_runs),
        levels_(levels),
        num_levels_(num_levels),
        found_(found) {
    for (int64_t i = 0; i < num_runs; ++i) num_rows_ += runs[2 * i + 1];
    num_bins_ = int64_t{1} << (num_rows_ <= kMostCoarse ? 12 : 16);
  }

  // Finds the values of at most kGroup elements.
  void Find(int64_t first, int64_t count) {
    if (num_rows_ <= kMostCompared)
      Collect(first, count);
    else
      Count(first, count);
  }

 private:
  // Calls visit(element of the group, address of the first value, rows) for tiles of all runs.
  template <typename Visit>
  void EachTile(int64_t first, int64_t count, const Visit& visit) const {
    for (int64_t i = 0; i < num_runs_; ++i) {
      const int64_t end = runs_[2 * i] + runs_[2 * i + 1];
      for (int64_t row = runs_[2 * i]; row < end; row += kTileRows)
        for (int64_t e = 0; e < count; ++e)
          visit(e, values_ + row * num_elements_ + first + e, std::min(kTileRows, end - row));
    }
  }

  // Calls visit(value) for those of a tile.
  template <typename Visit>
  void Each(const T* at, int64_t rows, const Visit& visit) const {
    for (int64_t r = 0; r < rows; ++r) visit(at[r * num_elements_]);
  }

  // The ranks of all levels among n values, each with the next one: [2 * num_levels], ascending as
  // levels are.
  std::vector<int64_t> RanksOf(int64_t n) const {
    std::vector<int64_t> ranks;
    for (int64_t i = 0; i < num_levels_; ++i) {
      const auto low = static_cast<int64_t>(std::floor(static_cast<double>(n - 1) * levels_[i]));
      ranks.push_back(low);
      ranks.push_back(std::min(low + 1, n - 1));
    }
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  void Write(int64_t element, int64_t n, const std::vector<int64_t>& ranks,
             const std::vector<Key>& keys) {
    found_[element] = static_cast<double>(n);
    const auto key_at = [&](int64_t rank) {
      const auto place = std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin();
      return Order::ValueOf(keys[static_cast<size_t>(place)]);
    };
    for (int64_t i = 0; i < num_levels_; ++i) {
      const auto low = static_cast<int64_t>(std::floor(static_cast<double>(n - 1) * levels_[i]));
      found_[(1 + i) * num_elements_ + element] = key_at(low);
      found_[(1 + num_levels_ + i) * num_elements_ + element] = key_at(std::min(low + 1, n - 1));
    }
  }

  void Collect(int64_t first, int64_t count) {
    std::array<std::vector<Key>, kGroup> keys;
    EachTile(first, count, [&](int64_t e, const T* at, int64_t rows) {
      Each(at, rows, [&](T x) {
        if (Order::IsFinite(x)) keys[e].push_back(Order::KeyOf(x));
      });
    });
    for (int64_t e = 0; e < count; ++e) {
      const auto n = static_cast<int64_t>(keys[e].size());
      if (n == 0) continue;
      const std::vector<int64_t> ranks = RanksOf(n);
      Select(keys[e].data(), 0, n, ranks.data(), ranks.data() + ranks.size());
      std::vector<Key> selected;
      for (const int64_t rank : ranks) selected.push_back(keys[e][rank]);
      Write(first + e, n, ranks, selected);
    }
  }

  // Counts the keys of each element in bins of equal width, then compares those that share the bin
  // of a rank.
  void Count(int64_t first, int64_t count) {
    const int64_t num_bins = num_bins_;
    std::array<Key, kGroup> least, greatest;
    least.fill(std::numeric_limits<Key>::max());
    greatest.fill(0);
    EachTile(first, count, [&](int64_t e, const T* at, int64_t rows) {
      Key low = least[e], high = greatest[e];
      Each(at, rows, [&](T x) {
        const Key key = Order::KeyOf(x);
        const bool finite = Order::IsFinite(x);
        low = finite && key < low ? key : low;
        high = finite && key > high ? key : high;
      });
      least[e] = low;
      greatest[e] = high;
    });
    std::array<int, kGroup> shift{};
    for (int64_t e = 0; e < count; ++e)
      while (least[e] <= greatest[e] && ((greatest[e] - least[e]) >> shift[e]) >= num_bins)
        ++shift[e];
    // The last bin takes what is not finite: a key outside of [least, greatest].
    bins_.assign(static_cast<size_t>(count * (num_bins + 1)), 0);
    const auto bin_of = [&](int64_t e, T x) {
      const auto away = static_cast<Key>(Order::KeyOf(x) - least[e]);
      const bool is_inside = away <= static_cast<Key>(greatest[e] - least[e]);
      return is_inside ? static_cast<int64_t>(away >> shift[e]) : num_bins;
    };
    EachTile(first, count, [&](int64_t e, const T* at, int64_t rows) {
      uint32_t* bins = bins_.data() + e * (num_bins + 1);
      Each(at, rows, [&](T x) { ++bins[bin_of(e, x)]; });
    });
    std::array<std::vector<int64_t>, kGroup> ranks;
    std::array<WantedBins, kGroup> wanted;
    std::array<std::vector<Key>, kGroup> keys;  // of the wanted bins
    std::array<int64_t, kGroup> finite{};
    std::array<bool, kGroup> is_compared{};  // a bin has several keys
    for (int64_t e = 0; e < count; ++e) {
      if (least[e] > greatest[e]) continue;  // no finite value
      const uint32_t* bins = bins_.data() + e * (num_bins + 1);
      finite[e] = std::accumulate(bins, bins + num_bins, int64_t{0});
      ranks[e] = RanksOf(finite[e]);
      wanted[e] = FindBins(bins, num_bins, ranks[e].data(), static_cast<int64_t>(ranks[e].size()));
      // What is not finite is in the last bin.
      wanted[e].is_wanted.push_back(0);
      is_compared[e] = shift[e] > 0;
      if (is_compared[e]) keys[e].reserve(static_cast<size_t>(wanted[e].num_keys));
    }
    if (std::find(is_compared.begin(), is_compared.end(), true) != is_compared.end())
      EachTile(first, count, [&](int64_t e, const T* at, int64_t rows) {
        if (!is_compared[e]) return;
        const uint8_t* is_wanted = wanted[e].is_wanted.data();
        Each(at, rows, [&](T x) {
          if (is_wanted[bin_of(e, x)] != 0) keys[e].push_back(Order::KeyOf(x));
        });
      });
    for (int64_t e = 0; e < count; ++e) {
      if (finite[e] == 0) continue;
      const std::vector<int64_t>& places = wanted[e].places;
      if (is_compared[e])
        Select(keys[e].data(), 0, wanted[e].num_keys, places.data(), places.data() + places.size());
      std::vector<Key> selected;
      for (size_t i = 0; i < places.size(); ++i)
        selected.push_back(is_compared[e] ? keys[e][places[i]]
                                          : static_cast<Key>(least[e] + wanted[e].bins[i]));
      Write(first + e, finite[e], ranks[e], selected);
    }
  }

  const T* values_;
  int64_t num_elements_;
  const int64_t* runs_;
  int64_t num_runs_, num_rows_ = 0, num_bins_ = 0;
  const double* levels_;
  int64_t num_levels_;
  double* found_;
  std::vector<uint32_t> bins_;
};

}  // namespace

void FindQuantilesInBins(const ColumnRows& rows, int64_t first, int64_t count, const int64_t* runs,
                         int64_t num_runs, const double* levels, int64_t num_levels,
                         double* found) {
  WithType(rows.dtype, [&](auto element) {
    QuantileBins<decltype(element)> bins(rows, runs, num_runs, levels, num_levels, found);
    for (int64_t e = first; e < first + count; e += kGroup)
      bins.Find(e, std::min(kGroup, first + count - e));
  });
}

}  // namespace gear::cpu
