// Rows of a plan: their places, and their copies into messages and out of them.
#include "common/copy_cuda.h"
#include "common/window.h"
#include "rows/rows_cuda.h"

namespace gear::cuda {
namespace {

inline constexpr int64_t kPieceBytes = 8192;  // of a row, for one team of lanes

inline constexpr int kPointers = 128;  // that fit into a kernel's parameters

struct Pointers {
  Bytes of[kPointers];
};

__global__ void SetPointersKernel(const __grid_constant__ Pointers pointers, int64_t count,
                                  Bytes* __restrict__ to) {
  if (GlobalThread() < count) to[GlobalThread()] = pointers.of[threadIdx.x];
}

// Pointers are passed as parameters: memory of the host would have to outlive the call.
void SetPointers(const Bytes* from, int64_t count, Bytes* to, void* stream) {
  for (int64_t first = 0; first < count; first += kPointers) {
    Pointers pointers{};
    const int64_t some = Min<int64_t>(count - first, kPointers);
    for (int64_t i = 0; i < some; ++i) pointers.of[i] = from[first + i];
    SetPointersKernel<<<1, kPointers, 0, AsStream(stream)>>>(pointers, some, to + first);
    CheckLaunch("SetPointers");
  }
}

// Messages that lie one after the other, each from a word on.
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

// A store, of which rows are encoded.
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

// Arrivals, into which rows are decoded.
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

// Writes into the ring the places of the samples' rows, and counts the rows and slots that arrive.
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
    const int team = TeamOfCopy(row_bytes, kWarp);
    const Lane lane{static_cast<int>(threadIdx.x) & (team - 1), team};
    for (int64_t i = GlobalThread() / team; i < work; i += GlobalThreads() / team) {
      const int64_t row = first + i / pieces, skip = i % pieces * kPieceBytes;
      const int64_t read =
          FirstOf(plan.NumReads(), [&](int64_t k) { return plan.before[k] > row; }) - 1;
      const int64_t peer = plan.peers[TrajectoryOf(plan.reads[read])];
      const int64_t place = plan.places[read] + row - plan.before[read];
      const Bytes column = plan.columns[c], message = plan.messages[peer];
      char* stored = column.data + place * row_bytes + skip;
      char* encoded = message.data + plan.offsets[c * peers + peer] +
                      (row - plan.first_rows[cell + peer]) * row_bytes + skip;
      const int64_t bytes = Min(kPieceBytes, row_bytes - skip);
      if (kToColumn)
        CopyBytes(encoded, message.data + message.size, stored, bytes, lane);
      else
        CopyBytes(stored, column.data + column.size, encoded, bytes, lane);
    }
  }
}

template <bool kToColumn, typename Where>
void CopyRows(const Plan& plan, const Where& where, const int64_t* sizes, void* stream) {
  PlaceKernel<Where>
      <<<Blocks(plan.NumReads()), kThreads, 0, AsStream(stream)>>>(plan, where, sizes);
  CheckLaunch("PlaceRows");
  // The number of rows is known only on the device.
  CopyRowsKernel<kToColumn, Where>
      <<<Blocks(plan.NumReads() * kWarp), kThreads, 0, AsStream(stream)>>>(plan, where);
  CheckLaunch("CopyRows");
}

}  // namespace

void EncodeRows(const RowRequest& request, const Slot* slots, const Bytes* columns, int64_t* sizes,
                char* message, int64_t message_bytes, int64_t* scratch, void* stream) {
  if (request.count == 0) return ZeroWords(sizes, request.num_peers, stream);
  const Plan plan = MakePlan(request, sizes, scratch, stream);
  SetPointers(columns, plan.layout.num_columns, plan.columns, stream);
  RunScan<Sums>(FindMessages{plan, sizes, message}, plan.num_peers, plan.totals, stream);
  CopyRows<false>(plan, FromStore{slots, message_bytes}, sizes, stream);
}

void DecodeRows(const RowRequest& request, const Bytes* columns, const Bytes* messages,
                const cpu::RowRoom& room, const int64_t* which, int64_t ring_rows, Resolution* ring,
                int64_t* sizes, int64_t* needed, int64_t* scratch, void* stream) {
  if (request.count == 0) {
    ZeroWords(needed, 2, stream);
    return ZeroWords(sizes, request.num_peers, stream);
  }
  const Plan plan = MakePlan(request, sizes, scratch, stream);
  SetPointers(columns, plan.layout.num_columns, plan.columns, stream);
  SetPointers(messages, plan.num_peers, plan.messages, stream);
  SettleKernel<<<Blocks(plan.count), kThreads, 0, AsStream(stream)>>>(plan, room, which, ring_rows,
                                                                      ring, needed);
  CheckLaunch("Settle");
  CopyRows<true>(plan, IntoArrivals{room, needed}, sizes, stream);
}

}  // namespace gear::cuda
