// Moments of a column over the rows of a block: counts, sums, squares and bounds of each element.
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/convert.h"
#include "statistics/statistics.h"
#include "store/finite_checks.h"
#include "store/moments.h"

namespace gear::cpu {
namespace {

constexpr int64_t kLanes = 8;
constexpr int64_t kMostLanes = 32;  // elements of the widest row whose sums have parts
constexpr int64_t kTile = 1024;     // elements of a wide row whose sums are in the nearest cache

bool IsFinite(double x) { return x - x == 0; }

Exponents ExponentsOf(int64_t dtype) {
  switch (dtype) {
    case kFloat16:
      return Exponents::kFloat16;
    case kBfloat16:
      return Exponents::kBFloat16;
    case kFloat32:
      return Exponents::kFloat32;
    case kFloat64:
      return Exponents::kFloat64;
    default:
      return Exponents::kUnchecked;
  }
}

// The sums of one block, and of a tile of its elements. A line is what has one sum a place: `lanes`
// rows of narrow columns, so that the loops below are long enough for vectors.
template <typename T>
class Block {
 public:
  Block(int64_t num_elements, int64_t lanes)
      : width_(std::min(num_elements, kTile) * lanes),
        lanes_(lanes),
        shift_(width_),
        mean_(width_),
        count_(width_),
        sum_(width_),
        squares_(width_),
        least_(width_),
        greatest_(width_) {}

  // Computes the moments of `count` elements of rows that are `stride` elements apart.
  void Compute(const T* values, int64_t num_rows, int64_t stride, int64_t count, bool all_finite,
               double* block, int64_t block_stride) {
    const int64_t width = count * lanes_;
    FindFirst(values, num_rows, stride, count, all_finite);
    const auto each_line = [&](const auto& visit) {
      // Rows of a line follow each other: there are lanes only where a tile is a whole row.
      for (int64_t r = 0; r < num_rows; r += lanes_)
        visit(values + r * stride, std::min(lanes_, num_rows - r) * count);
    };
    for (int64_t i = 0; i < width; ++i) {
      count_[i] = sum_[i] = squares_[i] = 0;
      least_[i] = greatest_[i] = shift_[i];
    }
    if (all_finite) {
      each_line([&](const T* line, int64_t size) { AddLine(line, size); });
      const int64_t full = num_rows / lanes_, rest = num_rows % lanes_ * count;
      for (int64_t i = 0; i < width; ++i) count_[i] = static_cast<double>(full + (i < rest));
    } else {
      each_line([&](const T* line, int64_t size) { AddFiniteOf(line, size); });
    }
    for (int64_t e = 0; e < count; ++e) {
      const double finite = Total(count_, e, count);
      block[kMomentCount * block_stride + e] = finite;
      block[kMomentFirst * block_stride + e] = shift_[e];
      const double mean = Total(sum_, e, count) / std::max(finite, 1.0);
      block[kMomentMean * block_stride + e] = mean;
      double least = least_[e], greatest = greatest_[e];
      for (int64_t lane = 1; lane < lanes_; ++lane) {
        least = std::min(least, least_[lane * count + e]);
        greatest = std::max(greatest, greatest_[lane * count + e]);
      }
      block[kMomentLeast * block_stride + e] = least;
      block[kMomentGreatest * block_stride + e] = greatest;
      for (int64_t lane = 0; lane < lanes_; ++lane) mean_[lane * count + e] = mean;
    }
    std::fill_n(sum_.begin(), width, 0.0);
    if (all_finite)
      each_line([&](const T* line, int64_t size) { AddSquares(line, size); });
    else
      each_line([&](const T* line, int64_t size) { AddSquaresOfFinite(line, size); });
    for (int64_t e = 0; e < count; ++e) {
      const double finite = std::max(block[kMomentCount * block_stride + e], 1.0);
      // Without rounding, the deviations would sum to 0: what they sum to is what the mean lacks.
      const double rest = Total(sum_, e, count);
      block[kMomentSquares * block_stride + e] = Total(squares_, e, count) - rest * rest / finite;
    }
  }

 private:
  // Each element's first finite value, for each row of a line; 0 where it has none.
  void FindFirst(const T* values, int64_t num_rows, int64_t stride, int64_t count,
                 bool all_finite) {
    for (int64_t e = 0; e < count; ++e) {
      double first = 0;
      for (int64_t r = 0; r < num_rows; ++r) {
        const double x = Load<double>(values[r * stride + e]);
        if (!all_finite && !IsFinite(x)) continue;
        first = x;
        break;
      }
      for (int64_t lane = 0; lane < lanes_; ++lane) shift_[lane * count + e] = first;
    }
  }

  void AddLine(const T* line, int64_t size) {
    const double* shift = shift_.data();
    double *sum = sum_.data(), *least = least_.data(), *greatest = greatest_.data();
    for (int64_t i = 0; i < size; ++i) {
      const double x = Load<double>(line[i]);
      sum[i] += x - shift[i];
      least[i] = x < least[i] ? x : least[i];
      greatest[i] = x > greatest[i] ? x : greatest[i];
    }
  }

