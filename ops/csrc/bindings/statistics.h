// Statistics of columns, and the check of values before they are written to a data set.
//
// Arrays of NumPy are given by their addresses; the caller keeps them.
#pragma once
#include <cstdint>

#include "statistics/statistics.h"
#include "store/finite_checks.h"

namespace gear::python {

inline void AddRowMoments(const char* values, int64_t dtype, int64_t num_rows, int64_t num_elements,
                          const uint8_t* keep, int64_t block_rows, double* moments) {
  cpu::AddRowMoments({values, dtype, num_rows, num_elements}, keep, block_rows, moments);
}

inline void FindQuantilesInBins(const char* values, int64_t dtype, int64_t num_elements,
                                int64_t first, int64_t count, const int64_t* runs, int64_t num_runs,
                                const double* levels, int64_t num_levels, double* found) {
  cpu::FindQuantilesInBins({values, dtype, 0, num_elements}, first, count, runs, num_runs, levels,
                           num_levels, found);
}

inline void CountQuantileDigits(const char* values, int64_t dtype, int64_t num_rows,
                                int64_t num_elements, int64_t first, int64_t count,
                                const uint8_t* keep, const cpu::DigitPass* passes,
                                int64_t num_passes, uint64_t* counts) {
  cpu::CountQuantileDigits({values, dtype, num_rows, num_elements}, first, count, keep, passes,
                           num_passes, counts);
}

inline void CountQuantileBrackets(const char* values, int64_t dtype, int64_t num_rows,
                                  int64_t num_elements, const uint8_t* keep, const uint64_t* bounds,
                                  const int64_t* num_of, int64_t most, int64_t* below, char* keys,
                                  int64_t capacity, int64_t* num_keys) {
  cpu::CountQuantileBrackets({values, dtype, num_rows, num_elements}, keep, {bounds, num_of, most},
                             {below, keys, capacity, num_keys});
}

inline void SelectQuantileKeys(const char* keys, int64_t are_long, int64_t num_keys,
                               const uint64_t* bounds, int64_t num_brackets, const int64_t* ranks,
                               int64_t num_ranks, uint64_t* found) {
  cpu::SelectQuantileKeys(keys, are_long != 0, num_keys, bounds, num_brackets, ranks, num_ranks,
                          found);
}

// type: a code of cpu::Exponents.
inline bool AllFinite(const char* values, int64_t bytes, int64_t type) {
  return cpu::AllFinite(values, bytes, static_cast<cpu::Exponents>(type));
}

}  // namespace gear::python
