// Draws from the table in the memory of one device, and updates of its priorities. Few samples or
// updates are one launch each; else kernels pass values to the next one through the state. Both run
// the same device functions.
#include "common/convert.h"
#include "common/hash_table_cuda.h"
#include "common/launch_cuda.h"
#include "common/power_cuda.h"
#include "priorities/priorities.h"
#include "ring/importance_weights_cuda.h"
#include "ring/ring.h"
#include "select/tree_cuda.h"

namespace gear::cuda {
namespace {

constexpr int64_t kMostFinished = 1024;  // samples that the last block of a draw weighs
constexpr int kMostUpdaters = 1024;      // updates of one block, and its threads
constexpr int64_t kMostSize = TableSize(kMostUpdaters);  // of its hash table

// ---- drawing ------------------------------------------------------------------------------------

// Draws a sample by a warp: its slot is one load of eight lanes, and its record one store of them.
// Returns the mass, in every lane. `keeps_log`: the record has the logarithm of the mass in the
// place of its number (LogInRecord); it is computed while the slot is under way.
__device__ uint64_t DrawSample(const Ring& ring, const RingDraw& draw, const TreeShape& tree,
                               const NodesOfWarp& top, uint64_t point, int64_t number,
                               bool keeps_log, const Faults& faults, Resolution* resolution,
                               int lane) {
  constexpr int kWords = sizeof(Slot) / sizeof(int64_t);
  static_assert(sizeof(Resolution) == sizeof(Slot), "eight lanes have a word of each");
  const int32_t* row_slots = ring.rule.by_row ? ring.row_slots : nullptr;
  const WarpHit drawn = DescendWarp(ring.sums, tree, top, point, row_slots, ring.NumItems(), lane);
  faults.Require(drawn.slot >= 0 && drawn.slot < ring.shape.num_slots, kSelectSlot, drawn.hit.item);
  const auto* words = reinterpret_cast<const int64_t*>(&ring.slots[drawn.slot]);
  const int64_t own = words[lane % kWords];
  const int64_t log = keeps_log ? Log2(drawn.mass) : 0;
  const auto word = [&](int k) { return __shfl_sync(kAllLanes, own, k); };
  const Slot slot{kCommitted, word(1), word(2), word(3), word(4), 0, 0, 0};  // what a record needs
  Resolution found{};
  faults.Require(ResolveItem(ring, draw, drawn.hit, drawn.slot, slot, drawn.mass, number, &found),
                 kSelectStep, drawn.hit.item);
  const int64_t last = keeps_log ? log : found.sample_number;
  const int64_t record[kWords] = {found.id,        found.slot,   found.generation, found.first_row,
                                  found.num_steps, found.anchor, found.mass,       last};
  int64_t mine = record[0];
#pragma unroll
  for (int k = 1; k < kWords; ++k) mine = lane == k ? record[k] : mine;
  if (lane < kWords) reinterpret_cast<int64_t*>(resolution)[lane] = mine;
  return drawn.mass;
}

// A warp for each sample. `finishes`: the last block advances the state, after it has weighed the
// samples unless `weights` are null. Else WeighKernel follows, and gets the least mass by the
// state.
__global__ void SelectKernel(const Ring ring, const RingDraw draw, const TreeShape tree,
                             int64_t count, const Faults faults, Resolution* resolutions,
                             bool finishes, float* weights) {
  alignas(16) __shared__ uint64_t words[kPowerWords];
  const int lane = LaneOfWarp();
  const bool weighs = finishes && weights != nullptr;
  PowerTables tables{};
  uint64_t beta = 0;
  if (weighs) {
    tables = BeginTables(words);
    beta = BetaOf(ring, draw);
  }
  const NodesOfWarp top = LoadTop(ring.sums, tree, lane);
  const uint64_t total = TotalOf(top);
  uint64_t greatest = 0;  // complement of a mass, which is that of the least mass
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    const int64_t number = NumberOf(draw, ring.state, i);
    if (total == 0) {  // a trap would take the process's whole context with it
      if (lane == 0) resolutions[i] = NoSample(number);
      continue;
    }
    const uint64_t point = PointOf(draw, number, total, i, count);
    const uint64_t mass =
        DrawSample(ring, draw, tree, top, point, number, weighs, faults, &resolutions[i], lane);
    greatest = Max(greatest, ~mass);
  }
  if (!finishes) {
    // Relaxed: the next kernel reads it.
    if (lane == 0)
      atomicMax(reinterpret_cast<unsigned long long*>(&ring.state[kRingLeast]),
                static_cast<unsigned long long>(greatest));
    return;
  }
  EndCopies();
  if (!IsLastBlock(&ring.state[kRingBlocks])) return;
  if (weighs) {
    WeighByBlock(ring, draw, tree, beta, total, resolutions, count, weights, LogInRecord{}, tables);
    // The records of no sample have their numbers.
    for (int64_t i = threadIdx.x; i < count && total != 0; i += blockDim.x)
      resolutions[i].sample_number = NumberOf(draw, ring.state, i);
    __syncthreads();  // the state is read above
  }
  if (threadIdx.x == 0) Advance(ring.state, total, count);
}

// A thread for each sample; the last block advances the state.
__global__ void WeighKernel(const Ring ring, const RingDraw draw, const TreeShape tree,
                            const Resolution* __restrict__ resolutions, int64_t count,
                            float* __restrict__ weights) {
  const uint64_t total = TotalOfWarp(ring.sums, tree, LaneOfWarp());
  const uint64_t least = ~static_cast<uint64_t>(ring.state[kRingLeast]);
  Weigh(ring, draw, tree, BetaOf(ring, draw), total, least, resolutions, count, weights,
        LogOfMass{}, TablesInMemory(), GlobalThread(), GlobalThreads());
  if (IsLastBlock(&ring.state[kRingBlocks]) && threadIdx.x == 0) Advance(ring.state, total, count);
}

// ---- updates ------------------------------------------------------------------------------------

// What an update reads.
struct Values {
  const Resolution* resolutions;
  const float* priorities;
  int64_t count;
};

// Adds up what has become of the updates of a kernel's threads. All lanes of a warp take part.
__device__ void CountRejected(const Ring& ring, int refused, int stale) {
  AddFewToCount(ring.state, kRingRefused, refused);
  AddFewToCount(ring.state + kRingCounts, kStale, stale);
}

__device__ void CountApplied(const Ring& ring, int applied, int clamped, int drawable) {
  int64_t* counts = ring.state + kRingCounts;
  AddFewToCount(counts, kApplied, applied);
  AddFewToCount(counts, kClamped, clamped);
  AddFewToCount(counts, kDrawable, drawable);
}

// Sets the item of each sample, -1 where its value is invalid or does not apply, and finds the last
// one of each item.
__device__ void FindItems(const Table& table, const Ring& ring, const Values& values,
                          int64_t* items, int64_t thread, int64_t threads) {
  const int64_t unit = ring.rule.by_row ? kStep : kTrajectory;
  int refused = 0;
  int stale = 0;
  int highest = -1;
  for (int64_t i = thread; i < values.count; i += threads) {
    const auto bits = BitCast<uint32_t>(values.priorities[i]);
    const Resolution& r = values.resolutions[i];
    const PriorityUpdate update{r.slot, r.generation, r.anchor, bits};
    int64_t item = -1;
    if (!IsPriority(bits)) {
      ++refused;
    } else if (!IsCurrent(ring.slots, ring.shape.num_slots, ring.rule.anchors, unit, update)) {
      ++stale;
      if (r.slot >= 0) highest = Max(highest, static_cast<int>(OrderOf(bits)));
    } else {
      item = ItemOf(ring.slots, unit, update);
      table.Put(item, i);
    }
    items[i] = item;
  }
  CountRejected(ring, refused, stale);
  RaiseCount(ring.state + kRingCounts, kHighestPriority, highest);
}

// Sets leaf and priority of an item, and adds the change to the sums above. Returns by how much the
// number of items with a mass grows.
__device__ int SetItem(const Ring& ring, const TreeShape& tree, int64_t item, uint32_t priority,
                       uint64_t mass, uint64_t before) {
  ring.sums[item] = mass;
  ring.priorities[item] = BitCast<float>(priority);
  AddAbove(ring.sums, tree, item, mass - before);
  return static_cast<int>(mass > 0) - static_cast<int>(before > 0);
}

// Sets the items of which an update is the last one.
__device__ void SetItems(const Table& table, const Ring& ring, const TreeShape& tree,
                         const Values& values, const int64_t* items, int64_t thread,
                         int64_t threads) {
  int applied = 0;
  int clamped = 0;
  int drawable = 0;
  int highest = -1;
  for (int64_t i = thread; i < values.count; i += threads) {
    const int64_t item = items[i];
    if (item < 0) continue;
    const bool is_last = table.IsLast(item, i);             // one thread an item
    const uint64_t before = is_last ? ring.sums[item] : 0;  // under way while the mass is computed
    const uint32_t priority = OrderOf(BitCast<uint32_t>(values.priorities[i]));
    const Mass mass = MassOfPriority(priority, ring.rule.scale);
    ++applied;
    clamped += mass.clamped;
    highest = Max(highest, static_cast<int>(priority));
    if (is_last) drawable += SetItem(ring, tree, item, priority, mass.value, before);
  }
  CountApplied(ring, applied, clamped, drawable);
  RaiseCount(ring.state + kRingCounts, kHighestPriority, highest);
}

__global__ void FindKernel(const Table table, const Ring ring, const Values values,
                           int64_t* __restrict__ items) {
  FindItems(table, ring, values, items, GlobalThread(), GlobalThreads());
}

__global__ void SetKernel(const Table table, const Ring ring, const TreeShape tree,
                          const Values values, const int64_t* __restrict__ items) {
  SetItems(table, ring, tree, values, items, GlobalThread(), GlobalThreads());
}

// By one block: the minima above items whose leaves have changed, level by level. Items that share
// a node write the same value to it; a level that has no more nodes than there are items is
// computed whole, each node once.
__device__ void MendMinima(const Ring& ring, const TreeShape& tree, const int64_t* items,
                           int64_t count) {
  const uint64_t* below = ring.sums;
  for (int level = 1; level < tree.levels; ++level) {
    uint64_t* minima = ring.minima + MinimaOffset(tree, level);
    const int64_t num_nodes = tree.width[level - 1] / kFanOut;
    const bool is_whole = num_nodes <= count;
    __syncthreads();  // the level below is complete
    ForEachNode(is_whole ? num_nodes : count, threadIdx.x, blockDim.x, [&](int64_t k) {
      const int64_t node = k < 0 || is_whole ? k : items[k] >> (level * kFanOutBits);
      const Node value = NodeAbove(nullptr, node >= 0 ? below + node * kFanOut : nullptr);
      if (node >= 0 && threadIdx.x % kNodeTeam == 0) minima[node] = value.least;
    });
    below = minima;
  }
}

// One block: all of an update of few samples, a thread for each, or more threads. A slot comes from
// device memory, an old mass at least from the L2 cache: masses are computed during the first load,
// and the last of equal items is found during the second one. `size`: of the hash table.
__global__ void __launch_bounds__(kMostUpdaters)
    UpdateKernel(const Ring ring, const TreeShape tree, const Values values, int size) {
  __shared__ uint32_t words[2 * kMostSize];
  __shared__ int64_t items[kMostUpdaters];
  alignas(16) __shared__ uint64_t logs[kPowerWords];
  const PowerTables tables = BeginTables(logs);
  const int64_t i = threadIdx.x;
  const bool is_one = i < values.count;
  const auto bits = is_one ? BitCast<uint32_t>(values.priorities[i]) : 0;
  const Resolution r = is_one ? values.resolutions[i] : NoSample(0);
  const bool has_slot = r.slot >= 0 && r.slot < ring.shape.num_slots;
  const Slot slot = has_slot ? ring.slots[r.slot] : Slot{};
  const Table table{words, words + size, static_cast<uint32_t>(size) - 1};
  for (int k = static_cast<int>(threadIdx.x); k < 2 * size; k += static_cast<int>(blockDim.x))
    words[k] = 0;
  EndCopies();
  __syncthreads();
  const uint32_t priority = OrderOf(bits);
  const Mass mass = MassOfPriority(priority, ring.rule.scale, tables);
  const int64_t unit = ring.rule.by_row ? kStep : kTrajectory;
  const bool is_valid = is_one && IsPriority(bits);
  const bool applies = is_valid && has_slot &&
                       IsCurrent(slot, ring.rule.anchors, unit,
                                 PriorityUpdate{r.slot, r.generation, r.anchor, bits});
  const int64_t item = !applies ? -1 : ring.rule.by_row ? slot.first_row + r.anchor : r.slot;
  const uint64_t before = applies ? ring.sums[item] : 0;
  if (applies) table.Put(item, i);
  if (is_one) items[i] = item;
  CountRejected(ring, is_one && !is_valid, is_valid && !applies);
  RaiseCount(ring.state + kRingCounts, kHighestPriority,
             is_valid && r.slot >= 0 ? static_cast<int>(priority) : -1);
  __syncthreads();
  int drawable = 0;
  if (applies && table.IsLast(item, i))
    drawable = SetItem(ring, tree, item, priority, mass.value, before);
  CountApplied(ring, applies, applies && mass.clamped, drawable);
  if (ring.minima != nullptr) MendMinima(ring, tree, items, values.count);
}

}  // namespace

