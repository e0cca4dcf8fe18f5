// Adding to the table in the memory of one device. Few rows are one launch of one block; else one
// block assigns places, the whole grid does the rest, and kernels pass values to the next one
// through the state. Both run the same device functions, over the threads of a block or a grid.
#include "common/convert.h"
#include "common/launch_cuda.h"
#include "common/power_cuda.h"
#include "priorities/priorities.h"
#include "ring/ring.h"
#include "select/tree_cuda.h"

namespace gear::cuda {
namespace {

// Threads of kernels whose amount of work is known only on the device.
constexpr int64_t kMostThreads = 1 << 16;
constexpr int kMostPlacers = 1024;             // threads of the block that places
constexpr int64_t kFewestPlacers = 4 * kWarp;  // a warp for each scheduler of a multiprocessor
// Rows that one block adds. It writes about 64 bytes a cycle, and 20 bytes a row.
constexpr int64_t kMostAdded = 1 << 14;

// The first of the ids [tail, next) that is not evicted. Their begins ascend, so a warp probes 32
// at a time.
__device__ int64_t FirstThatStays(const Ring& ring, int64_t tail, int64_t next, int64_t head,
                                  int64_t new_next, int lane) {
  int64_t low = tail, high = next;  // the result lies in [low, high]
  while (low < high) {
    const int64_t step = (high - low + kWarp - 1) / kWarp, probe = low + (lane + 1) * step - 1;
    const bool evicted =
        probe < high &&
        IsEvicted(ring.shape, probe, ring.begins[probe % ring.shape.num_slots], head, new_next);
    const int num_evicted = __popc(__ballot_sync(kAllLanes, evicted));
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
  return {before + __shfl_sync(kAllLanes, ahead, warp),
          __shfl_sync(kAllLanes, ahead + own, kWarp - 1)};
}

// Rows before the first trajectory of the block that crosses the ring's end, or -1. `before`: those
// before this one. The barrier also separates the sums of this round from those of the next.
__device__ int64_t RowsThatFit(WarpSums* sums, bool meets_end, int64_t before, int lane) {
  const unsigned ends = __ballot_sync(kAllLanes, meets_end);
  const int64_t in_front =
      __shfl_sync(kAllLanes, before, __ffs(static_cast<int>(ends | 1u << (kWarp - 1))) - 1);
  if (lane == 0) sums->in_front[threadIdx.x / kWarp] = ends != 0 ? in_front : -1;
  __syncthreads();
  const int64_t own = lane < static_cast<int>(blockDim.x) / kWarp ? sums->in_front[lane] : -1;
  const unsigned found = __ballot_sync(kAllLanes, own >= 0);
  return found == 0 ? -1 : __shfl_sync(kAllLanes, own, __ffs(static_cast<int>(found)) - 1);
}

// Where a place lies that is less than once round a ring after another place of it.
__device__ int64_t Round(int64_t place, int64_t size) {
  return place < size ? place : place - size;
}

// Items that an add frees and that it adds: numbers that never end, and the first items.
struct Changes {
  int64_t freed_from, freed_to, added_from, added_to;
  int64_t first_freed, first_added;
};

// The ring before and after an add. oldest: number of the first row of `tail`
struct Advanced {
  int64_t old_head, old_next, tail, oldest, head, next;
  int64_t head_row, next_slot, tail_slot;  // places of the first three in their rings
  int64_t generation;                      // how often `old_next` has been round its ring
};

__device__ Changes ChangesOf(const Ring& ring, const Advanced& to, int64_t stays) {
  const RingShape& shape = ring.shape;
  if (!ring.rule.by_row) return {to.tail, stays, to.old_next, to.next, to.tail_slot, to.next_slot};
  // At most as many are stored as there are slots.
  const int64_t begin = stays < to.old_next
                            ? ring.begins[Round(to.tail_slot + stays - to.tail, shape.num_slots)]
                            : to.old_head;
  // What is stored fits into the ring: its first row lies less than once round before the head.
  const int64_t back = to.head_row - (to.old_head - to.oldest);
  const int64_t first_freed = back < 0 ? back + shape.num_rows : back;
  return {to.oldest, begin, to.old_head, to.head, first_freed, to.head_row};
}

// By one thread: the state after an add.
__device__ void SetPlaced(int64_t* state, const Advanced& to, int64_t stays) {
  state[kRingHead] = to.head, state[kRingNext] = to.next, state[kRingTail] = stays;
}

// By one block: the place of each trajectory.
__device__ Advanced Place(const Ring& ring, const int64_t* lengths, int64_t count, Placed* placed,
                          WarpSums* sums) {
  const RingShape& shape = ring.shape;
  const int lane = LaneOfWarp(), warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t* state = ring.state;
  Advanced to{state[kRingHead], state[kRingNext], state[kRingTail], 0, 0, 0, 0, 0, 0, 0};
  // One division for three remainders and a quotient: a lane for each.
  const int64_t number = lane == 0 ? to.old_head : lane == 1 ? to.old_next : to.tail;
  const int64_t size = lane == 0 ? shape.num_rows : shape.num_slots;
  const int64_t round = number / size;
  const int64_t place = number - round * size;
  to.head_row = __shfl_sync(kAllLanes, place, 0);
  to.next_slot = __shfl_sync(kAllLanes, place, 1);
  to.tail_slot = __shfl_sync(kAllLanes, place, 2);
  to.generation = __shfl_sync(kAllLanes, round, 1);
  // Used after the scan: it is under way meanwhile.
  to.oldest = to.tail < to.old_next ? ring.begins[to.tail_slot] : to.old_head;
  int64_t head = to.old_head, next = to.old_next;
  int64_t at = to.head_row;  // of `head`
  uint64_t refused = 0;
  for (int64_t first = 0; first < count; first += blockDim.x) {
    const int64_t i = first + threadIdx.x;
    const int64_t steps = i < count ? lengths[i] : 0;
    const bool is_length = steps >= 0 && steps <= shape.most_steps, comes = is_length && steps > 0;
    const int64_t rows = comes ? steps + shape.final_row : 0, in_warp = SumBefore(rows, lane);
    const unsigned coming = __ballot_sync(kAllLanes, comes);
    refused += !is_length;
    if (lane == kWarp - 1) {
      sums->rows[warp] = in_warp + rows;
      sums->coming[warp] = __popc(coming);
    }
    __syncthreads();
    const auto [before, all] = SumOverWarps(sums->rows, in_warp, lane);
    const BlockSum ids = SumOverWarps(sums->coming, __popc(coming & ((1u << lane) - 1)), lane);
    // Among trajectories that fit into the ring together, at most one crosses its end: it and those
    // after it begin at row 0 of the ring.
    const bool meets_end = comes && at + before + rows > shape.num_rows;
    const int64_t fit = RowsThatFit(sums, meets_end, before, lane);
    const bool is_beyond = fit >= 0 && before >= fit;
    const int64_t left_out = fit >= 0 ? shape.num_rows - at - fit : 0;
    if (i < count) {
      placed[i] = {-1, 0, 0, -1, 0};
      if (comes) {
        const int64_t id = next + ids.before;
        // At most as many are added as there are slots.
        placed[i] = {Round(to.next_slot + id - to.old_next, shape.num_slots),
                     is_beyond ? before - fit : at + before, steps, id,
                     head + before + (is_beyond ? left_out : 0)};
      }
    }
    next += ids.all;
    head += all + left_out;
    at = Round(at + all + left_out, shape.num_rows);
  }
  AddToCount(ring.state, kRingRefused, refused);
  to.head = head, to.next = next;
  return to;
}

// One block: the place of each trajectory, the evicted ones, and the items that change.
__global__ void __launch_bounds__(kMostPlacers)
    PlaceKernel(const Ring ring, const int64_t* __restrict__ lengths, int64_t count,
                Placed* __restrict__ placed) {
  __shared__ WarpSums sums;
  const Advanced to = Place(ring, lengths, count, placed, &sums);
  if (threadIdx.x >= kWarp) return;
  const int64_t stays = FirstThatStays(ring, to.tail, to.old_next, to.head, to.next, LaneOfWarp());
  if (threadIdx.x != 0) return;
  int64_t* state = ring.state;
  const Changes changes = ChangesOf(ring, to, stays);
  state[kRingEvictedFrom] = to.tail, state[kRingEvictedTo] = stays;
  state[kRingFreedFrom] = changes.freed_from, state[kRingFreedTo] = changes.freed_to;
  state[kRingAddedFrom] = changes.added_from, state[kRingAddedTo] = changes.added_to;
  SetPlaced(state, to, stays);
}

__device__ Changes ChangesOf(const int64_t* state, int64_t num_items) {
  const int64_t freed = state[kRingFreedFrom], added = state[kRingAddedFrom];
  return {
      freed, state[kRingFreedTo], added, state[kRingAddedTo], freed % num_items, added % num_items};
}

// Clears a trajectory that is evicted. Returns its steps.
__device__ uint64_t ClearSlot(const Ring& ring, int64_t at) {
  Slot& slot = ring.slots[at];
  slot.state = 0;
  return static_cast<uint64_t>(slot.num_steps);
}

// Adds what leaves have changed by, modulo 2^64, to the sums above: those of a warp that share a
// node are added first, most often all. Sums are integers, so their order does not matter. All
// lanes of the warp take part; a change of 0 is none.
__device__ void AddDifferences(const Ring& ring, const TreeShape& tree, int64_t item,
                               uint64_t change) {
  const int lane = LaneOfWarp();
  unsigned left = __ballot_sync(kAllLanes, change != 0);
  while (left != 0) {  // alike in all lanes
    const int64_t node = item >> kFanOutBits;
    const int64_t shared = __shfl_sync(kAllLanes, node, __ffs(static_cast<int>(left)) - 1);
    const bool is_of_it = change != 0 && node == shared;
    const uint64_t sum = __shfl_sync(kAllLanes, SumOfWarp(is_of_it ? change : 0), 0);
    const int level = lane + 1;  // a lane for each
    if (level < tree.levels && sum != 0)
      AtomicAdd(&ring.sums[tree.offset[level] + (shared >> (lane * kFanOutBits))], sum);
    left &= ~__ballot_sync(kAllLanes, is_of_it);
  }
}

// Clears the masses of the freed items. `tree`: the sums above are changed too, or null.
__device__ void ClearItems(const Ring& ring, const Changes& changes, const TreeShape* tree,
                           int64_t num_items, int64_t thread, int64_t threads) {
  uint64_t drawable = 0;  // modulo 2^64
  const int64_t count = changes.freed_to - changes.freed_from;
  const int lane = static_cast<int>(thread % kWarp);
  for (int64_t first = thread - lane; first < count; first += threads) {
    const int64_t i = first + lane;
    const int64_t item = i < count ? Round(changes.first_freed + i, num_items) : 0;
    uint64_t before = 0;
    if (i < count) {
      before = ring.sums[item];
      ring.sums[item] = 0;
      if (ring.priorities != nullptr) ring.priorities[item] = 0;
    }
    drawable -= uint64_t{before > 0};
    if (tree != nullptr) AddDifferences(ring, *tree, item, -before);
  }
  AddToCount(ring.state + kRingCounts, kDrawable, drawable);
}

// Clears the evicted trajectories and the masses of their items.
__global__ void ClearKernel(const Ring ring, int64_t num_items) {
  const int64_t from = ring.state[kRingEvictedFrom], to = ring.state[kRingEvictedTo];
  uint64_t steps = 0;  // modulo 2^64
  for (int64_t id = from + GlobalThread(); id < to; id += GlobalThreads())
    steps -= ClearSlot(ring, id % ring.shape.num_slots);
  AddToCount(ring.state, kRingSteps, steps);
  ClearItems(ring, ChangesOf(ring.state, num_items), nullptr, num_items, GlobalThread(),
             GlobalThreads());
}

// Returns whether the item can be drawn.
__device__ uint64_t SetNew(const Ring& ring, int64_t item, uint64_t mass, uint32_t priority) {
  ring.sums[item] = mass;
  if (ring.priorities != nullptr) ring.priorities[item] = BitCast<float>(mass > 0 ? priority : 0u);
  return uint64_t{mass > 0};
}

// The priority of new items, and its mass.
struct Initial {
  uint64_t mass;
  uint32_t priority;
};

__device__ Initial InitialOf(const Ring& ring, int64_t initial, const PowerTables& tables) {
  const auto priority = static_cast<uint32_t>(initial < 0 ? ring.state[kRingInitial] : initial);
  if (!ring.rule.has_priorities) return {0, priority};
  return {MassOfPriority(priority, ring.rule.scale, tables).value, priority};
}

// A quarter of a slot.
struct alignas(16) Words {
  int64_t first, second;
};

// Sets the slots and begins of the added trajectories, a lane for 16 bytes: a warp writes eight
// slots that most often follow each other, with one store. `generation_of(place)`: of its slot.
template <typename GenerationOf>
__device__ void SetSlots(const Ring& ring, const Placed* placed, int64_t count,
                         const GenerationOf& generation_of, int64_t thread, int64_t threads) {
  constexpr int kParts = sizeof(Slot) / sizeof(Words);
  static_assert(kParts == 4, "a slot is four vectors");
  const int64_t born = ring.state[kRingBatch];
  uint64_t steps = 0;
#pragma unroll 1
  for (int64_t i = thread; i < count * kParts; i += threads) {
    const Placed& place = placed[i / kParts];
    const auto part = static_cast<int>(i % kParts);
    if (place.slot < 0) continue;
    Words words{0, born};
    if (part == 0) words = {kCommitted, generation_of(place)};
    if (part == 1) words = {place.id, place.first_row};
    if (part == 2) words = {place.num_steps, place.num_steps + ring.shape.final_row};
    reinterpret_cast<Words*>(&ring.slots[place.slot])[part] = words;
    if (part != 0) continue;
    ring.begins[place.slot] = place.begin;
    steps += static_cast<uint64_t>(place.num_steps);
  }
  AddToCount(ring.state, kRingSteps, steps);
}

// Sets the items of the added trajectories: a team of 2^`bits` lanes for each, at most a warp.
// `tree`: the sums above are changed too, from masses that were 0, or null.
__device__ void Fill(const Ring& ring, const Placed* placed, int64_t count, Initial first,
                     const TreeShape* tree, int bits, int64_t thread, int64_t threads) {
  const RingRule& rule = ring.rule;
  const int team = 1 << bits;
  const int lane = static_cast<int>(thread) & (team - 1);
  uint64_t drawable = 0;
  const auto set = [&](int64_t item, uint64_t mass, bool is_one) {
    if (is_one) drawable += SetNew(ring, item, mass, first.priority);
    if (tree != nullptr) AddDifferences(ring, *tree, item, is_one ? mass : 0);
  };
  const int64_t of_warp = thread / kWarp << (kWarpBits - bits);  // first trajectory of the warp
  const int own = static_cast<int>(thread % kWarp) >> bits;
  for (int64_t begin = of_warp; begin < count; begin += threads >> bits) {
    const int64_t i = begin + own;
    const Placed place = i < count ? placed[i] : Placed{-1, 0, 0, -1, 0};
    const bool is_added = place.slot >= 0;
    if (!rule.by_row) {
      const auto mass = static_cast<uint64_t>(MassOfSlot(rule.anchors, rule.unit, place.num_steps));
      set(place.slot, rule.has_priorities && mass > 0 ? first.mass : mass, is_added && lane == 0);
      continue;
    }
    for (int64_t step = lane; __ballot_sync(kAllLanes, is_added && step < place.num_steps) != 0;
         step += team) {
      const bool is_step = is_added && step < place.num_steps;
      const int64_t row = place.first_row + step;
      if (is_step) ring.row_slots[row] = static_cast<int32_t>(place.slot);
      const bool is_anchor = is_step && IsAnchor(rule.anchors, place.num_steps, step);
      set(row, is_anchor ? first.mass : 0, is_step);
    }
  }
  AddToCount(ring.state + kRingCounts, kDrawable, drawable);
}

__global__ void FillKernel(const Ring ring, const Placed* __restrict__ placed, int64_t count,
                           int64_t initial, int bits) {
  SetSlots(
      ring, placed, count, [&](const Placed& place) { return place.id / ring.shape.num_slots; },
      GlobalThread(), GlobalThreads());
  Fill(ring, placed, count, InitialOf(ring, initial, TablesInMemory()), nullptr, bits,
       GlobalThread(), GlobalThreads());
}

// The nodes of a level above a run of items, which may go on at item 0 after the last one.
struct NodeRun {
  int64_t first, count, num_nodes;  // num_nodes: of the level, that have items

  __device__ int64_t operator[](int64_t k) const {
    return first + k < num_nodes ? first + k : first + k - num_nodes;
  }
};

// Above `count` items from `first` on.
__device__ NodeRun NodesAbove(int64_t first, int64_t count, int64_t num_items, int shift) {
  const int64_t num_nodes = ((num_items - 1) >> shift) + 1;
  if (count <= 0) return {0, 0, num_nodes};
  if (count >= num_items) return {0, num_nodes, num_nodes};
  const int64_t last = first + count - 1;
  const int64_t node = first >> shift;
  if (last < num_items) return {node, (last >> shift) - node + 1, num_nodes};
  return {node, num_nodes - node + ((last - num_items) >> shift) + 1, num_nodes};
}

// Nodes of one level above the items that were freed and added: sums and minima from their
// children, so that nothing depends on an order.
__device__ void Mend(const Ring& ring, const TreeShape& tree, int level, int64_t num_items,
                     const Changes& changes, int64_t thread, int64_t threads) {
  const int shift = level * kFanOutBits;
  const uint64_t* below = ring.sums + tree.offset[level - 1];
  const uint64_t* least_below =
      ring.minima == nullptr ? nullptr : MinimaLevel(ring.sums, ring.minima, tree, level - 1);
  const NodeRun freed =
      NodesAbove(changes.first_freed, changes.freed_to - changes.freed_from, num_items, shift);
  const NodeRun added =
      NodesAbove(changes.first_added, changes.added_to - changes.added_from, num_items, shift);
  ForEachNode(freed.count + added.count, thread, threads, [&](int64_t k) {
    const bool is_one = k >= 0;
    const int64_t node = !is_one ? 0 : k < freed.count ? freed[k] : added[k - freed.count];
    const int64_t child = node * kFanOut;
    const Node value = NodeAbove(is_one ? below + child : nullptr,
                                 is_one && least_below != nullptr ? least_below + child : nullptr);
    if (!is_one || thread % kNodeTeam != 0) return;
    ring.sums[tree.offset[level] + node] = value.sum;
    if (least_below != nullptr) ring.minima[MinimaOffset(tree, level) + node] = value.least;
  });
}

__global__ void MendKernel(const Ring ring, const TreeShape tree, int level, int64_t num_items) {
  Mend(ring, tree, level, num_items, ChangesOf(ring.state, num_items), GlobalThread(),
       GlobalThreads());
}

// By one block: clears the trajectories that are evicted, a thread for each. Returns the first one
// that stays. `sums`: their use before is separated by a barrier. `meanwhile`: called by the last
// warp, which has the fewest of them, before the barrier.
template <typename Meanwhile>
__device__ int64_t Evict(const Ring& ring, const Advanced& to, WarpSums* sums,
                         const Meanwhile& meanwhile) {
  // Each has a row at least, so begins ascend by one or more: no later one can be evicted.
  const int64_t by_rows = to.head - ring.shape.num_rows - to.oldest;
  const int64_t end =
      Min(to.old_next, Max(to.tail + Max<int64_t>(by_rows, 0), to.next - ring.shape.num_slots));
  uint64_t steps = 0;  // modulo 2^64
  int64_t evicted = 0;
  for (int64_t id = to.tail + threadIdx.x; id < end; id += blockDim.x) {
    const int64_t at = Round(to.tail_slot + id - to.tail, ring.shape.num_slots);
    if (!IsEvicted(ring.shape, id, ring.begins[at], to.head, to.next)) break;
    steps -= ClearSlot(ring, at);
    ++evicted;
  }
  if (threadIdx.x / kWarp == blockDim.x / kWarp - 1) meanwhile();
  AddToCount(ring.state, kRingSteps, steps);
  const auto of_warp = static_cast<int64_t>(SumOfWarp(static_cast<uint64_t>(evicted)));
  if (LaneOfWarp() == 0) sums->coming[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  return to.tail + SumOverWarps(sums->coming, 0, LaneOfWarp()).all;
}

// One block: all of an add of few rows. Without minima the sums get the differences of their
// leaves, which nothing waits for; with them, each level is made of the one below.
__global__ void __launch_bounds__(kMostPlacers)
    AddKernel(const Ring ring, const __grid_constant__ TreeShape tree,
              const int64_t* __restrict__ lengths, int64_t count, int64_t initial, int bits,
              int64_t num_items, Placed* __restrict__ placed) {
  __shared__ WarpSums sums;
  __shared__ Changes changes;  // not in registers, of which the tree needs all
  __shared__ Initial first;
  __shared__ Placed places[kMostPlacers];
  alignas(16) __shared__ uint64_t logs[kPowerWords];
  const PowerTables tables = BeginTables(logs);
  const bool by_differences = ring.minima == nullptr;
  const Advanced to = Place(ring, lengths, count, places, &sums);
  EndCopies();
  __syncthreads();  // the sums are read above
  const int64_t stays = Evict(ring, to, &sums, [&] {
    const Initial of_add = InitialOf(ring, initial, tables);
    if (LaneOfWarp() == 0) first = of_add;
  });
  const Changes own = ChangesOf(ring, to, stays);
  if (threadIdx.x == 0) {
    changes = own;
    SetPlaced(ring.state, to, stays);  // barriers ago all have read it
  }
  // Whole lines: a thread for each word, not for each place.
  constexpr int kWords = sizeof(Placed) / sizeof(int64_t);
  for (int64_t i = threadIdx.x; i < count * kWords; i += blockDim.x)
    reinterpret_cast<int64_t*>(placed)[i] = reinterpret_cast<const int64_t*>(places)[i];
  ClearItems(ring, own, by_differences ? &tree : nullptr, num_items, threadIdx.x, blockDim.x);
  __syncthreads();  // what is cleared may be added again; begins are read above
  // Slots of an add follow each other, at most once round the ring.
  SetSlots(
      ring, places, count,
      [&](const Placed& place) { return to.generation + (place.slot < to.next_slot ? 1 : 0); },
      threadIdx.x, blockDim.x);
  Fill(ring, places, count, first, by_differences ? &tree : nullptr, bits, threadIdx.x, blockDim.x);
  if (by_differences) return;
  for (int level = 1; level < tree.levels; ++level) {
    __syncthreads();  // the level below is complete
    Mend(ring, tree, level, num_items, changes, threadIdx.x, blockDim.x);
  }
}

}  // namespace

void RingAdd(const Ring& ring, const int64_t* lengths, int64_t count, int64_t initial,
             Placed* placed, void* stream) {
  if (count == 0) return;
  if (reinterpret_cast<uintptr_t>(ring.slots) % sizeof(Words) != 0)
    throw std::runtime_error("gear: slots must be aligned to 16 bytes");
  const int64_t num_items = ring.NumItems();
  const TreeShape tree = ShapeOfTree(num_items);
  // Lanes of a trajectory: one for each of its items, at most a warp.
  const int64_t items = ring.rule.by_row ? ring.shape.most_steps : 1;
  int bits = 0;
  while (bits < kWarpBits && int64_t{1} << bits < items) ++bits;
  if (count <= kMostPlacers &&
      count * (ring.shape.most_steps + ring.shape.final_row) <= kMostAdded) {
    // No more warps than have work, because each executes the whole kernel.
    const int threads = ThreadsOf(Max(count * items, kFewestPlacers), kMostPlacers);
    Launch("RingAdd", AddKernel, 1, threads, stream, ring, tree, lengths, count, initial, bits,
           num_items, placed);
    return;
  }
  const int placers = ThreadsOf(count, kMostPlacers);
  Launch("RingAdd", PlaceKernel, 1, placers, stream, ring, lengths, count, placed);
  const int64_t most = Min(Max(num_items, ring.shape.num_slots), kMostThreads);
  Launch("RingAdd", ClearKernel, Blocks(most), kThreads, stream, ring, num_items);
  Launch("RingAdd", FillKernel, Blocks(count << bits), kThreads, stream, ring, placed, count,
         initial, bits);
  for (int level = 1; level < tree.levels; ++level) {
    const int64_t nodes = Min(tree.width[level] * kNodeTeam, kMostThreads);
    Launch("RingAdd", MendKernel, Blocks(nodes), kThreads, stream, ring, tree, level, num_items);
  }
}

}  // namespace gear::cuda
