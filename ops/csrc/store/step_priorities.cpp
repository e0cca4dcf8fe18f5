// Clears and moves the priorities of rows with their trajectories, and updates the trees.
#include "store/step_priorities.h"

#include <algorithm>
#include <vector>

#include "common/tree.h"

namespace gear::cpu {

void ForgetRows(const StepPriorities& steps, int64_t first_row, int64_t num_rows) {
  const Priorities& target = steps.target;
  const TreeShape shape = ShapeOfTree(target.num_items);
  std::vector<int64_t> items;
  for (int64_t row = first_row; row < first_row + num_rows; ++row) {
    target.values[row] = 0;
    if (target.sums[row] == 0) continue;
    --steps.counts[kDrawable];
    SetMass(target.sums, shape, row, 0);
    items.push_back(row);
  }
  if (target.minima != nullptr)
    MinimaUpdate(target.sums, target.num_items, items.data(), static_cast<int64_t>(items.size()),
                 target.minima);
}

void MoveMasses(const StepPriorities& steps, int64_t source, int64_t to, int64_t num_rows,
                int64_t spare_row, int64_t spare_rows) {
  const Priorities& target = steps.target;
  const std::vector<uint64_t> masses(target.sums + source, target.sums + source + num_rows);
  const TreeShape shape = ShapeOfTree(target.num_items);
  std::vector<int64_t> items;
  // Of rows 5 to 8 that have moved to rows 3 to 6, rows 7 and 8 are left.
  for (int64_t row = source; row < source + num_rows; ++row) {
    if (row >= to && row < to + num_rows) continue;
    target.values[row] = 0;
    SetMass(target.sums, shape, row, 0);
    items.push_back(row);
  }
  std::fill_n(target.values + spare_row, spare_rows, 0.0F);
  for (int64_t i = 0; i < num_rows; ++i) {
    SetMass(target.sums, shape, to + i, masses[i]);
    items.push_back(to + i);
  }
  if (target.minima != nullptr)
    MinimaUpdate(target.sums, target.num_items, items.data(), static_cast<int64_t>(items.size()),
                 target.minima);
}

}  // namespace gear::cpu
