// The ops on rows that travel between nodes.
#include <ATen/core/Tensor.h>

#include <algorithm>

#include "bindings/check_rows.h"
#include "bindings/checks.h"
#include "bindings/ops.h"
#include "draws/draws.h"
#include "gather/gather.h"
#include "priorities/priorities.h"
#include "returns/returns.h"
#include "rows/rows.h"
#include "select/select.h"

namespace gear {
namespace {

cpu::RowLayout LayoutOf(const at::Tensor& windows, const at::Tensor& members,
                        const at::Tensor& columns) {
  const cpu::RowLayout layout = ShapeOfLayout(windows, members, columns);
  int64_t groups = 0;
  for (int64_t w = 0; w < layout.num_windows; ++w) {
    const cpu::RowWindow& window = layout.windows[w];
    groups += window.group == groups;
    TORCH_CHECK(window.group == groups - 1, "gear: windows must be by group, from 0 on");
    TORCH_CHECK(window.first >= -kMostSteps && window.first < window.end &&
                    window.end <= kMostSteps && (window.final_row == 0 || window.final_row == 1),
                "gear: window ", w, " must be a window");
  }
  for (int64_t c = 0; c < layout.num_columns; ++c) {
    const cpu::RowColumn& column = layout.columns[c];
    TORCH_CHECK(column.group < groups && column.row_bytes >= 0 && column.row_bytes < kMostSteps,
                "gear: column ", c, " must have a group and a size");
    TORCH_CHECK(column.group >= 0 || (column.members >= 0 && column.members < members.size(0)),
                "gear: column ", c, " must have members");
  }
  return layout;
}

void CheckSamples(const cpu::RowSample* samples, int64_t count, int64_t num_peers,
                  int64_t num_needs, int64_t num_slots) {
  constexpr int64_t kMostPeers = int64_t{1} << 20;
  TORCH_CHECK(num_peers <= kMostPeers && num_slots <= kMostSteps, "gear: too many peers or slots");
  for (int64_t i = 0; i < count; ++i) {
    const cpu::RowSample& s = samples[i];
    TORCH_CHECK(s.peer >= 0 && s.peer < num_peers && s.need >= 0 && s.need < num_needs &&
                    s.slot >= 0 && s.slot < num_slots && s.num_steps >= 1 &&
                    s.num_steps <= kMostSteps && s.anchor >= 0 && s.anchor < s.num_steps &&
                    s.n_steps >= 0 && s.n_steps <= s.num_steps && s.goal >= -1 &&
                    s.goal <= s.num_steps,
                "gear: sample ", i, " must be a step of a trajectory, of a peer and a need");
  }
}

// The bytes of columns, and the rows that each has.
struct Columns {
  Columns(at::TensorList tensors, const cpu::RowLayout& layout) {
    CheckNumColumns(tensors, layout);
    for (int64_t c = 0; c < layout.num_columns; ++c) {
      const int64_t bytes = BytesOf(tensors[c], "columns"), row = layout.columns[c].row_bytes;
      data.push_back(CharsOf(tensors[c]));
      num_rows.push_back(row == 0 ? kMostSteps : bytes / row);
    }
  }
  cpu::RowColumns View() const { return {data.data(), num_rows.data()}; }

  c10::SmallVector<char*, 16> data;
  c10::SmallVector<int64_t, 16> num_rows;
};

// Bytes in front of the rows of each message.
const int64_t* HeadsOf(const at::Tensor& heads) {
  CheckTensor(heads, "heads", at::kLong);
  const int64_t* bytes = heads.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(bytes, bytes + heads.numel(),
                          [](int64_t head) { return head >= 0 && head < kMostSteps; }),
              "gear: heads must be at least 0");
  return bytes;
}

}  // namespace

void EncodeRows(at::Tensor& message, at::Tensor& sizes, at::TensorList stored,
                const at::Tensor& samples, const at::Tensor& windows, const at::Tensor& members,
                const at::Tensor& columns, const at::Tensor& heads, const at::Tensor& slots) {
  CheckRecords(samples, "samples", kSampleWords);
  CheckRecords(slots, "slots", kSlotWords);
  const cpu::RowLayout layout = LayoutOf(windows, members, columns);
  const Columns data(stored, layout);
  const int64_t count = samples.size(0), num_peers = heads.numel();
  const auto* records = Records<cpu::RowSample>(samples);
  CheckSamples(records, count, num_peers, layout.num_needs, slots.size(0));
  CheckTensor(message, "message", at::kLong);
  TORCH_CHECK(
      cpu::EncodeRows(records, count, layout, Records<Slot>(slots), data.View(), HeadsOf(heads),
                      num_peers, LongsOf(sizes, "sizes", num_peers),
                      static_cast<char*>(message.mutable_data_ptr()), kWordBytes * message.numel()),
      "gear: rows of samples must lie in the columns");
}

void DecodeRows(at::TensorList arrivals, at::Tensor& ring, at::Tensor& sizes, at::Tensor& needed,
                at::TensorList messages, const at::Tensor& which, const at::Tensor& samples,
                const at::Tensor& windows, const at::Tensor& members, const at::Tensor& columns,
                const at::Tensor& heads, at::IntArrayRef room) {
  CheckRecords(samples, "samples", kSampleWords);
  CheckRecords(ring, "ring", kResolutionWords);
  CheckTensor(which, "which", at::kLong);
  const cpu::RowLayout layout = LayoutOf(windows, members, columns);
  const Columns data(arrivals, layout);
  const int64_t count = samples.size(0), num_peers = heads.numel();
  const auto* records = Records<cpu::RowSample>(samples);
  CheckSamples(records, count, num_peers, layout.num_needs, kMostSteps);
  const int64_t* at = which.const_data_ptr<int64_t>();
  TORCH_CHECK(which.numel() == count &&
                  std::all_of(at, at + count,
                              [&](int64_t index) { return index >= 0 && index < ring.size(0); }),
              "gear: which must have an index of the ring per sample");
  const cpu::RowRoom place = RoomOf(room);
  CheckMessages(messages, num_peers);
  c10::SmallVector<char*, 16> message_bytes;
  c10::SmallVector<int64_t, 16> bytes;
  for (const at::Tensor& message : messages) {
    bytes.push_back(kWordBytes * message.numel());
    message_bytes.push_back(CharsOf(message));
  }
  const cpu::RowsTaken taken = cpu::DecodeRows(
      records, count, layout, data.View(), place, HeadsOf(heads), num_peers, message_bytes.data(),
      bytes.data(), at, reinterpret_cast<Resolution*>(ring.mutable_data_ptr<int64_t>()),
      LongsOf(sizes, "sizes", num_peers), LongsOf(needed, "needed", 2));
  TORCH_CHECK(taken != cpu::RowsTaken::kShort, "gear: messages must hold the rows of samples");
  TORCH_CHECK(taken != cpu::RowsTaken::kOutside, "gear: the room must lie in the arrivals");
}

}  // namespace gear