  void AddFiniteOf(const T* line, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      const double x = Load<double>(line[i]);
      const bool finite = IsFinite(x);
      count_[i] += finite ? 1.0 : 0.0;
      sum_[i] += finite ? x - shift_[i] : 0.0;
      least_[i] = finite && x < least_[i] ? x : least_[i];
      greatest_[i] = finite && x > greatest_[i] ? x : greatest_[i];
    }
  }

  void AddSquares(const T* line, int64_t size) {
    const double *shift = shift_.data(), *mean = mean_.data();
    double *sum = sum_.data(), *squares = squares_.data();
    for (int64_t i = 0; i < size; ++i) {
      const double away = (Load<double>(line[i]) - shift[i]) - mean[i];
      sum[i] += away;
      squares[i] += away * away;
    }
  }

  void AddSquaresOfFinite(const T* line, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      const double x = Load<double>(line[i]);
      const double away = IsFinite(x) ? (x - shift_[i]) - mean_[i] : 0.0;
      sum_[i] += away;
      squares_[i] += away * away;
    }
  }

  double Total(const std::vector<double>& parts, int64_t element, int64_t count) const {
    double total = parts[element];
    for (int64_t lane = 1; lane < lanes_; ++lane) total += parts[lane * count + element];
    return total;
  }

  int64_t width_, lanes_;
  // A place of a line each: the value that distances are taken from, mean distance, and sums.
  std::vector<double> shift_, mean_, count_, sum_, squares_, least_, greatest_;
};

template <typename T>
void AddBlocks(const ColumnRows& rows, const uint8_t* keep, int64_t block_rows, double* moments) {
  const int64_t num_elements = rows.num_elements;
  const int64_t row_bytes = num_elements * static_cast<int64_t>(sizeof(T));
  Block<T> sums(num_elements, num_elements <= kMostLanes ? kLanes : 1);
  std::vector<double> block(static_cast<size_t>(kMomentWords * num_elements));
  std::vector<char> kept;
  for (int64_t low = 0; low < rows.num_rows; low += block_rows) {
    int64_t count = std::min(block_rows, rows.num_rows - low);
    const char* from = rows.values + low * row_bytes;
    const bool has_gaps = keep != nullptr && std::memchr(keep + low, 0, count) != nullptr;
    if (has_gaps) {
      kept.resize(static_cast<size_t>(count * row_bytes));
      int64_t found = 0;
      // Kept rows come in long runs: those of a trajectory.
      for (int64_t r = 0; r < count;) {
        const uint8_t* flags = keep + low;
        if (flags[r] == 0) {
          ++r;
          continue;
        }
        const void* gap = std::memchr(flags + r, 0, count - r);
        const int64_t end = gap == nullptr ? count : static_cast<const uint8_t*>(gap) - flags;
        std::memcpy(kept.data() + found * row_bytes, from + r * row_bytes, (end - r) * row_bytes);
        found += end - r;
        r = end;
      }
      from = kept.data();
      count = found;
    }
    if (count == 0) continue;
    const bool all_finite = AllFinite(from, count * row_bytes, ExponentsOf(rows.dtype));
    for (int64_t e = 0; e < num_elements; e += kTile) {
      const int64_t width = std::min(kTile, num_elements - e);
      sums.Compute(reinterpret_cast<const T*>(from) + e, count, num_elements, width, all_finite,
                   block.data() + e, num_elements);
    }
    MergeMoments(moments, block.data(), num_elements);
  }
}

}  // namespace

void AddRowMoments(const ColumnRows& rows, const uint8_t* keep, int64_t block_rows,
                   double* moments) {
  WithType(rows.dtype,
           [&](auto element) { AddBlocks<decltype(element)>(rows, keep, block_rows, moments); });
}

void CountPixels(const uint8_t* pixels, const uint8_t* keep, int64_t num_rows, int64_t outer,
                 int64_t inner, int64_t last, int64_t* bins) {
  constexpr int64_t kValues = 256, kParts = 4;
  constexpr int64_t kMostPixels = int64_t{1} << 30;  // that 32 bits count
  const int64_t num_channels = outer * last;
  // Neighbouring pixels are often equal: with four counters of a value they do not wait for each
  // other.
  std::vector<uint32_t> counts(static_cast<size_t>(num_channels * kParts * kValues));
  int64_t counted = 0;
  const auto flush = [&] {
    for (int64_t c = 0; c < num_channels; ++c)
      for (int64_t part = 0; part < kParts; ++part)
        for (int64_t v = 0; v < kValues; ++v)
          bins[c * kValues + v] += counts[(c * kParts + part) * kValues + v];
    std::fill(counts.begin(), counts.end(), 0);
    counted = 0;
  };
  for (int64_t r = 0; r < num_rows; ++r) {
    if (keep != nullptr && keep[r] == 0) continue;
    if (counted + inner > kMostPixels) flush();
    counted += inner;
    for (int64_t o = 0; o < outer; ++o) {
      const uint8_t* run = pixels + (r * outer + o) * inner * last;
      uint32_t* of_run = counts.data() + o * last * kParts * kValues;
      for (int64_t i = 0; i < inner; ++i) {
        uint32_t* part = of_run + i % kParts * kValues;
        for (int64_t c = 0; c < last; ++c) ++part[c * kParts * kValues + run[i * last + c]];
      }
    }
  }
  flush();
}

}  // namespace gear::cpu
