// Messages of rows between nodes: encoding and decoding, from raw pointers and sizes.
#pragma once
#include <cstdint>

#include "common/slot.h"

namespace gear::cpu {

// A sample whose rows are sent between this node and a peer.
struct RowSample {
  int64_t peer, need, slot, num_steps, anchor;
  int64_t n_steps;  // of its n-step return
  int64_t goal;     // the row of its achieved goal, -1 for none
};
static_assert(sizeof(RowSample) == 56, "a sample is a row of 7 int64");

// Rows [anchor + first, anchor + end) of the columns of a group that a sample reads, or the row of
// its goal.
struct RowWindow {
  int64_t group, is_goal, first, end;
  int64_t follows;    // they lie after the sample's n-step steps
  int64_t edge;       // the nearest row is read where the trajectory has none of them
  int64_t final_row;  // 1 if the columns have T+1 rows
};
static_assert(sizeof(RowWindow) == 56, "a window is a row of 7 int64");

// A column of steps that is read through the windows of a group, or (group -1) one of a row per
// trajectory that is read by the samples of `members`.
struct RowColumn {
  int64_t group, members, row_bytes;
};
static_assert(sizeof(RowColumn) == 24, "a column is a row of 3 int64");

struct RowLayout {
  const RowWindow* windows;  // by group, from 0 on
  int64_t num_windows;
  const bool* members;  // [windows and more, num_needs]: which needs have each
  int64_t num_needs;
  const RowColumn* columns;
  int64_t num_columns;
};

// The columns of a layout in memory.
struct RowColumns {
  char* const* data;        // of each column
  const int64_t* num_rows;  // that it has
};

// The free part of the arrivals, and the numbers of the first row and slot of all arrivals.
struct RowRoom {
  int64_t first_row, num_rows, first_slot, num_slots, base_row, base_slot;
};

enum class RowsTaken { kAll, kNoRoom, kShort, kOutside };

// Plans the rows of samples, each row once, and copies them from the columns of a store into
// messages, one after the other, each from a multiple of 8 bytes on: a head, and the rows column
// by column. Sets the bytes of rows of each; copies nothing where `message` is too short. Returns
// false, and copies nothing, if a row lies outside its column.
bool EncodeRows(const RowSample* samples, int64_t count, const RowLayout& layout, const Slot* slots,
                const RowColumns& columns, const int64_t* heads, int64_t num_peers, int64_t* sizes,
                char* message, int64_t message_bytes);

// Plans the same rows from the receiver's samples, and copies them from each peer's message into
// the columns of arrivals, from the first row and slot of `room` on. Sets the rows and slots that
// are needed, the bytes of rows of each message, and in the ring, at `which`, the slot and the
// first row of each sample (the row of a step is first row + its number). Copies all rows, or none
// and returns why: they do not fit, a message is too short, the room lies outside the arrivals.
RowsTaken DecodeRows(const RowSample* samples, int64_t count, const RowLayout& layout,
                     const RowColumns& columns, const RowRoom& room, const int64_t* heads,
                     int64_t num_peers, char* const* messages, const int64_t* message_bytes,
                     const int64_t* which, Resolution* ring, int64_t* sizes, int64_t* needed);

}  // namespace gear::cpu
