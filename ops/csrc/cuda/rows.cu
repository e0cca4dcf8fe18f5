// Which rows of which trajectories travel, each once, and where they lie: into messages, and out of
// them. All that is read is sorted at once, by group of columns, trajectory and first row; running
// maxima then tell what of each read is new, and running sums where that lies in the messages.
#include "cuda/copy.h"
#include "cuda/launch.h"
#include "cuda/ops.h"
#include "cuda/sort.h"

namespace gear::cuda {
namespace {

using cpu::RowColumn;
using cpu::RowWindow;

inline constexpr uint64_t kNoGroup = ~uint64_t{0};  // behind every group
inline constexpr int64_t kPieceBytes = 8192;        // of a row, for one team of lanes

// What both ends know, and what is found out. A trajectory is one of a peer. The groups of a layout
// are those of its windows, then one for each column of one row per trajectory (by its number), and
// last the blocks that arrive.
struct Plan {
  const RowSample* samples;
  int64_t count;
  RowLayout layout;
  int64_t num_member_rows, num_slots;
  const int64_t* heads;
  int64_t num_peers;

  Ordered *by_slot, *by_slot_too;  // [count]: peer, slot, sample
  int64_t* trajectory;             // [count]: of each sample
  int64_t *peers, *slots;          // [count]: of each trajectory
  int64_t* lows;                   // [count]: first row of each sample's block, -1 for none
  int64_t* num_trajectories;       // [1]
  Ordered *reads, *reads_too;      // [reads]: group and trajectory, first row, end
  int64_t* reach;                  // [reads]: greatest end so far, of the same trajectory
  int64_t* before;                 // [reads + 1]: rows of all groups in front of a read's own
  int64_t* places;                 // [reads]: the first of them in its columns
  uint64_t* group_rows;            // [groups, peers], and one more
  int64_t* first_rows;             // [groups, peers], and the number of all rows behind
  int64_t* offsets;                // [columns, peers]: in each message
  int64_t* filled;                 // [1]: words of all messages
  Keyed* totals;                   // of scans
  Bytes *columns, *messages;

