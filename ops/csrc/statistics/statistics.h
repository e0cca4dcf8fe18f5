// Statistics of the columns of a data set: moments, counts of pixel values, order statistics.
//
// deepspeed_gear/data/statistics/column_scan.py computes the same bits with NumPy where no build of
// this module exists; tests/equivalence/test_statistics.py compares them.
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
void FindQuantilesInBins(const ColumnRows& rows, int64_t first, int64_t count, const int64_t* runs,
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
void CountQuantileDigits(const ColumnRows& rows, int64_t first, int64_t count, const uint8_t* keep,
                         const DigitPass* passes, int64_t num_passes, uint64_t* counts);

// Ranges of keys that may hold wanted ranks, of each element of a row.
struct Brackets {
  const uint64_t* bounds;  // least and greatest key of each, ascending. [num_elements, most, 2]
  const int64_t* num_of;   // brackets of each element, the first ones of `most`. [num_elements]
  int64_t most;
};

// What is known of the keys of each element.
struct BracketCounts {
  int64_t* below;     // finite keys below each bracket, and those in it. [num_elements, most, 2]
  void* keys;         // keys in brackets of more than one key. [num_elements, capacity]
  int64_t capacity;   // at least the tile of 512 rows
  int64_t* num_keys;  // of each element; more than `capacity` if they did not fit. [num_elements]
};

// Counts the finite keys of rows below brackets and in them, and collects those in them. Counts and
// keys are added to. keep: as for AddRowMoments. Keys are uint32 for types of up to 4 bytes, else
// uint64; the greatest one is in no bracket of a floating-point type.
// Cost: one pass over the rows.
void CountQuantileBrackets(const ColumnRows& rows, const uint8_t* keep, const Brackets& brackets,
                           const BracketCounts& counts);

// Finds the keys of ranks among collected keys of one element.
// are_long: keys are uint64, not uint32.
// bounds: least and greatest key of each bracket that the keys are of, ascending. [num_brackets, 2]
// ranks: ascending and different, each below `num_keys`. [num_ranks]
// Cost: two passes over the keys, and 4 bytes for each.
void SelectQuantileKeys(const void* keys, bool are_long, int64_t num_keys, const uint64_t* bounds,
                        int64_t num_brackets, const int64_t* ranks, int64_t num_ranks,
                        uint64_t* found);

}  // namespace gear::cpu
