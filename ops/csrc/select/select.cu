// The resolution of draws.
#include "common/launch_cuda.h"
#include "common/tree.h"
#include "select/descend_cuda.h"
#include "select/select.h"

namespace gear::cuda {
namespace {

struct Second {  // the draw of the anchor
  AnchorRule rule;
  int64_t unit;
  uint64_t seed;
  uint32_t stream_number;
};

__global__ void ResolveKernel(const uint64_t* __restrict__ sums, const Slot* __restrict__ slots,
                              int64_t num_slots, const TreeShape shape,
                              const int64_t* __restrict__ coordinates, int64_t count,
                              const Second second, int64_t first,
                              Resolution* __restrict__ resolutions) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    const Hit hit = DescendWarp(sums, shape, static_cast<uint64_t>(coordinates[i]), lane);
    if (lane != 0) continue;
    Require(hit.item < num_slots);
    const uint64_t mass = sums[hit.item];
    Require(hit.remainder < mass);  // else the coordinate was beyond the total
    const Slot& slot = slots[hit.item];
    const int64_t anchor =
        ChooseAnchor(second.rule, second.unit, slot.num_steps, hit.remainder, second.seed,
                     static_cast<uint64_t>(first + i), second.stream_number);
    resolutions[i] = ResolutionOf(slot, hit.item, anchor, mass, first + i);
  }
}

__global__ void ResolveRowsKernel(const uint64_t* __restrict__ sums, const Slot* __restrict__ slots,
                                  int64_t num_slots, const int32_t* __restrict__ row_slots,
                                  int64_t num_rows, const TreeShape shape,
                                  const int64_t* __restrict__ coordinates, int64_t count,
                                  int64_t first, Resolution* __restrict__ resolutions) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    const Hit hit = DescendWarp(sums, shape, static_cast<uint64_t>(coordinates[i]), lane);
    if (lane != 0) continue;
    Require(hit.item < num_rows);
    const uint64_t mass = sums[hit.item];
    Require(hit.remainder < mass);  // else the coordinate was beyond the total
    Require(ResolveRow(slots, num_slots, row_slots[hit.item], hit.item, mass, first + i,
                       &resolutions[i]));
  }
}

}  // namespace

void Resolve(const uint64_t* sums, const Slot* slots, int64_t num_slots, const int64_t* coordinates,
             int64_t count, const AnchorRule& rule, int64_t unit, uint64_t seed,
             uint32_t stream_number, int64_t first, Resolution* resolutions, void* stream) {
  if (count == 0) return;
  ResolveKernel<<<Blocks(count * kWarp), kThreads, 0, AsStream(stream)>>>(
      sums, slots, num_slots, ShapeOfTree(num_slots), coordinates, count,
      Second{rule, unit, seed, stream_number}, first, resolutions);
  CheckLaunch("Resolve");
}

void ResolveRows(const uint64_t* sums, const Slot* slots, int64_t num_slots,
                 const int32_t* row_slots, int64_t num_rows, const int64_t* coordinates,
                 int64_t count, int64_t first, Resolution* resolutions, void* stream) {
  if (count == 0) return;
  ResolveRowsKernel<<<Blocks(count * kWarp), kThreads, 0, AsStream(stream)>>>(
      sums, slots, num_slots, row_slots, num_rows, ShapeOfTree(num_rows), coordinates, count, first,
      resolutions);
  CheckLaunch("ResolveRows");
}

}  // namespace gear::cuda
