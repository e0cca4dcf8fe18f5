// Plans which rows of which trajectories are sent, each once. All reads are sorted at once, by
// group of columns, trajectory and first row; running maxima then give the new rows of each read,
// and running sums their places in the messages.
#include "rows/rows_cuda.h"

namespace gear::cuda {
namespace {

using cpu::RowColumn;
using cpu::RowWindow;

inline constexpr uint64_t kNoGroup = ~uint64_t{0};  // sorts after every group

// Takes all arrays of a plan.
Scratch Layout(Plan* plan, int64_t* words) {
  Scratch scratch(words);
  const int64_t count = plan->count, reads = plan->NumReads();
  const int64_t columns = plan->layout.num_columns, peers = plan->num_peers;
  const int64_t cells = plan->NumGroups() * peers + 1;
  plan->by_slot = scratch.Take<Ordered>(count);
  plan->by_slot_too = scratch.Take<Ordered>(count);
  plan->trajectory = scratch.Take<int64_t>(count);
  plan->peers = scratch.Take<int64_t>(count);
  plan->slots = scratch.Take<int64_t>(count);
  plan->lows = scratch.Take<int64_t>(count);
  plan->num_trajectories = scratch.Take<int64_t>(1);
  plan->reads = scratch.Take<Ordered>(reads);
  plan->reads_too = scratch.Take<Ordered>(reads);
  plan->reach = scratch.Take<int64_t>(reads);
  plan->before = scratch.Take<int64_t>(reads + 1);
  plan->places = scratch.Take<int64_t>(reads);
  plan->group_rows = scratch.Take<uint64_t>(cells);
  plan->first_rows = scratch.Take<int64_t>(cells);
  plan->offsets = scratch.Take<int64_t>(columns * peers);
  plan->filled = scratch.Take<int64_t>(1);
  plan->totals = scratch.Take<Keyed>(NumScanTiles(Max(Max(reads, cells), peers)));
  plan->columns = scratch.Take<Bytes>(columns);
  plan->messages = scratch.Take<Bytes>(peers);
  return scratch;
}

__global__ void CheckLayoutKernel(const Plan plan) {
  const RowLayout& layout = plan.layout;
  const int64_t last = layout.num_windows - 1;
  for (int64_t i = GlobalThread(); i <= last; i += GlobalThreads()) {
    const RowWindow& window = layout.windows[i];
    const int64_t group = i == 0 ? -1 : layout.windows[i - 1].group;
    Require(window.group == group + 1 || (i > 0 && window.group == group));
    Require(window.group >= 0 && window.group <= last);
    Require(window.first >= -kMostSteps && window.first < window.end && window.end <= kMostSteps);
    Require(window.final_row == 0 || window.final_row == 1);
  }
  for (int64_t i = GlobalThread(); i < layout.num_columns; i += GlobalThreads()) {
    const RowColumn& column = layout.columns[i];
    Require(column.group < 0 || (last >= 0 && column.group <= layout.windows[last].group));
    Require(column.row_bytes >= 0 && column.row_bytes < kMostSteps);
    Require(column.group >= 0 || (column.members >= 0 && column.members < plan.num_member_rows));
  }
  for (int64_t i = GlobalThread(); i < plan.num_peers; i += GlobalThreads())
    Require(plan.heads[i] >= 0 && plan.heads[i] < kMostSteps);
}

__global__ void CheckSamplesKernel(const Plan plan) {
  for (int64_t i = GlobalThread(); i < plan.count; i += GlobalThreads()) {
    const RowSample& s = plan.samples[i];
    Require(s.peer >= 0 && s.peer < plan.num_peers && s.slot >= 0 && s.slot < plan.num_slots);
    Require(s.need >= 0 && s.need < plan.layout.num_needs);
    Require(s.num_steps >= 1 && s.num_steps <= kMostSteps);
    Require(s.anchor >= 0 && s.anchor < s.num_steps);
    Require(s.n_steps >= 0 && s.n_steps <= s.num_steps && s.goal >= -1 && s.goal <= s.num_steps);
    plan.by_slot[i] = {static_cast<uint64_t>(s.peer), s.slot, i};
  }
}

// Numbers the trajectories by peer and slot.
struct NumberTrajectories {
  Plan plan;