  __host__ __device__ int64_t NumGroups() const { return BlockGroup() + 1; }
  __host__ __device__ int64_t NumReads() const { return NumGroups() * count; }
  __host__ __device__ int64_t BlockGroup() const { return layout.num_windows + layout.num_columns; }
  __device__ int64_t GroupOf(int64_t column) const {
    const int64_t group = layout.columns[column].group;
    return group < 0 ? layout.num_windows + column : group;
  }
  __device__ bool IsMember(int64_t row, const RowSample& sample) const {
    return layout.members[row * layout.num_needs + sample.need];
  }
  __device__ int64_t RowsOf(int64_t read) const { return before[read + 1] - before[read]; }
};

__device__ int64_t GroupOf(const Ordered& read) { return static_cast<int64_t>(read.high >> 32); }
__device__ int64_t TrajectoryOf(const Ordered& read) {
  return static_cast<int64_t>(read.high & 0xFFFFFFFFu);
}
__device__ Ordered ReadOf(int64_t group, int64_t trajectory, int64_t first, int64_t end) {
  return {static_cast<uint64_t>(group) << 32 | static_cast<uint64_t>(trajectory), first, end};
}

// Takes all arrays of a plan.
Scratch Layout(Plan* plan, int64_t* words, int64_t num_messages) {
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
  plan->messages = scratch.Take<Bytes>(num_messages);
  return scratch;
}

inline constexpr int kPointers = 128;  // that fit into a kernel's parameters

struct Pointers {
  Bytes of[kPointers];
};

__global__ void SetPointersKernel(const __grid_constant__ Pointers pointers, int64_t count,
                                  Bytes* __restrict__ to) {
  if (GlobalThread() < count) to[GlobalThread()] = pointers.of[threadIdx.x];
}

// Pointers travel as parameters: memory of the host would have to outlive the call.
void SetPointers(const Bytes* from, int64_t count, Bytes* to, void* stream) {
  for (int64_t first = 0; first < count; first += kPointers) {
    Pointers pointers{};
    const int64_t some = Min<int64_t>(count - first, kPointers);
    for (int64_t i = 0; i < some; ++i) pointers.of[i] = from[first + i];
    SetPointersKernel<<<1, kPointers, 0, AsStream(stream)>>>(pointers, some, to + first);
    CheckLaunch("SetPointers");
  }
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

// What a window reads of a sample, and in `nearest` the row that is nearest to it.
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

// Lists what every sample reads: a place for each group that it could read, and for its block.
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
      // The nearest row has a place even if it does not travel: ops check that it has.
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

// The first row of a read that no earlier one of its trajectory has.
__device__ int64_t FirstNew(const Plan& plan, int64_t read) {
  const Ordered& own = plan.reads[read];
  const bool is_first = read == 0 || plan.reads[read - 1].high != own.high;
  return is_first ? own.low : Max(own.low, plan.reach[read - 1]);
}

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

// Where the rows of each group and peer begin among all rows.
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

// Messages that lie one behind the other, each from a word on.
struct FindMessages {
  Plan plan;
  const int64_t* sizes;
  char* message;

  __device__ Keyed Load(int64_t p) const { return {0, (plan.heads[p] + sizes[p] + 7) / 8 * 8}; }
  __device__ void Store(int64_t p, const Keyed& before, const Keyed& up_to) const {
    plan.messages[p] = {message + before.value, up_to.value - before.value};
    if (p + 1 == plan.num_peers) *plan.filled = up_to.value;
  }
};

// The last read of the blocks that begins at a row or in front of it.
__device__ int64_t BlockAt(const Plan& plan, int64_t trajectory, int64_t row) {
  const Ordered wanted = ReadOf(plan.BlockGroup(), trajectory, row, 0);
  return FirstOf(plan.NumReads(), [&](int64_t i) { return Precedes(wanted, plan.reads[i]); }) - 1;
}

// The number of a row among those that arrive. It lies in a block, whose rows are numbered one by
// one up to the reach of the read.
__device__ int64_t NumberOf(const Plan& plan, int64_t trajectory, int64_t row) {
  const int64_t read = BlockAt(plan, trajectory, row);
  const int64_t first = plan.first_rows[plan.BlockGroup() * plan.num_peers];
  return plan.before[read + 1] - first - (plan.reach[read] - row);
}

// A store, of which rows are packed.
struct FromStore {
  const Slot* slots;
  int64_t message_bytes;

  __device__ bool Takes(const Plan& plan) const { return *plan.filled <= message_bytes; }
  __device__ void CheckMessages(const Plan&, const int64_t*) const {}
  __device__ int64_t PlaceOfRow(const Plan& plan, int64_t trajectory, int64_t row) const {
    return slots[plan.slots[trajectory]].first_row + row;
  }
  __device__ int64_t PlaceOfSlot(const Plan& plan, int64_t trajectory) const {
    return plan.slots[trajectory];
  }
};

// Arrivals, into which rows are unpacked.
struct IntoArrivals {
  cpu::RowRoom room;
  const int64_t* needed;

  __device__ bool Takes(const Plan&) const {
    return needed[0] <= room.num_rows && needed[1] <= room.num_slots;
  }
  __device__ void CheckMessages(const Plan& plan, const int64_t* sizes) const {
    for (int64_t p = GlobalThread(); p < plan.num_peers; p += GlobalThreads())
      Require(sizes[p] == 0 || plan.messages[p].size - plan.heads[p] >= sizes[p]);
  }
  __device__ int64_t PlaceOfRow(const Plan& plan, int64_t trajectory, int64_t row) const {
    return room.first_row + NumberOf(plan, trajectory, row);
  }
  __device__ int64_t PlaceOfSlot(const Plan&, int64_t trajectory) const {
    return room.first_slot + trajectory;
  }
};

// Writes into the ring where the rows of samples will lie, and how many rows and slots arrive.
__global__ void SettleKernel(const Plan plan, const cpu::RowRoom room,
                             const int64_t* __restrict__ which, int64_t ring_rows,
                             Resolution* __restrict__ ring, int64_t* __restrict__ needed) {
  for (int64_t i = GlobalThread(); i < plan.count; i += GlobalThreads()) {
    Require(which[i] >= 0 && which[i] < ring_rows);
    const int64_t trajectory = plan.trajectory[i], low = plan.lows[i];
    const int64_t shift = low < 0 ? 0 : NumberOf(plan, trajectory, low) - low;
    ring[which[i]].first_row = room.base_row + room.first_row + shift;
    ring[which[i]].slot = room.base_slot + room.first_slot + trajectory;
    if (i > 0) continue;
    const int64_t blocks = plan.BlockGroup() * plan.num_peers;
    needed[0] = plan.first_rows[blocks + plan.num_peers] - plan.first_rows[blocks];
    needed[1] = *plan.num_trajectories;
  }
}

// Finds where rows lie in their columns, and checks that they do before any is copied.
template <typename Where>
__global__ void PlaceKernel(const Plan plan, const Where where, const int64_t* sizes) {
  if (!where.Takes(plan)) return;
  where.CheckMessages(plan, sizes);
  for (int64_t i = GlobalThread(); i < plan.NumReads(); i += GlobalThreads()) {
    const Ordered& read = plan.reads[i];
    const int64_t rows = plan.RowsOf(i);
    if (rows == 0 || GroupOf(read) == plan.BlockGroup()) continue;
    const int64_t trajectory = TrajectoryOf(read);
    const int64_t place = GroupOf(read) < plan.layout.num_windows
                              ? where.PlaceOfRow(plan, trajectory, FirstNew(plan, i))
                              : where.PlaceOfSlot(plan, trajectory);
    plan.places[i] = place;
    for (int64_t c = 0; c < plan.layout.num_columns; ++c) {
      const int64_t row_bytes = plan.layout.columns[c].row_bytes;
      if (row_bytes == 0 || plan.GroupOf(c) != GroupOf(read)) continue;
      Require(IsInside(place, 0, rows, plan.columns[c].size / row_bytes));
    }
  }
}

// Copies rows between columns and messages: a team of lanes for each row, or piece of a long one.
template <bool kToColumn, typename Where>
__global__ void CopyRowsKernel(const Plan plan, const Where where) {
  if (!where.Takes(plan)) return;
  const int64_t peers = plan.num_peers;
  for (int64_t c = 0; c < plan.layout.num_columns; ++c) {
    const int64_t row_bytes = plan.layout.columns[c].row_bytes;
    const int64_t pieces = (row_bytes + kPieceBytes - 1) / kPieceBytes;
    const int64_t cell = plan.GroupOf(c) * peers, first = plan.first_rows[cell];
    const int64_t work = (plan.first_rows[cell + peers] - first) * pieces;
    const int team = TeamOf(row_bytes, kWarp);
    const Lane lane{static_cast<int>(threadIdx.x) & (team - 1), team};
    for (int64_t i = GlobalThread() / team; i < work; i += GlobalThreads() / team) {
      const int64_t row = first + i / pieces, skip = i % pieces * kPieceBytes;
      const int64_t read =
          FirstOf(plan.NumReads(), [&](int64_t k) { return plan.before[k] > row; }) - 1;
      const int64_t peer = plan.peers[TrajectoryOf(plan.reads[read])];
      const int64_t place = plan.places[read] + row - plan.before[read];
      const Bytes column = plan.columns[c], message = plan.messages[peer];
      char* stored = column.data + place * row_bytes + skip;
      char* packed = message.data + plan.offsets[c * peers + peer] +
                     (row - plan.first_rows[cell + peer]) * row_bytes + skip;
      const int64_t bytes = Min(kPieceBytes, row_bytes - skip);
      if (kToColumn)
        CopyBytes(packed, message.data + message.size, stored, bytes, lane);
      else
        CopyBytes(stored, column.data + column.size, packed, bytes, lane);
    }
  }
}

void Zero(void* to, int64_t words, void* stream) {
  Check(cudaMemsetAsync(to, 0, static_cast<size_t>(words) * sizeof(int64_t), AsStream(stream)),
        "cudaMemsetAsync");
}

// Finds what travels, and how much; `sizes` gets the bytes of rows in each peer's message.
void MakePlan(Plan* plan, int64_t* sizes, void* stream) {
  const RowLayout& layout = plan->layout;
  const int64_t most = Max(Max(layout.num_windows, layout.num_columns), plan->num_peers);
  CheckLayoutKernel<<<Blocks(Max<int64_t>(most, 1)), kThreads, 0, AsStream(stream)>>>(*plan);
  CheckLaunch("CheckLayout");
  CheckSamplesKernel<<<Blocks(plan->count), kThreads, 0, AsStream(stream)>>>(*plan);
  CheckLaunch("CheckSamples");
  plan->by_slot = Sort(plan->by_slot, plan->by_slot_too, plan->count, stream);
  RunScan<Sums>(NumberTrajectories{*plan}, plan->count, plan->totals, stream);
  ListReadsKernel<<<Blocks(plan->count), kThreads, 0, AsStream(stream)>>>(*plan);
  CheckLaunch("ListReads");
  plan->reads = Sort(plan->reads, plan->reads_too, plan->NumReads(), stream);
  RunScan<Maxima>(FindReach{*plan}, plan->NumReads(), plan->totals, stream);
  const int64_t cells = plan->NumGroups() * plan->num_peers + 1;
  Zero(plan->group_rows, cells, stream);
  RunScan<Sums>(CountRows{*plan}, plan->NumReads(), plan->totals, stream);
  RunScan<Sums>(FindFirstRows{*plan}, cells, plan->totals, stream);
  MeasureKernel<<<Blocks(plan->num_peers), kThreads, 0, AsStream(stream)>>>(*plan, sizes);
  CheckLaunch("Measure");
}

template <bool kToColumn, typename Where>
void CopyRows(const Plan& plan, const Where& where, const int64_t* sizes, void* stream) {
  PlaceKernel<Where>
      <<<Blocks(plan.NumReads()), kThreads, 0, AsStream(stream)>>>(plan, where, sizes);
  CheckLaunch("PlaceRows");
  // How many rows travel only the device knows.
  CopyRowsKernel<kToColumn, Where>
      <<<Blocks(plan.NumReads() * kWarp), kThreads, 0, AsStream(stream)>>>(plan, where);
  CheckLaunch("CopyRows");
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
  return Layout(&plan, nullptr, plan.num_peers).size();
}

void PackRows(const RowRequest& request, const Slot* slots, const Bytes* columns, int64_t* sizes,
              char* message, int64_t message_bytes, int64_t* scratch, void* stream) {
  if (request.count == 0) return Zero(sizes, request.num_peers, stream);
  Plan plan = PlanOf(request);
  Layout(&plan, scratch, plan.num_peers);
  SetPointers(columns, plan.layout.num_columns, plan.columns, stream);
  MakePlan(&plan, sizes, stream);
  RunScan<Sums>(FindMessages{plan, sizes, message}, plan.num_peers, plan.totals, stream);
  CopyRows<false>(plan, FromStore{slots, message_bytes}, sizes, stream);
}

void UnpackRows(const RowRequest& request, const Bytes* columns, const Bytes* messages,
                const cpu::RowRoom& room, const int64_t* which, int64_t ring_rows, Resolution* ring,
                int64_t* sizes, int64_t* needed, int64_t* scratch, void* stream) {
  if (request.count == 0) {
    Zero(needed, 2, stream);
    return Zero(sizes, request.num_peers, stream);
  }
  Plan plan = PlanOf(request);
  Layout(&plan, scratch, plan.num_peers);
  SetPointers(columns, plan.layout.num_columns, plan.columns, stream);
  SetPointers(messages, plan.num_peers, plan.messages, stream);
  MakePlan(&plan, sizes, stream);
  SettleKernel<<<Blocks(plan.count), kThreads, 0, AsStream(stream)>>>(plan, room, which, ring_rows,
                                                                      ring, needed);
  CheckLaunch("Settle");
  CopyRows<true>(plan, IntoArrivals{room, needed}, sizes, stream);
}

}  // namespace gear::cuda
