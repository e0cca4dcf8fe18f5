// Counts moments of new rows, merges them, and switches between their two copies at a commit.
#include "store/moments.h"

#include <algorithm>
#include <type_traits>

#include "common/convert.h"
#include "store/store.h"

namespace gear::cpu {

namespace {

// Keeps the order of writes: a process may die between any two of them.
void Write(int64_t& word, int64_t value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }

bool IsFinite(double x) { return x - x == 0; }

// Counts the rows of one column. block: its elements in arrays that are `stride` apart, all zero.
template <typename T>
void CountRows(const T* values, int64_t rows, int64_t num_elements, double* block, int64_t stride) {
  double* count = block + kMomentCount * stride;
  double* first = block + kMomentFirst * stride;
  double* mean = block + kMomentMean * stride;
  double* squares = block + kMomentSquares * stride;
  double* least = block + kMomentLeast * stride;
  double* greatest = block + kMomentGreatest * stride;
  for (int64_t e = 0; e < num_elements; ++e) {
    for (int64_t r = 0; r < rows; ++r) {
      const double x = Load<double>(values[r * num_elements + e]);
      if (!IsFinite(x)) continue;
      first[e] = least[e] = greatest[e] = x;
      break;
    }
  }
  // Without branches, so that the compiler vectorises over the elements.
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t e = 0; e < num_elements; ++e) {
      const double x = Load<double>(values[r * num_elements + e]);
      const bool finite = IsFinite(x);
      count[e] += finite ? 1.0 : 0.0;
      mean[e] += finite ? x - first[e] : 0.0;
      least[e] = finite && x < least[e] ? x : least[e];
      greatest[e] = finite && x > greatest[e] ? x : greatest[e];
    }
  }
  for (int64_t e = 0; e < num_elements; ++e) mean[e] /= std::max(count[e], 1.0);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t e = 0; e < num_elements; ++e) {
      const double x = Load<double>(values[r * num_elements + e]);
      const double away = IsFinite(x) ? (x - first[e]) - mean[e] : 0.0;
      squares[e] += away * away;
    }
  }
}

}  // namespace

std::vector<double> MomentsOf(const Store& store, int64_t slot, int64_t known, int64_t num_steps) {
  const RunningMoments& moments = store.moments;
  std::vector<double> block(static_cast<size_t>(moments.size()));
  for (const CountedColumn& one : moments.columns) {
    const ColumnOf& column = store.columns[static_cast<size_t>(one.column)];
    const bool single = column.rows == kPerTrajectory;
    if (single && known > 0) continue;
    const int64_t begin = known == 0 ? 0 : known + column.rows;
    const int64_t rows = single ? 1 : num_steps + column.rows - begin;
    const int64_t at = single ? slot : store.slots[slot].first_row + begin;
    const char* values = column.base + at * column.row_bytes;
    WithType(one.dtype, [&](auto element) {
      CountRows(reinterpret_cast<const decltype(element)*>(values), rows, one.num_elements,
                block.data() + one.first, moments.num_elements);
    });
  }
  return block;
}

void MergeMoments(double* into, const double* block, int64_t num_elements) {
  for (int64_t e = 0; e < num_elements; ++e) {
    const auto word = [num_elements, e](auto* moments, MomentWord which) -> auto& {
      return moments[which * num_elements + e];
    };
    const double added = word(block, kMomentCount), known = word(into, kMomentCount);
    if (added == 0) continue;
    if (known == 0) {
      for (int64_t w = 0; w < kMomentWords; ++w)
        into[w * num_elements + e] = block[w * num_elements + e];
      continue;
    }
    const double share = added / (known + added);
    const double away = (word(block, kMomentFirst) - word(into, kMomentFirst)) +
                        (word(block, kMomentMean) - word(into, kMomentMean));
    word(into, kMomentCount) = known + added;
    word(into, kMomentMean) += away * share;
    word(into, kMomentSquares) += word(block, kMomentSquares) + away * away * (known * share);
    double& least = word(into, kMomentLeast);
    double& greatest = word(into, kMomentGreatest);
    least = std::min(least, word(block, kMomentLeast));
    greatest = std::max(greatest, word(block, kMomentGreatest));
  }
}

void StageMoments(Store& store, int64_t slot, int64_t num_steps, const std::vector<double>& block) {
  const RunningMoments& moments = store.moments;
  const int64_t size = moments.size(), other = 1 - moments.head[kCurrent];
  double* staged = moments.words + other * size;
  Write(moments.head[kStaged], 0);
  std::copy_n(moments.words + (1 - other) * size, size, staged);
  MergeMoments(staged, block.data(), moments.num_elements);
  moments.head[kStagedSlot] = slot;
  moments.head[kStagedGeneration] = store.slots[slot].generation;
  moments.head[kStagedSteps] = num_steps;
  Write(moments.head[kStaged], 1 + other);
}

void PublishMoments(Store& store) {
  int64_t* head = store.moments.head;
  Write(head[kCurrent], head[kStaged] - 1);
  Write(head[kStaged], 0);
}

}  // namespace gear::cpu