  __device__ bool IsFirst(int64_t i) const {
    return i == 0 || Precedes(plan.by_slot[i - 1], plan.by_slot[i]);
  }
  __device__ Keyed Load(int64_t i) const { return {0, IsFirst(i)}; }
  __device__ void Store(int64_t i, const Keyed&, const Keyed& up_to) const {
    const Ordered& sample = plan.by_slot[i];
    const int64_t number = up_to.value - 1;
    plan.trajectory[sample.value] = number;
    if (i + 1 == plan.count) *plan.num_trajectories = number + 1;
    if (!IsFirst(i)) return;
    plan.peers[number] = static_cast<int64_t>(sample.high);
    plan.slots[number] = sample.low;
  }
};

struct Rows {
  int64_t first, end;
};

// The rows that a window reads of a sample, and in `nearest` the row that is nearest to it.
__device__ Rows RowsOf(const RowWindow& window, const RowSample& s, Rows* nearest) {
  if (window.is_goal) {
    *nearest = s.goal < 0 ? Rows{0, 0} : Rows{s.goal, s.goal + 1};
    return *nearest;
  }
  const int64_t held = s.num_steps + window.final_row;
  const int64_t at = s.anchor + window.first + (window.follows ? s.n_steps : 0);
  const int64_t near = Clamp<int64_t>(at, 0, held - 1);
  *nearest = {near, near + 1};
  const int64_t first = Clamp<int64_t>(at, 0, held);
  const int64_t end = Max(first, Clamp<int64_t>(at + window.end - window.first, 0, held));
  return end == first && window.edge ? *nearest : Rows{first, end};
}

// Lists the reads of every sample: a place for each group that it could read, and for its block.
__global__ void ListReadsKernel(const Plan plan) {
  const RowLayout& layout = plan.layout;
  for (int64_t i = GlobalThread(); i < plan.count; i += GlobalThreads()) {
    const RowSample sample = plan.samples[i];
    const int64_t trajectory = plan.trajectory[i];
    int64_t low = 2 * kMostSteps, high = 0, place = i;
    const auto put = [&](int64_t group, const Rows& rows) {
      plan.reads[place] = rows.first < rows.end ? ReadOf(group, trajectory, rows.first, rows.end)
                                                : Ordered{kNoGroup, 0, 0};
      place += plan.count;
    };
    for (int64_t w = 0; w < layout.num_windows; ++w) {
      Rows rows{0, 0}, nearest{0, 0};
      if (plan.IsMember(w, sample)) rows = RowsOf(layout.windows[w], sample, &nearest);
      // The nearest row has a place even if it is not sent: ops check that it has.
      for (const Rows& some : {rows, nearest}) {
        if (some.first >= some.end) continue;
        low = Min(low, some.first);
        high = Max(high, some.end);
      }
      put(layout.windows[w].group, rows);
    }
    for (int64_t c = 0; c < layout.num_columns; ++c) {
      const RowColumn& column = layout.columns[c];
      const bool is_read = column.group < 0 && plan.IsMember(column.members, sample);
      put(layout.num_windows + c, {0, is_read});
    }
    put(plan.BlockGroup(), {low, high});
    plan.lows[i] = low < high ? low : -1;
  }
}

struct FindReach {
  Plan plan;

  __device__ Keyed Load(int64_t i) const { return {plan.reads[i].high, plan.reads[i].value}; }
  __device__ void Store(int64_t i, const Keyed&, const Keyed& up_to) const {
    plan.reach[i] = up_to.value;
  }
};

struct CountRows {
  Plan plan;

