// A step of every environment, added to its open trajectory: one block plans the steps and what
// they evict, the whole grid does the rest. Kernels pass values on in the state and in `placed`.
#include "ring/ring.h"

#include "common/convert.h"
#include "common/launch_cuda.h"
#include "common/power.h"
#include "ring/cleared_masses_cuda.h"

namespace gear::cuda {
namespace {

constexpr int64_t kMostThreads =
    1 << 16;                         // of kernels whose amount of work is known only on the device
constexpr int kMostPlanners = 1024;  // threads of the block that plans

// One block: the place of each step, and the first id that is not evicted. Ids follow the order of
// the environments, so a round counts the beginning trajectories of its warps before it assigns.
__global__ void __launch_bounds__(kMostPlanners)
    PlanKernel(const Ring ring, const OpenRing open, const EnvSteps steps,
               PlacedStep* __restrict__ placed) {
  const RingShape& shape = ring.shape;
  __shared__ int64_t beginning[kWarp];  // in each warp
  __shared__ int64_t needed[kWarp];     // first id that stays, of each warp
  const int lane = LaneOfWarp();
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  int64_t* state = ring.state;
  const int64_t part = shape.num_rows / steps.num_envs, tail = state[kRingTail];
  int64_t next = state[kRingNext], stays = tail;
  for (int64_t first = 0; first < steps.num_envs; first += blockDim.x) {
    const int64_t env = first + threadIdx.x;
    PlacedStep place = kNoStep;
    bool begins = false;
    if (env < steps.num_envs) {
      const OpenTrajectory opened = open.opened[env];
      if (HasStep(steps, opened, env)) {
        const int64_t at = opened.id % shape.num_slots;
        const Slot slot = ring.slots[at];
        const bool is_open = IsOpen(opened, slot);
        begins = !is_open || opened.num_steps >= shape.most_steps;
        if (begins) {
          if (is_open && open.truncations != nullptr)
            open.truncations[slot.first_row + opened.num_steps - 1] = true;
          const int64_t row = BeginInPart(shape, opened, env, part);
          place = {0, row, 1, 0, row, 0};
          stays = Max(stays, AfterOwner(ring.slots[open.owners[row]], row));
        } else {
          place = {at,
                   slot.first_row + opened.num_steps,
                   1,
                   opened.id,
                   slot.first_row,
                   opened.num_steps};
        }
        const int64_t last = place.row + shape.final_row;
        stays = Max(stays, AfterOwner(ring.slots[open.owners[last]], last));
      }
    }
    const unsigned in_warp = __ballot_sync(kAllLanes, begins);
    if (lane == 0) beginning[warp] = __popc(in_warp);
    __syncthreads();
    int64_t before = 0, all = 0;
    for (int other = 0; other < num_warps; ++other) {
      before += other < warp ? beginning[other] : 0;
      all += beginning[other];
    }
    __syncthreads();  // the next round writes the counts again
    if (begins) {
      place.id = next + before + __popc(in_warp & ((1u << lane) - 1));
      place.slot = place.id % shape.num_slots;
    }
    if (env < steps.num_envs) placed[env] = place;
    next += all;
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2)
    stays = Max(stays, __shfl_down_sync(kAllLanes, stays, step));
  if (lane == 0) needed[warp] = stays;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int other = 0; other < num_warps; ++other) stays = Max(stays, needed[other]);
  stays = Max(stays, OldestInSlots(shape, next, steps.num_envs));
  state[kRingEvictedFrom] = tail, state[kRingEvictedTo] = stays;
  state[kRingNext] = next, state[kRingTail] = stays;
}

// A warp for each evicted trajectory: its items lose their masses. The slot's extent stays.
__global__ void EvictKernel(const Ring ring) {
  const int lane = LaneOfWarp();
  const bool by_row = ring.rule.by_row;
  int64_t* state = ring.state;
  const int64_t from = state[kRingEvictedFrom], to = state[kRingEvictedTo];
  uint64_t steps = 0, drawable = 0;  // modulo 2^64
  for (int64_t id = from + GlobalThread() / kWarp; id < to; id += GlobalThreads() / kWarp) {
    const int64_t at = id % ring.shape.num_slots;
    Slot& slot = ring.slots[at];
    if (lane == 0) {
      slot.state = 0;
      steps -= static_cast<uint64_t>(slot.num_steps);
    }
    drawable -= by_row ? ClearItems(ring, slot.first_row, slot.num_steps, lane, kWarp)
                       : ClearItems(ring, at, 1, lane, kWarp);
  }
  AddToCount(state, kRingSteps, steps);
  AddToCount(state + kRingCounts, kDrawable, drawable);
}

// Sets an item; returns by how much the number of items with a mass grows, modulo 2^64.
__device__ uint64_t SetItem(const Ring& ring, int64_t item, uint64_t mass, uint32_t priority) {
  const uint64_t before = ring.sums[item];
  ring.sums[item] = mass;
  if (ring.priorities != nullptr) ring.priorities[item] = BitCast<float>(mass > 0 ? priority : 0u);
  return uint64_t{mass > 0} - uint64_t{before > 0};
}

// A warp for each environment: its slot, its open trajectory, and the items that its step changes.
__global__ void ExtendKernel(const Ring ring, const OpenRing open, const EnvSteps steps,
                             int64_t initial, PlacedStep* __restrict__ placed,
                             int64_t* __restrict__ begun) {
  const RingShape& shape = ring.shape;
  const RingRule& rule = ring.rule;
  const int lane = LaneOfWarp();
  int64_t* state = ring.state;
  const int64_t part = shape.num_rows / steps.num_envs, stays = state[kRingTail];
  const auto priority = static_cast<uint32_t>(initial < 0 ? state[kRingInitial] : initial);
  // One warp of the block computes it.
  __shared__ uint64_t shared_mass;
  if (threadIdx.x / kWarp == 0) {
    const uint64_t own = rule.has_priorities ? MassOfPriority(priority, rule.scale).value : 0;
    if (lane == 0) shared_mass = own;
  }
  __syncthreads();
  const uint64_t mass = shared_mass;
  uint64_t added = 0, dropped = 0, drawable = 0;
  for (int64_t env = GlobalThread() / kWarp; env < steps.num_envs; env += GlobalThreads() / kWarp) {
    const PlacedStep place = placed[env];
    const int64_t num_steps = place.step + 1;
    const bool is_dropped = place.slot >= 0 && place.id < stays,
               is_added = place.slot >= 0 && !is_dropped;
    __syncwarp();  // all lanes have read what the first one writes
    if (lane == 0) {
      OpenTrajectory& opened = open.opened[env];
      const bool begins = is_added && place.step == 0;
      begun[3 * env] = begins ? place.slot : -1;
      begun[3 * env + 1] = begins ? place.row : 0;
      begun[3 * env + 2] = begins ? 1 : 0;
      const int64_t ends = place.slot >= 0 && steps.Ends(env) ? 1 : 0;
      if (place.slot < 0) {
        if (steps.Given(env)) opened.ended = 0;
      } else if (is_dropped) {
        placed[env] = kNoStep;
        opened.num_steps = 0, opened.ended = ends;
        ++dropped;
      } else {
        Slot& slot = ring.slots[place.slot];
        if (begins) {
          slot = {kCommitted, place.id / shape.num_slots, place.id, place.row, 0, 0,
                  0,          state[kRingBatch]};
          open.owners[place.row] = static_cast<int32_t>(place.slot);
        }
        open.owners[place.row + shape.final_row] = static_cast<int32_t>(place.slot);
        slot.num_steps = num_steps, slot.num_rows = num_steps + shape.final_row;
        opened = {ends != 0 ? 0 : num_steps, place.id,
                  place.first_row - env * part + num_steps + shape.final_row, ends};
        ++added;
        if (!rule.by_row) {
          const auto own = static_cast<uint64_t>(MassOfSlot(rule.anchors, rule.unit, num_steps));
          if (!rule.has_priorities)
            drawable += SetItem(ring, place.slot, own, 0);
          else if (own == 0 || MassOfSlot(rule.anchors, rule.unit, num_steps - 1) == 0)
            drawable += SetItem(ring, place.slot, own > 0 ? mass : 0, priority);
        }
      }
    }
    if (!rule.by_row || !is_added) continue;
    const StepRun run = ChangedAnchors(rule.anchors, num_steps);
    for (int64_t step = run.first + lane; step < run.first + run.count; step += kWarp)
      if (AnchorChanges(rule.anchors, num_steps, step))
        drawable += SetItem(ring, place.first_row + step,
                            IsAnchor(rule.anchors, num_steps, step) ? mass : 0, priority);
  }
  AddToCount(state, kRingSteps, added);
  AddToCount(state, kRingDropped, dropped);
  AddToCount(state + kRingCounts, kDrawable, drawable);
}

// A warp for each trajectory that was evicted, or has a step more: the nodes of one level above its
// items. Some nodes are above several of them, and get the same values several times.
__global__ void MendAboveKernel(const Ring ring, const TreeShape tree, int level, int64_t num_envs,
                                const PlacedStep* __restrict__ placed) {
  const int lane = LaneOfWarp();
  const int64_t from = ring.state[kRingEvictedFrom];
  const int64_t count = ring.state[kRingEvictedTo] - from + num_envs;
  for (int64_t i = GlobalThread() / kWarp; i < count; i += GlobalThreads() / kWarp) {
    int64_t first = 0, items = 1;
    if (i < num_envs) {
      const PlacedStep place = placed[i];
      if (place.slot < 0) continue;
      first = place.slot;
      if (ring.rule.by_row) {
        const StepRun run = ChangedAnchors(ring.rule.anchors, place.step + 1);
        first = place.first_row + run.first, items = run.count;
      }
    } else {
      const int64_t at = (from + i - num_envs) % ring.shape.num_slots;
      first = ring.rule.by_row ? ring.slots[at].first_row : at;
      items = ring.rule.by_row ? ring.slots[at].num_steps : 1;
    }
    MendRun(ring, tree, level, first, items, lane);
  }
}

}  // namespace

void RingExtend(const Ring& ring, const OpenRing& open, const EnvSteps& steps, int64_t initial,
                PlacedStep* placed, int64_t* begun, void* stream) {
  const TreeShape tree = ShapeOfTree(ring.NumItems());
  const int planners = ThreadsOf(steps.num_envs, kMostPlanners);
  Launch("RingExtend", PlanKernel, 1, planners, stream, ring, open, steps, placed);
  const int64_t evictors = Min(ring.shape.num_slots * kWarp, kMostThreads);
  Launch("RingExtend", EvictKernel, Blocks(evictors), kThreads, stream, ring);
  Launch("RingExtend", ExtendKernel, Blocks(steps.num_envs * kWarp), kThreads, stream, ring, open,
         steps, initial, placed, begun);
  const int64_t menders = Min((steps.num_envs + ring.shape.num_slots) * kWarp, kMostThreads);
  for (int level = 1; level < tree.levels; ++level) {
    Launch("RingExtend", MendAboveKernel, Blocks(menders), kThreads, stream, ring, tree, level,
           steps.num_envs, placed);
  }
}

}  // namespace gear::cuda
