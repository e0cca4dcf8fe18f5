// Statistics of the columns of a data set: moments, counts of pixel values, order statistics.
//
// deepspeed_gear/data/column_scan.py computes the same bits with NumPy where no build of this
// module exists; tests/equivalence/test_statistics.py compares them.
#pragma once
#include <cstdint>

namespace gear::cpu {

// Rows of one column, [num_rows, num_elements], one after the other.
struct ColumnRows {
  const char* values;
  int64_t dtype, num_rows, num_elements;
};

// Adds rows to moments, [kMomentWords, num_elements] (store/moments.h), a block of `block_rows`
// rows after the other: a block's moments are computed from its kept rows and merged into the
// whole. So the result depends on where blocks begin, and on nothing else. keep: which rows count,
// [num_rows]; null: all of them. Sums of rows of up to kMostLanes elements have kLanes parts: row i
// of a block belongs to part i % kLanes. Each part is summed in the order of rows, then the parts
// in the order of their numbers. Cost: two passes over a block, which fits into the second cache.
void AddRowMoments(const ColumnRows& rows, const uint8_t* keep, int64_t block_rows,
                   double* moments);

// Counts the values of pixels by channel. Rows are [outer, inner, last], uint8; channel
// o * last + l has the pixels [o, :, l].
// bins: [outer * last, 256], which is added to.
void CountPixels(const uint8_t* pixels, const uint8_t* keep, int64_t num_rows, int64_t outer,
                 int64_t inner, int64_t last, int64_t* bins);

// Finds the finite values around quantiles, of elements [first, first + count) of a row: with n
// finite values in ascending order those at floor((n - 1) * level), and the ones after them.
// runs: first row and number of rows of each run that counts, [num_runs, 2]
// found: number of finite values, [num_elements]; then the lower value of each level,
//   [num_levels, num_elements]; then the higher ones. Elements without a finite value are not
//   written.
// Cost: three passes over the elements, a fourth over those that share a bin with a value that is
// found, and 320 KiB for each of at most 16 elements.
void OrderStatistics(const ColumnRows& rows, int64_t first, int64_t count, const int64_t* runs,
                     int64_t num_runs, const double* levels, int64_t num_levels, double* found);

// A pass over the digits of a column's keys, the unsigned integers in the order of its finite
// values. Keys are divided into digits from the highest one on; a node stands for the keys whose
// digits so far are equal.
struct DigitPass {
  int64_t shift, bits;  // of its digit: (key >> shift) & (2^bits - 1)
  // Index of the node of the next pass that a digit of a node leads to, or -1: [nodes, 2^bits].
  // Null for the pass that counts.
  const int32_t* children;
};
static_assert(sizeof(DigitPass) == 24, "a pass is a row of 3 int64");

// Counts the digits of the last pass, of elements [first, first + count) of rows. The nodes of the
// first pass are these elements. keep: as for AddRowMoments.
// counts: [nodes of the last pass, 2^bits], which is added to.
// Cost: a pass over the rows; for each value a look at one table for each pass.
void CountDigits(const ColumnRows& rows, int64_t first, int64_t count, const uint8_t* keep,
                 const DigitPass* passes, int64_t num_passes, uint64_t* counts);

}  // namespace gear::cpu