  __device__ Keyed Load(int64_t i) const {
    return {0, Max<int64_t>(plan.reach[i] - FirstNew(plan, i), 0)};
  }
  __device__ void Store(int64_t i, const Keyed& before, const Keyed& up_to) const {
    plan.before[i] = before.value;
    if (i + 1 == plan.NumReads()) plan.before[i + 1] = up_to.value;
    const int64_t rows = up_to.value - before.value;
    if (rows == 0) return;
    const Ordered& read = plan.reads[i];
    const int64_t peer = plan.peers[TrajectoryOf(read)];
    AtomicAdd(&plan.group_rows[GroupOf(read) * plan.num_peers + peer], static_cast<uint64_t>(rows));
  }
};

// First row of each group and peer among all rows.
struct FindFirstRows {
  Plan plan;

  __device__ Keyed Load(int64_t i) const { return {0, static_cast<int64_t>(plan.group_rows[i])}; }
  __device__ void Store(int64_t i, const Keyed& before, const Keyed&) const {
    plan.first_rows[i] = before.value;
  }
};

// Sets the bytes of rows in each peer's message, and where the rows of each column begin in it.
__global__ void MeasureKernel(const Plan plan, int64_t* __restrict__ sizes) {
  for (int64_t p = GlobalThread(); p < plan.num_peers; p += GlobalThreads()) {
    int64_t offset = plan.heads[p];
    for (int64_t c = 0; c < plan.layout.num_columns; ++c) {
      plan.offsets[c * plan.num_peers + p] = offset;
      const uint64_t rows = plan.group_rows[plan.GroupOf(c) * plan.num_peers + p];
      offset += static_cast<int64_t>(rows) * plan.layout.columns[c].row_bytes;
    }
    sizes[p] = offset - plan.heads[p];
  }
}

Plan PlanOf(const RowRequest& request) {
  Plan plan{};
  plan.samples = request.samples;
  plan.count = request.count;
  plan.layout = request.layout;
  plan.num_member_rows = request.num_member_rows;
  plan.num_slots = request.num_slots;
  plan.heads = request.heads;
  plan.num_peers = request.num_peers;
  return plan;
}

}  // namespace

int64_t RowsScratch(const RowRequest& request) {
  Plan plan = PlanOf(request);
  return Layout(&plan, nullptr).size();
}

Plan MakePlan(const RowRequest& request, int64_t* sizes, int64_t* scratch, void* stream) {
  Plan plan = PlanOf(request);
  Layout(&plan, scratch);
  const RowLayout& layout = plan.layout;
  const int64_t most = Max(Max(layout.num_windows, layout.num_columns), plan.num_peers);
  CheckLayoutKernel<<<Blocks(Max<int64_t>(most, 1)), kThreads, 0, AsStream(stream)>>>(plan);
  CheckLaunch("CheckLayout");
  CheckSamplesKernel<<<Blocks(plan.count), kThreads, 0, AsStream(stream)>>>(plan);
  CheckLaunch("CheckSamples");
  plan.by_slot = Sort(plan.by_slot, plan.by_slot_too, plan.count, stream);
  RunScan<Sums>(NumberTrajectories{plan}, plan.count, plan.totals, stream);
  ListReadsKernel<<<Blocks(plan.count), kThreads, 0, AsStream(stream)>>>(plan);
  CheckLaunch("ListReads");
  plan.reads = Sort(plan.reads, plan.reads_too, plan.NumReads(), stream);
  RunScan<Maxima>(FindReach{plan}, plan.NumReads(), plan.totals, stream);
  const int64_t cells = plan.NumGroups() * plan.num_peers + 1;
  ZeroWords(plan.group_rows, cells, stream);
  RunScan<Sums>(CountRows{plan}, plan.NumReads(), plan.totals, stream);
  RunScan<Sums>(FindFirstRows{plan}, cells, plan.totals, stream);
  MeasureKernel<<<Blocks(plan.num_peers), kThreads, 0, AsStream(stream)>>>(plan, sizes);
  CheckLaunch("Measure");
  return plan;
}

}  // namespace gear::cuda
