// The plan of the rows that are sent: made by planning kernels, read by copying kernels.
#pragma once
#include "common/launch_cuda.h"
#include "common/sort_cuda.h"
#include "rows/rows.h"

namespace gear::cuda {

// Input and result of planning. A trajectory is one of a peer. The groups of a layout are those of
// its windows, then one for each column of one row per trajectory (by its number), and last the
// blocks that arrive.
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
  int64_t* filled;                 // [1]: bytes of all messages
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

__device__ inline int64_t GroupOf(const Ordered& read) {
  return static_cast<int64_t>(read.high >> 32);
}
__device__ inline int64_t TrajectoryOf(const Ordered& read) {
  return static_cast<int64_t>(read.high & 0xFFFFFFFFu);
}
__device__ inline Ordered ReadOf(int64_t group, int64_t trajectory, int64_t first, int64_t end) {
  return {static_cast<uint64_t>(group) << 32 | static_cast<uint64_t>(trajectory), first, end};
}

// The first row of a read that no earlier one of its trajectory has.
__device__ inline int64_t FirstNew(const Plan& plan, int64_t read) {
  const Ordered& own = plan.reads[read];
  const bool is_first = read == 0 || plan.reads[read - 1].high != own.high;
  return is_first ? own.low : Max(own.low, plan.reach[read - 1]);
}

inline void ZeroWords(void* to, int64_t words, void* stream) {
  Check(cudaMemsetAsync(to, 0, static_cast<size_t>(words) * sizeof(int64_t), AsStream(stream)),
        "cudaMemsetAsync");
}

// Plans the rows to send; `sizes` gets the bytes of rows in each peer's message. Columns and
// messages are not set, nor the places of rows in them.
Plan MakePlan(const RowRequest& request, int64_t* sizes, int64_t* scratch, void* stream);

}  // namespace gear::cuda
