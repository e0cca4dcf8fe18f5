// The table in the memory of one device: one block assigns places, the whole grid does the rest.
// Kernels pass values to the next one through the state.
#include "common/convert.h"
#include "common/counts_cuda.h"
#include "common/hash_table_cuda.h"
#include "common/launch_cuda.h"
#include "common/power.h"
#include "gather/gather.h"
#include "priorities/priorities.h"
#include "returns/returns.h"
#include "ring/ring_cuda.h"
#include "select/descend_cuda.h"
#include "select/select.h"
#include "select/tree_cuda.h"

namespace gear::cuda {
namespace {

constexpr unsigned kAll = 0xFFFFFFFFu;
constexpr int64_t kMostThreads =
    1 << 16;                        // of kernels whose amount of work is known only on the device
constexpr int kMostPlacers = 1024;  // threads of the block that places

__device__ int Lane() { return static_cast<int>(threadIdx.x) % kWarp; }

// Sum of the values of the lanes before this one.
__device__ int64_t SumBefore(int64_t value, int lane) {
  int64_t up_to = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t below = __shfl_up_sync(kAll, up_to, step);
    if (lane >= step) up_to += below;
  }
  return up_to - value;
}

// ---- adding -------------------------------------------------------------------------------------

// The first of the ids [tail, next) that is not evicted. Their begins ascend, so a warp probes 32
// at a time.
__device__ int64_t FirstThatStays(const Ring& ring, const RingShape& shape, int64_t tail,
                                  int64_t next, int64_t head, int64_t new_next, int lane) {
  int64_t low = tail, high = next;  // the result lies in [low, high]
  while (low < high) {
    const int64_t step = (high - low + kWarp - 1) / kWarp, probe = low + (lane + 1) * step - 1;
    const bool evicted =
        probe < high &&
        IsEvicted(shape, probe, ring.begins[probe % shape.num_slots], head, new_next);
    const int num_evicted = __popc(__ballot_sync(kAll, evicted));
    low += num_evicted * step;
    if (num_evicted < kWarp) high = Min(high, low + step - 1);
    low = Min(low, high);
  }
  return low;
}

// Sums that the warps of the placing block exchange in shared memory.
struct WarpSums {
  int64_t rows[kWarp], coming[kWarp];  // of each warp
  int64_t in_front[kWarp];  // rows before its first one that crosses the ring's end, or -1
};
static_assert(sizeof(WarpSums) == 3 * kWarp * sizeof(int64_t) && kMostPlacers <= kWarp * kWarp,
              "a lane for each warp of the block");

struct BlockSum {
  int64_t before, all;  // the values of the threads before this one, and of all
};

// `before`: of its own warp alone; `sums`: of the warps.
__device__ BlockSum SumOverWarps(const int64_t* sums, int64_t before, int lane) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t own = lane < static_cast<int>(blockDim.x) / kWarp ? sums[lane] : 0;
  const int64_t ahead = SumBefore(own, lane);
  return {before + __shfl_sync(kAll, ahead, warp), __shfl_sync(kAll, ahead + own, kWarp - 1)};
}

// Rows before the first trajectory of the block that crosses the ring's end, or -1. `before`: those
// before this one. The barrier also separates the sums of this round from those of the next.
__device__ int64_t RowsThatFit(WarpSums* sums, bool meets_end, int64_t before, int lane) {
  const unsigned ends = __ballot_sync(kAll, meets_end);
  const int64_t in_front =
      __shfl_sync(kAll, before, __ffs(static_cast<int>(ends | 1u << (kWarp - 1))) - 1);
  if (lane == 0) sums->in_front[threadIdx.x / kWarp] = ends != 0 ? in_front : -1;
  __syncthreads();
  const int64_t own = lane < static_cast<int>(blockDim.x) / kWarp ? sums->in_front[lane] : -1;
  const unsigned found = __ballot_sync(kAll, own >= 0);
  return found == 0 ? -1 : __shfl_sync(kAll, own, __ffs(static_cast<int>(found)) - 1);
}

