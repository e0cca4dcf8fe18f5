// Checks of the bindings of both devices before an op of priorities runs.
#pragma once
#include "bindings/checks.h"
#include "common/power.h"

namespace gear {

inline constexpr int64_t kUpdateWords = sizeof(PriorityUpdate) / sizeof(int64_t);
inline constexpr int64_t kReportWords = sizeof(Report) / sizeof(int64_t);

inline void CheckExponent(const char* name, int64_t value) {
  TORCH_CHECK(value >= 0 && value <= static_cast<int64_t>(kOneQ62), "gear: ", name,
              " must be in [0, 2^62] (Q62), got ", value);
}

inline MassScale ScaleOf(int64_t alpha, int64_t most_bits) {
  CheckExponent("alpha", alpha);
  TORCH_CHECK(most_bits >= 1 && most_bits <= kMostMassBits, "gear: most_bits must be in [1, ",
              kMostMassBits, "], got ", most_bits);
  return {static_cast<uint64_t>(alpha), static_cast<int>(most_bits)};
}

inline void CheckMass(const at::Tensor& masses, const at::Tensor& priorities) {
  CheckTensor(masses, "masses", at::kLong);
  CheckTensor(priorities, "priorities", at::kFloat);
  TORCH_CHECK(masses.numel() == priorities.numel(),
              "gear: masses and priorities must have equal sizes");
}

inline void CheckImportance(const at::Tensor& weights, const at::Tensor& resolutions,
                            int64_t numerator, int64_t count, int64_t beta) {
  CheckTensor(weights, "weights", at::kFloat);
  CheckRecords(resolutions, "resolutions", kResolutionWords);
  CheckExponent("beta", beta);
  TORCH_CHECK(weights.numel() == resolutions.size(0),
              "gear: weights must have a value per resolution");
  TORCH_CHECK(numerator > 0 && count > 0, "gear: numerator and count must be positive, got ",
              numerator, " and ", count);
}

// Words of the tree of minima.
inline int64_t MinimaWords(int64_t num_items) {
  const TreeShape shape = ShapeOfTree(num_items);
  return shape.words - shape.width[0];
}

inline void CheckMinima(const at::Tensor& minima, const at::Tensor& sums, int64_t num_items) {
  CheckTree(sums, num_items);
  CheckTensor(minima, "minima", at::kLong);
  TORCH_CHECK(minima.numel() == MinimaWords(num_items), "gear: minima of ", num_items,
              " items must have ", MinimaWords(num_items), " words, got ", minima.numel());
}

inline void CheckResolveRows(const at::Tensor& resolutions, const at::Tensor& sums,
                             const at::Tensor& slots, const at::Tensor& row_slots,
                             const at::Tensor& coordinates) {
  CheckRecords(slots, "slots", kSlotWords);
  CheckTensor(row_slots, "row_slots", at::kInt);
  CheckTree(sums, row_slots.numel());
  CheckTensor(coordinates, "coordinates", at::kLong);
  CheckRecords(resolutions, "resolutions", kResolutionWords);
  TORCH_CHECK(resolutions.size(0) == coordinates.numel(),
              "gear: resolutions must have a row per coordinate");
}

inline void CheckTopK(const at::Tensor& items, const at::Tensor& priorities,
                      const at::Tensor& sums) {
  CheckTensor(items, "items", at::kLong);
  CheckTensor(priorities, "priorities", at::kFloat);
  CheckTensor(sums, "sums", at::kLong);
  TORCH_CHECK(priorities.numel() <= sums.numel(), "gear: sums must have a mass per priority");
}

inline void CheckReport(const at::Tensor& log, const at::Tensor& resolutions,
                        const at::Tensor& priorities, int64_t tail) {
  CheckRecords(log, "log", kReportWords);
  CheckRecords(resolutions, "resolutions", kResolutionWords);
  CheckTensor(priorities, "priorities", at::kFloat);
  TORCH_CHECK(priorities.numel() == resolutions.size(0),
              "gear: resolutions must have a row per priority");
  TORCH_CHECK(priorities.numel() <= log.size(0), "gear: the log must hold ", priorities.numel(),
              " reports, got ", log.size(0), " rows");
  TORCH_CHECK(tail >= 0, "gear: tail must be at least 0, got ", tail);
}

inline void CheckLongs(const at::Tensor& tensor, const char* name, int64_t count) {
  CheckTensor(tensor, name, at::kLong);
  TORCH_CHECK(tensor.numel() == count, "gear: ", name, " must have ", count, " elements, got ",
              tensor.numel());
}

// An empty tensor of minima: the caller keeps none.
inline void CheckPriorityArrays(const at::Tensor& sums, const at::Tensor& minima,
                                const at::Tensor& priorities, const at::Tensor& counts,
                                const at::Tensor& slots) {
  CheckTensor(priorities, "priorities", at::kFloat);
  CheckTree(sums, priorities.numel());
  CheckTensor(minima, "minima", at::kLong);
  if (minima.numel() > 0) CheckMinima(minima, sums, priorities.numel());
  CheckLongs(counts, "counts", cpu::kNumUpdateCounts);
  CheckRecords(slots, "slots", kSlotWords);
}

inline void CheckPrioritize(const at::Tensor& sums, const at::Tensor& minima,
                            const at::Tensor& priorities, const at::Tensor& counts,
                            const at::Tensor& slots, const at::Tensor& updates, int64_t unit) {
  CheckPriorityArrays(sums, minima, priorities, counts, slots);
  CheckTensor(updates, "updates", at::kLong);
  TORCH_CHECK(
      updates.dim() == 2 && (updates.size(1) == kUpdateWords || updates.size(1) == kReportWords),
      "gear: updates must be [n, ", kUpdateWords, "], or reports [n, ", kReportWords, "], got ",
      updates.sizes());
  TORCH_CHECK(unit == kTrajectory || unit == kStep, "gear: unit must be 0 or 1, got ", unit);
}

}  // namespace gear
