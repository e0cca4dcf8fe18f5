// Quantiles of a column in one pass: rows inside the brackets that a sample of it gave are counted.
#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "common/convert.h"
#include "statistics/statistics.h"
#include "statistics/value_keys.h"

namespace gear::cpu {
namespace {

constexpr int64_t kTile = 512;  // rows whose keys of one element stay in the nearest cache

template <typename T>
class BracketCount {
 public:
  using Order = OrderOf<T>;
  using Key = typename Order::Key;

  BracketCount(const ColumnRows& rows, const Brackets& brackets, BracketCounts counts)
      : values_(reinterpret_cast<const T*>(rows.values)),
        num_elements_(rows.num_elements),
        brackets_(brackets),
        counts_(counts) {}

  // Counts the rows of a tile.
  // places: rows from `first` on, [count]; null: they follow each other.
  void Add(int64_t first, const int64_t* places, int64_t count) {
    for (int64_t e = 0; e < num_elements_; ++e) {
      const T* at = values_ + first * num_elements_ + e;
      if (places == nullptr)
        for (int64_t i = 0; i < count; ++i) keys_[i] = KeyOf(at[i * num_elements_]);
      else
        for (int64_t i = 0; i < count; ++i) keys_[i] = KeyOf(at[places[i] * num_elements_]);
      CountKeys(e, count);
    }
  }

 private:
  // The key of a finite value, and the greatest key for others: no bracket has it.
  static Key KeyOf(T x) {
    const Key key = Order::KeyOf(x);
    if constexpr (!Order::kIsFloat) return key;
    return Order::IsFinite(x) ? key : std::numeric_limits<Key>::max();
  }

  void CountKeys(int64_t e, int64_t count) {
    bool collects = false;
    for (int64_t b = 0; b < brackets_.num_of[e]; ++b) {
      const int64_t place = e * brackets_.most + b;
      const auto low = static_cast<Key>(brackets_.bounds[2 * place]);
      const auto width = static_cast<Key>(brackets_.bounds[2 * place + 1] - low);
      Key below = 0, inside = 0;  // as wide as keys, for vectors of one width
      if (width == 0) {
        for (int64_t i = 0; i < count; ++i) {
          below += keys_[i] < low;
          inside += keys_[i] == low;
        }
      } else {
        if (!collects) std::fill_n(is_inside_.begin(), count, Key{0});
        collects = true;
        for (int64_t i = 0; i < count; ++i) {
          const Key is = static_cast<Key>(keys_[i] - low) <= width;
          below += keys_[i] < low;
          inside += is;
          is_inside_[i] |= is;
        }
      }
      counts_.below[2 * place] += static_cast<int64_t>(below);
      counts_.below[2 * place + 1] += static_cast<int64_t>(inside);
    }
    if (collects) Collect(e, count);
  }

  // Appends the keys that are inside of a bracket. Every key is written, and counts if it is
  // inside: a branch for each would be mispredicted too often.
  void Collect(int64_t e, int64_t count) {
    int64_t& size = counts_.num_keys[e];
    if (size + count > counts_.capacity) size = counts_.capacity + 1;
    if (size > counts_.capacity) return;
    Key* to = static_cast<Key*>(counts_.keys) + e * counts_.capacity + size;
    int64_t added = 0;
    for (int64_t i = 0; i < count; ++i) {
      to[added] = keys_[i];
      added += static_cast<int64_t>(is_inside_[i]);
    }
    size += added;
  }