// One block: the place of each trajectory, the evicted ones, and the items that change.
__global__ void __launch_bounds__(kMostPlacers)
    PlaceKernel(const Ring ring, const RingShape shape, const bool by_row,
                const int64_t* __restrict__ lengths, int64_t count, Placed* __restrict__ placed) {
  __shared__ WarpSums sums;
  const int lane = Lane(), warp = static_cast<int>(threadIdx.x) / kWarp;
  int64_t* state = ring.state;
  const int64_t old_head = state[kRingHead], old_next = state[kRingNext], tail = state[kRingTail];
  int64_t head = old_head, next = old_next;
  uint64_t refused = 0;
  for (int64_t first = 0; first < count; first += blockDim.x) {
    const int64_t i = first + threadIdx.x;
    const int64_t steps = i < count ? lengths[i] : 0;
    const bool is_length = steps >= 0 && steps <= shape.most_steps, comes = is_length && steps > 0;
    const int64_t rows = comes ? steps + shape.final_row : 0, in_warp = SumBefore(rows, lane);
    const unsigned coming = __ballot_sync(kAll, comes);
    refused += !is_length;
    if (lane == kWarp - 1) {
      sums.rows[warp] = in_warp + rows;
      sums.coming[warp] = __popc(coming);
    }
    __syncthreads();
    const auto [before, all] = SumOverWarps(sums.rows, in_warp, lane);
    const BlockSum ids = SumOverWarps(sums.coming, __popc(coming & ((1u << lane) - 1)), lane);
    const int64_t at = head % shape.num_rows;
    // Among trajectories that fit into the ring together, at most one crosses its end: it and those
    // after it begin at row 0 of the ring.
    const bool meets_end = comes && at + before + rows > shape.num_rows;
    const int64_t fit = RowsThatFit(&sums, meets_end, before, lane);
    const bool is_beyond = fit >= 0 && before >= fit;
    const int64_t left_out = fit >= 0 ? shape.num_rows - at - fit : 0;
    if (i < count) {
      placed[i] = {-1, 0, 0, -1, 0};
      if (comes) {
        const int64_t id = next + ids.before;
        placed[i] = {id % shape.num_slots, is_beyond ? before - fit : at + before, steps, id,
                     head + before + (is_beyond ? left_out : 0)};
      }
    }
    next += ids.all;
    head += all + left_out;
  }
  AddToCount(state, kRingRefused, refused);
  if (warp != 0) return;
  const int64_t stays = FirstThatStays(ring, shape, tail, old_next, head, next, lane);
  if (lane != 0) return;
  const auto begin_of = [&](int64_t id) {
    return id < old_next ? ring.begins[id % shape.num_slots] : old_head;
  };
  state[kRingEvictedFrom] = tail, state[kRingEvictedTo] = stays;
  state[kRingFreedFrom] = by_row ? begin_of(tail) : tail;
  state[kRingFreedTo] = by_row ? begin_of(stays) : stays;
  state[kRingAddedFrom] = by_row ? old_head : old_next;
  state[kRingAddedTo] = by_row ? head : next;
  state[kRingHead] = head, state[kRingNext] = next, state[kRingTail] = stays;
}

// Clears the evicted trajectories and the masses of their items.
__global__ void ClearKernel(const Ring ring, const RingShape shape, int64_t num_items) {
  int64_t* state = ring.state;
  const int64_t from = state[kRingEvictedFrom], to = state[kRingEvictedTo];
  uint64_t steps = 0, drawable = 0;  // modulo 2^64
  for (int64_t id = from + GlobalThread(); id < to; id += GlobalThreads()) {
    Slot& slot = ring.slots[id % shape.num_slots];
    slot.state = 0;
    steps -= static_cast<uint64_t>(slot.num_steps);
  }
  const int64_t first = state[kRingFreedFrom], end = state[kRingFreedTo];
  for (int64_t i = first + GlobalThread(); i < end; i += GlobalThreads()) {
    const int64_t item = i % num_items;
    drawable -= uint64_t{ring.sums[item] > 0};
    ring.sums[item] = 0;
    if (ring.priorities != nullptr) ring.priorities[item] = 0;
  }
  AddToCount(state, kRingSteps, steps);
  AddToCount(state + kRingCounts, cpu::kDrawable, drawable);
}

// Returns whether the item can be drawn.
__device__ uint64_t SetNew(const Ring& ring, int64_t item, uint64_t mass, uint32_t priority) {
  ring.sums[item] = mass;
  if (ring.priorities != nullptr) ring.priorities[item] = BitCast<float>(mass > 0 ? priority : 0u);
  return uint64_t{mass > 0};
}