void RingSelect(const Ring& ring, const RingDraw& draw, int64_t count, Resolution* resolutions,
                float* weights, void* stream) {
  if (count == 0) return;
  const TreeShape tree = ShapeOfTree(ring.NumItems());
  const bool finishes = weights == nullptr || count <= kMostFinished;
  Launch("RingSelect", SelectKernel, Blocks(count * kWarp), kThreads, stream, ring, draw, tree,
         count, FaultsOfProcess(), resolutions, finishes, weights);
  if (finishes) return;
  Launch("RingSelect", WeighKernel, Blocks(count), kThreads, stream, ring, draw, tree, resolutions,
         count, weights);
}

int64_t RingUpdateScratch(int64_t count) { return count + TableWords(count); }

void RingUpdate(const Ring& ring, const Resolution* resolutions, const float* values, int64_t count,
                int64_t* scratch, void* stream) {
  if (count == 0) return;
  if (count > kMostIndices)
    throw std::runtime_error("gear: an update must have fewer than 2^31 - 1 samples");
  const int64_t num_items = ring.NumItems();
  const TreeShape tree = ShapeOfTree(num_items);
  const Values given{resolutions, values, count};
  if (count <= kMostUpdaters) {
    // A thread for each sample at least, and where minima are repaired a team for its node.
    const int threads =
        ThreadsOf(ring.minima == nullptr ? count : count * kNodeTeam, kMostUpdaters);
    Launch("RingUpdate", UpdateKernel, 1, threads, stream, ring, tree, given,
           static_cast<int>(TableSize(count)));
    return;
  }
  int64_t* items = scratch;
  const Table table = MakeTable(scratch + count, count, stream);
  Launch("RingUpdate", FindKernel, Blocks(count), kThreads, stream, table, ring, given, items);
  Launch("RingUpdate", SetKernel, Blocks(count), kThreads, stream, table, ring, tree, given, items);
  if (ring.minima != nullptr) MinimaAbove(ring.sums, num_items, items, count, ring.minima, stream);
}

}  // namespace gear::cuda