  const T* values_;
  int64_t num_elements_;
  const Brackets& brackets_;
  BracketCounts counts_;
  alignas(64) std::array<Key, kTile> keys_;
  alignas(64) std::array<Key, kTile> is_inside_;
};

template <typename T>
void CountQuantileBracketsOf(const ColumnRows& rows, const uint8_t* keep, const Brackets& brackets,
                             const BracketCounts& counts) {
  BracketCount<T> count(rows, brackets, counts);
  std::array<int64_t, kTile> places;
  for (int64_t begin = 0; begin < rows.num_rows; begin += kTile) {
    const int64_t size = std::min(kTile, rows.num_rows - begin);
    int64_t kept = 0;
    for (int64_t r = 0; keep != nullptr && r < size; ++r) {
      places[kept] = r;
      kept += keep[begin + r] != 0;
    }
    if (keep == nullptr || kept == size)
      count.Add(begin, nullptr, size);
    else
      count.Add(begin, places.data(), kept);
  }
}

// Keys are counted in bins of equal width of each bracket; those that share a bin with a wanted
// rank are compared.
template <typename Key>
void SelectQuantileKeysOf(const Key* keys, int64_t num_keys, const uint64_t* bounds,
                          int64_t num_brackets, const int64_t* ranks, int64_t num_ranks,
                          uint64_t* found) {
  constexpr int kBinBits = 10;
  std::vector<Key> low(num_brackets), high(num_brackets);
  std::vector<int> shift(num_brackets, 0);
  for (int64_t b = 0; b < num_brackets; ++b) {
    low[b] = static_cast<Key>(bounds[2 * b]);
    high[b] = static_cast<Key>(bounds[2 * b + 1]);
    while ((static_cast<Key>(high[b] - low[b]) >> shift[b]) >> kBinBits != 0) ++shift[b];
  }
  std::vector<uint32_t> bin_of(num_keys);
  std::vector<int64_t> counts(num_brackets << kBinBits, 0);
  std::array<Key, kTile> bracket;
  for (int64_t begin = 0; begin < num_keys; begin += kTile) {
    const int64_t size = std::min(kTile, num_keys - begin);
    const Key* tile = keys + begin;
    // The bracket of a key is the number of those that end before it.
    std::fill_n(bracket.begin(), size, Key{0});
    for (int64_t b = 0; b + 1 < num_brackets; ++b)
      for (int64_t i = 0; i < size; ++i) bracket[i] += tile[i] > high[b];
    for (int64_t i = 0; i < size; ++i) {
      const Key b = bracket[i];
      const Key away = static_cast<Key>(tile[i] - low[b]) >> shift[b];
      const auto bin = static_cast<uint32_t>((b << kBinBits) + away);
      bin_of[begin + i] = bin;
      ++counts[bin];
    }
  }
  const WantedBins wanted =
      FindBins(counts.data(), static_cast<int64_t>(counts.size()), ranks, num_ranks);
  std::vector<Key> compared;
  compared.reserve(static_cast<size_t>(wanted.num_keys));
  for (int64_t i = 0; i < num_keys; ++i)
    if (wanted.is_wanted[bin_of[i]] != 0) compared.push_back(keys[i]);
  const int64_t* places = wanted.places.data();
  Select(compared.data(), 0, wanted.num_keys, places, places + num_ranks);
  for (int64_t i = 0; i < num_ranks; ++i) found[i] = compared[places[i]];
}

}  // namespace

void SelectQuantileKeys(const void* keys, bool are_long, int64_t num_keys, const uint64_t* bounds,
                        int64_t num_brackets, const int64_t* ranks, int64_t num_ranks,
                        uint64_t* found) {
  if (are_long)
    SelectQuantileKeysOf(static_cast<const uint64_t*>(keys), num_keys, bounds, num_brackets, ranks,
                         num_ranks, found);
  else
    SelectQuantileKeysOf(static_cast<const uint32_t*>(keys), num_keys, bounds, num_brackets, ranks,
                         num_ranks, found);
}

void CountQuantileBrackets(const ColumnRows& rows, const uint8_t* keep, const Brackets& brackets,
                           const BracketCounts& counts) {
  WithType(rows.dtype, [&](auto element) {
    CountQuantileBracketsOf<decltype(element)>(rows, keep, brackets, counts);
  });
}

}  // namespace gear::cpu