// A warp for each added trajectory.
__global__ void FillKernel(const Ring ring, const RingShape shape, const RingRule rule,
                           const Placed* __restrict__ placed, int64_t count, int64_t initial) {
  const int lane = Lane();
  int64_t* state = ring.state;
  const int64_t highest = state[kRingCounts + cpu::kHighestPriority];
  const auto priority = static_cast<uint32_t>(initial < 0 ? highest : initial);
  const uint64_t mass = rule.has_priorities ? MassOfPriority(priority, rule.scale).value : 0;
  uint64_t steps = 0, drawable = 0;
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    const Placed place = placed[i];
    if (place.slot < 0) continue;
    if (lane == 0) {
      ring.slots[place.slot] = SlotOfPlaced(shape, place, state[kRingBatch]);
      ring.begins[place.slot] = place.begin;
      steps += static_cast<uint64_t>(place.num_steps);
      if (!rule.by_row) {
        const auto own =
            static_cast<uint64_t>(MassOfSlot(rule.anchors, rule.unit, place.num_steps));
        drawable += SetNew(ring, place.slot, rule.has_priorities && own > 0 ? mass : own, priority);
      }
    }
    if (!rule.by_row) continue;
    for (int64_t step = lane; step < place.num_steps; step += kWarp) {
      const int64_t row = place.first_row + step;
      ring.row_slots[row] = static_cast<int32_t>(place.slot);
      const bool is_anchor = IsAnchor(rule.anchors, place.num_steps, step);
      drawable += SetNew(ring, row, is_anchor ? mass : 0, priority);
    }
  }
  AddToCount(state, kRingSteps, steps);
  AddToCount(state + kRingCounts, cpu::kDrawable, drawable);
}

// The sum and the least non-zero of a node's children, in lane 0.
__device__ void SumAndLeast(const uint64_t* sums, const uint64_t* least_below, int lane,
                            uint64_t* sum, uint64_t* least) {
  *sum = sums[lane];
  *least = least_below != nullptr ? least_below[lane] - 1 : 0;  // as in IsLess
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    *sum += __shfl_down_sync(kAll, *sum, step);
    *least = Min(*least, __shfl_down_sync(kAll, *least, step));
  }
  *least += 1;
}

// A warp for each node of one level above the items that were freed and added: at most four runs of
// nodes, since each of the two may wrap round the end.
__global__ void MendKernel(const Ring ring, const TreeShape shape, int level, int64_t num_items) {
  const int lane = Lane(), shift = level * kFanOutBits;
  const uint64_t* below = ring.sums + shape.offset[level - 1];
  const uint64_t* least_below = nullptr;
  if (ring.minima != nullptr)
    least_below = level == 1 ? ring.sums : ring.minima + MinimaOffset(shape, level - 1);
#pragma unroll 1
  for (int run = 0; run < 4; ++run) {
    const int64_t from = ring.state[run < 2 ? kRingFreedFrom : kRingAddedFrom];
    const int64_t to = ring.state[run < 2 ? kRingFreedTo : kRingAddedTo];
    if (from >= to) continue;
    const int64_t first = to - from >= num_items ? 0 : from % num_items;
    const int64_t items = Min(to - from, num_items), end = first + items;
    int64_t low = first, high = Min(end, num_items);    // the part before the end of the ring
    if (run % 2 == 1) low = 0, high = end - num_items;  // and the one after it
    if (low >= high) continue;
    const int64_t last = (high - 1) >> shift;
    for (int64_t node = (low >> shift) + GlobalThread() / kWarp; node <= last;
         node += GlobalThreads() / kWarp) {
      uint64_t sum, least;
      SumAndLeast(below + node * kFanOut,
                  least_below != nullptr ? least_below + node * kFanOut : nullptr, lane, &sum,
                  &least);
      if (lane != 0) continue;
      ring.sums[shape.offset[level] + node] = sum;
      if (ring.minima != nullptr) ring.minima[MinimaOffset(shape, level) + node] = least;
    }
  }
}

// ---- drawing ------------------------------------------------------------------------------------

