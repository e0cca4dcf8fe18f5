// Quantiles of a column of any size, by digits of its values' keys: one pass counts one digit.
#include <algorithm>

#include "common/convert.h"
#include "statistics/statistics.h"
#include "statistics/value_keys.h"

namespace gear::cpu {
namespace {

template <typename T>
void CountQuantileDigitsOf(const ColumnRows& rows, int64_t first, int64_t count,
                           const uint8_t* keep, const DigitPass* passes, int64_t num_passes,
                           uint64_t* counts) {
  using Order = OrderOf<T>;
  constexpr int64_t kTileBytes = 1 << 18;  // of rows that stay in the second cache
  const T* values = reinterpret_cast<const T*>(rows.values);
  const int64_t width = rows.num_elements;
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  const int64_t tile = std::max<int64_t>(kTileBytes / row_bytes, 1);
  const DigitPass& last = passes[num_passes - 1];
  const auto digit_of = [](uint64_t key, const DigitPass& pass) {
    return static_cast<int64_t>(key >> pass.shift & ((uint64_t{1} << pass.bits) - 1));
  };
  for (int64_t begin = 0; begin < rows.num_rows; begin += tile) {
    const int64_t end = std::min(begin + tile, rows.num_rows);
    for (int64_t e = 0; e < count; ++e) {
      for (int64_t row = begin; row < end; ++row) {
        if (keep != nullptr && keep[row] == 0) continue;
        const T value = values[row * width + first + e];
        if (!Order::IsFinite(value)) continue;
        const uint64_t key = Order::KeyOf(value);
        int64_t node = e;
        for (const DigitPass* pass = passes; pass < &last && node >= 0; ++pass)
          node = pass->children[(node << pass->bits) + digit_of(key, *pass)];
        if (node >= 0) ++counts[(node << last.bits) + digit_of(key, last)];
      }
    }
  }
}

}  // namespace

void CountQuantileDigits(const ColumnRows& rows, int64_t first, int64_t count, const uint8_t* keep,
                         const DigitPass* passes, int64_t num_passes, uint64_t* counts) {
  WithType(rows.dtype, [&](auto element) {
    CountQuantileDigitsOf<decltype(element)>(rows, first, count, keep, passes, num_passes, counts);
  });
}

}  // namespace gear::cpu
