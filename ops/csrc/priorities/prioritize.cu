// New priorities: written into a log, and applied. Nothing is sorted: of the updates of an item
// only the last one counts, and a hash table finds it; every count is a sum or a maximum.
#include "common/convert.h"
#include "common/counts_cuda.h"
#include "common/hash_table_cuda.h"
#include "common/launch_cuda.h"
#include "common/power.h"
#include "priorities/priorities.h"
#include "select/tree_cuda.h"

namespace gear::cuda {
namespace {

__global__ void ReportKernel(Report* __restrict__ log, int64_t size,
                             const Resolution* __restrict__ resolutions,
                             const float* __restrict__ priorities, int64_t count, int64_t tail,
                             int64_t batch) {
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const auto bits = BitCast<uint32_t>(priorities[i]);
    Require(IsPriority(bits));
    const Resolution& r = resolutions[i];
    log[(tail + i) % size] = {{r.slot, r.generation, r.anchor, bits}, batch, r.sample_number};
  }
}

__device__ const PriorityUpdate& UpdateAt(const Updates& updates, int64_t i) {
  return *reinterpret_cast<const PriorityUpdate*>(updates.rows + i * updates.row_words);
}

// Checks all updates before anything changes. Sets the item of each, -1 where it does not apply,
// and finds the last one of each item.
__global__ void FindItemsKernel(const Table table, const Updates updates, int64_t count,
                                const Slot* __restrict__ slots, int64_t num_slots,
                                const AnchorRule rule, int64_t unit, int64_t num_items,
                                int64_t* __restrict__ items) {
  const bool are_reports = updates.row_words * sizeof(int64_t) == sizeof(Report);
  const auto report = [&](int64_t i) -> const Report& {
    return *reinterpret_cast<const Report*>(updates.rows + i * updates.row_words);
  };
  const auto follows = [&](int64_t a, int64_t b) {
    if (are_reports && Precedes(report(b), report(a))) return true;
    if (are_reports && Precedes(report(a), report(b))) return false;
    return a > b;
  };
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const PriorityUpdate& update = UpdateAt(updates, i);
    Require(IsPriority(static_cast<uint32_t>(update.priority)));
    int64_t item = -1;
    if (IsCurrent(slots, num_slots, rule, unit, update)) {
      item = ItemOf(slots, unit, update);
      Require(item >= 0 && item < num_items);
      table.Put(item, i, follows);
    }
    items[i] = item;
  }
}

__global__ void PrioritizeKernel(const Table table, const Updates updates, int64_t count,
                                 const int64_t* __restrict__ items, MassScale scale,
                                 const TreeShape shape, uint64_t* __restrict__ sums,
                                 float* __restrict__ values, int64_t* counts) {
  uint64_t applied = 0, stale = 0, clamped = 0, drawable = 0;  // drawable modulo 2^64
  int64_t highest = -1;
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const int64_t item = items[i];
    const uint32_t priority = OrderOf(static_cast<uint32_t>(UpdateAt(updates, i).priority));
    highest = Max(highest, int64_t{priority});
    if (item < 0) {
      ++stale;
      continue;
    }
    const Mass mass = MassOfPriority(priority, scale);
    ++applied;
    clamped += mass.clamped;
    if (!table.IsLast(item, i)) continue;
    const uint64_t before = sums[item];  // one thread an item
    sums[item] = mass.value;
    values[item] = BitCast<float>(priority);
    AddAbove(sums, shape, item, mass.value - before);
    drawable += uint64_t{mass.value > 0} - uint64_t{before > 0};
  }
  AddToCount(counts, cpu::kApplied, applied);
  AddToCount(counts, cpu::kStale, stale);
  AddToCount(counts, cpu::kClamped, clamped);
  AddToCount(counts, cpu::kDrawable, drawable);
  RaiseCount(counts, cpu::kHighestPriority, highest);
}

}  // namespace

void AppendReports(Report* log, int64_t size, const Resolution* resolutions,
                   const float* priorities, int64_t count, int64_t tail, int64_t batch,
                   void* stream) {
  if (count == 0) return;
  ReportKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(log, size, resolutions, priorities,
                                                                 count, tail % size, batch);
  CheckLaunch("AppendReports");
}

int64_t PrioritizeScratch(int64_t count) { return count + TableWords(count); }

void Prioritize(const Priorities& priorities, const Slot* slots, int64_t num_slots,
                const AnchorRule& rule, int64_t unit, const Updates& updates, int64_t count,
                MassScale scale, int64_t* counts, int64_t* scratch, void* stream) {
  if (count == 0) return;
  int64_t* items = scratch;
  const Table table = MakeTable(scratch + count, count, stream);
  FindItemsKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(
      table, updates, count, slots, num_slots, rule, unit, priorities.num_items, items);
  CheckLaunch("Prioritize");
  PrioritizeKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(
      table, updates, count, items, scale, ShapeOfTree(priorities.num_items), priorities.sums,
      priorities.values, counts);
  CheckLaunch("Prioritize");
  if (priorities.minima != nullptr)
    MinimaAbove(priorities.sums, priorities.num_items, items, count, priorities.minima, stream);
}

}  // namespace gear::cuda