// A warp for each sample.
__global__ void SelectKernel(const Ring ring, const RingShape shape, const RingRule rule,
                             const RingDraw draw, const TreeShape tree, int64_t count,
                             Resolution* __restrict__ resolutions) {
  const int lane = Lane();
  const uint64_t total = TotalOfWarp(ring.sums, tree, lane);
  const int64_t first = ring.state[kRingSamples];
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    const int64_t number = (first + i) * draw.stride + draw.offset;
    if (total == 0) {  // a trap would take the process's whole context with it
      if (lane == 0) resolutions[i] = NoSample(number);
      continue;
    }
    const Word128 word =
        Philox(draw.seed, static_cast<uint64_t>(number), draw.stream, kForCoordinate);
    uint64_t point = Coordinate(word, total);
    if (draw.stratified)
      point = Stratify(point, total, static_cast<uint64_t>(i), static_cast<uint64_t>(count));
    const Hit hit = DescendWarp(ring.sums, tree, point, lane);
    if (lane != 0) continue;
    const uint64_t mass = ring.sums[hit.item];
    if (rule.by_row) {
      Require(hit.item < shape.num_rows);
      Require(ResolveRow(ring.slots, shape.num_slots, ring.row_slots[hit.item], hit.item, mass,
                         number, &resolutions[i]));
    } else {
      Require(hit.item < shape.num_slots);
      const Slot& slot = ring.slots[hit.item];
      const int64_t anchor = ChooseAnchor(rule.anchors, rule.unit, slot.num_steps, hit.remainder,
                                          draw.seed, static_cast<uint64_t>(number), draw.stream);
      resolutions[i] = ResolutionOf(slot, hit.item, anchor, mass, number);
    }
    // The greatest complement is that of the least mass.
    atomicMax(reinterpret_cast<unsigned long long*>(&ring.state[kRingLeast]),
              static_cast<unsigned long long>(~mass));
  }
}

// The least mass of the table: of the top of its minima.
__device__ uint64_t LeastOfTable(const Ring& ring, const TreeShape& tree) {
  const int top = tree.levels - 1;
  const uint64_t* nodes = top == 0 ? ring.sums : ring.minima + MinimaOffset(tree, top);
  uint64_t least = ~uint64_t{0};
  for (int64_t i = 0; i < tree.width[top]; ++i) least = Min(least, nodes[i] - 1);
  return least + 1;
}

__global__ void WeighKernel(const Ring ring, const RingDraw draw, const TreeShape tree,
                            const Resolution* __restrict__ resolutions, int64_t count,
                            float* __restrict__ weights) {
  const uint64_t total = TotalOfWarp(ring.sums, tree, Lane());
  const int64_t batch = Min(ring.state[kRingBatch], draw.num_betas - 1);
  const auto beta = static_cast<uint64_t>(draw.betas[batch]);
  uint64_t numerator = ~static_cast<uint64_t>(ring.state[kRingLeast]), divisor = 1;
  if (draw.normalize == kByTable) numerator = LeastOfTable(ring, tree);
  if (draw.normalize == kNotNormalized) {
    numerator = total;
    divisor = static_cast<uint64_t>(ring.state[kRingCounts + cpu::kDrawable]);
  }
  const int64_t log_ratio = total == 0 ? 0 : Log2(numerator) - Log2(divisor);
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const auto mass = static_cast<uint64_t>(resolutions[i].mass);
    weights[i] = total == 0 ? 0.0f : BitCast<float>(ImportanceBits(log_ratio, mass, beta));
  }
}

// One warp: updates the state after the batch.
__global__ void AdvanceKernel(const Ring ring, const TreeShape tree, int64_t count) {
  const uint64_t total = TotalOfWarp(ring.sums, tree, Lane());
  if (Lane() != 0) return;
  ring.state[kRingTotal] = static_cast<int64_t>(total);
  ring.state[kRingSamples] += count;
  ring.state[kRingBatch] += 1;
  ring.state[kRingEmpty] += total == 0;
  ring.state[kRingLeast] = 0;
}

// ---- updates ------------------------------------------------------------------------------------

// Sets the item of each sample, -1 where its value is invalid or its trajectory evicted, and finds
// the last one of each item.
__global__ void FindKernel(const Table table, const Ring ring, const RingShape shape, int64_t unit,
                           const Resolution* __restrict__ resolutions,
                           const float* __restrict__ values, int64_t count,
                           int64_t* __restrict__ items) {
  const auto follows = [](int64_t a, int64_t b) { return a > b; };
  uint64_t refused = 0, stale = 0;
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const auto bits = BitCast<uint32_t>(values[i]);
    const Resolution& r = resolutions[i];
    const PriorityUpdate update{r.slot, r.generation, r.anchor, bits};
    int64_t item = -1;
    if (!IsPriority(bits)) {
      ++refused;
    } else if (!IsCurrent(ring.slots, shape.num_slots, update)) {
      ++stale;
    } else {
      item = ItemOf(ring.slots, unit, update);
      table.Put(item, i, follows);
    }
    items[i] = item;
  }
  AddToCount(ring.state, kRingRefused, refused);
  AddToCount(ring.state + kRingCounts, cpu::kStale, stale);
}

__global__ void SetKernel(const Table table, const Ring ring, MassScale scale, const TreeShape tree,
                          const float* __restrict__ values, int64_t count,
                          const int64_t* __restrict__ items) {
  int64_t* counts = ring.state + kRingCounts;
  uint64_t applied = 0, clamped = 0, drawable = 0;  // drawable modulo 2^64
  int64_t highest = -1;
  for (int64_t i = GlobalThread(); i < count; i += GlobalThreads()) {
    const int64_t item = items[i];
    if (item < 0) continue;
    const uint32_t priority = OrderOf(BitCast<uint32_t>(values[i]));
    const Mass mass = MassOfPriority(priority, scale);
    ++applied;
    clamped += mass.clamped;
    highest = Max(highest, int64_t{priority});
    if (!table.IsLast(item, i)) continue;
    const uint64_t before = ring.sums[item];  // one thread an item
    ring.sums[item] = mass.value;
    ring.priorities[item] = BitCast<float>(priority);
    AddAbove(ring.sums, tree, item, mass.value - before);
    drawable += uint64_t{mass.value > 0} - uint64_t{before > 0};
  }
  AddToCount(counts, cpu::kApplied, applied);
  AddToCount(counts, cpu::kClamped, clamped);
  AddToCount(counts, cpu::kDrawable, drawable);
  RaiseCount(counts, cpu::kHighestPriority, highest);
}

}  // namespace

void RingAdd(const Ring& ring, const RingShape& shape, const RingRule& rule, const int64_t* lengths,
             int64_t count, int64_t initial, Placed* placed, void* stream) {
  if (count == 0) return;
  const int64_t num_items = ItemsOfRing(shape, rule);
  const TreeShape tree = ShapeOfTree(num_items);
  const int placers =
      static_cast<int>(Min<int64_t>((count + kWarp - 1) / kWarp * kWarp, kMostPlacers));
  PlaceKernel<<<1, placers, 0, AsStream(stream)>>>(ring, shape, rule.by_row, lengths, count,
                                                   placed);
  CheckLaunch("RingAdd");
  const int64_t most = Min(Max(num_items, shape.num_slots), kMostThreads);
  ClearKernel<<<Blocks(most), kThreads, 0, AsStream(stream)>>>(ring, shape, num_items);
  CheckLaunch("RingAdd");
  FillKernel<<<Blocks(count * kWarp), kThreads, 0, AsStream(stream)>>>(ring, shape, rule, placed,
                                                                       count, initial);
  CheckLaunch("RingAdd");
  for (int level = 1; level < tree.levels; ++level) {
    const int64_t nodes = Min(tree.width[level] * kWarp, kMostThreads);
    MendKernel<<<Blocks(nodes), kThreads, 0, AsStream(stream)>>>(ring, tree, level, num_items);
    CheckLaunch("RingAdd");
  }
}

void RingSelect(const Ring& ring, const RingShape& shape, const RingRule& rule,
                const RingDraw& draw, int64_t count, Resolution* resolutions, float* weights,
                void* stream) {
  if (count == 0) return;
  const TreeShape tree = ShapeOfTree(ItemsOfRing(shape, rule));
  SelectKernel<<<Blocks(count * kWarp), kThreads, 0, AsStream(stream)>>>(ring, shape, rule, draw,
                                                                         tree, count, resolutions);
  CheckLaunch("RingSelect");
  if (weights != nullptr) {
    WeighKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(ring, draw, tree, resolutions,
                                                                  count, weights);
    CheckLaunch("RingSelect");
  }
  AdvanceKernel<<<1, kWarp, 0, AsStream(stream)>>>(ring, tree, count);
  CheckLaunch("RingSelect");
}

int64_t RingUpdateScratch(int64_t count) { return count + TableWords(count); }

void RingUpdate(const Ring& ring, const RingShape& shape, const RingRule& rule,
                const Resolution* resolutions, const float* values, int64_t count, int64_t* scratch,
                void* stream) {
  if (count == 0) return;
  const int64_t num_items = ItemsOfRing(shape, rule), unit = rule.by_row ? kStep : kTrajectory;
  int64_t* items = scratch;
  const Table table = MakeTable(scratch + count, count, stream);
  FindKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(table, ring, shape, unit,
                                                               resolutions, values, count, items);
  CheckLaunch("RingUpdate");
  SetKernel<<<Blocks(count), kThreads, 0, AsStream(stream)>>>(
      table, ring, rule.scale, ShapeOfTree(num_items), values, count, items);
  CheckLaunch("RingUpdate");
  if (ring.minima != nullptr) MinimaAbove(ring.sums, num_items, items, count, ring.minima, stream);
}

}  // namespace gear::cuda
