// The ops on rows that travel between nodes.
#include <ATen/core/Tensor.h>

#include <initializer_list>

#include "bindings/checks.h"
#include "bindings/ops.h"
#include "cpu/ops.h"

namespace gear {
namespace {

constexpr int64_t kSampleWords = sizeof(cpu::RowSample) / sizeof(int64_t);
constexpr int64_t kWindowWords = sizeof(cpu::RowWindow) / sizeof(int64_t);
constexpr int64_t kColumnWords = sizeof(cpu::RowColumn) / sizeof(int64_t);

// Bytes of a tensor that is nothing but bytes.
int64_t BytesOf(const at::Tensor& tensor, const char* name) {
  CheckTensor(tensor, name, at::kByte);
  TORCH_CHECK(tensor.dim() == 1, "gear: ", name, " must be [n], got ", tensor.sizes());
  return tensor.numel();
}

void CheckPieces(const cpu::Piece* pieces, int64_t first, int64_t end, int64_t to_bytes,
                 int64_t source_bytes) {
  for (int64_t i = first; i < end; ++i) {
    const cpu::Piece& p = pieces[i];
    TORCH_CHECK(p.to >= 0 && p.source >= 0 && p.bytes >= 0 && p.bytes <= to_bytes - p.to &&
                    p.bytes <= source_bytes - p.source,
                "gear: piece ", i, " must lie in ", to_bytes, " bytes and ", source_bytes,
                " of the source: ", p.bytes, " bytes to ", p.to, " from ", p.source);
  }
}

cpu::RowLayout LayoutOf(const at::Tensor& windows, const at::Tensor& members,
                        const at::Tensor& columns) {
  CheckRecords(windows, "windows", kWindowWords);
  CheckRecords(columns, "columns", kColumnWords);
  CheckTensor(members, "members", at::kBool);
  TORCH_CHECK(members.dim() == 2 && members.size(0) >= windows.size(0),
              "gear: members must be [windows or more, needs], got ", members.sizes());
  const cpu::RowLayout layout{Records<cpu::RowWindow>(windows), windows.size(0),
                              members.const_data_ptr<bool>(),   members.size(1),
                              Records<cpu::RowColumn>(columns), columns.size(0)};
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

int64_t PiecesOf(const cpu::RowLayout& layout, int64_t count) {
  int64_t most = 0;
  for (int64_t c = 0; c < layout.num_columns; ++c) {
    const int64_t group = layout.columns[c].group;
    if (group < 0) ++most;
    for (int64_t w = 0; group >= 0 && w < layout.num_windows; ++w)
      most += layout.windows[w].group == group;
  }
  return most * count;
}

}  // namespace

void CopyRows(at::TensorList to, at::TensorList sources, const at::Tensor& pieces,
              const at::Tensor& ends) {
  CheckRecords(pieces, "pieces", kPieceWords);
  CheckTensor(ends, "ends", at::kLong);
  const int64_t num_to = static_cast<int64_t>(to.size());
  const int64_t num_sources = static_cast<int64_t>(sources.size());
  TORCH_CHECK(ends.numel() == num_to * num_sources, "gear: ends must have ", num_to, " x ",
              num_sources, " values, got ", ends.numel());
  const cpu::Piece* records = Records<cpu::Piece>(pieces);
  const int64_t* end = ends.const_data_ptr<int64_t>();
  for (const bool copies : {false, true}) {  // what is wrong is refused before any is copied
    int64_t first = 0;
    for (int64_t block = 0; block < num_to * num_sources; ++block) {
      const at::Tensor &target = to[block / num_sources], &source = sources[block % num_sources];
      const int64_t last = end[block];
      if (!copies) {
        TORCH_CHECK(first <= last && last <= pieces.size(0), "gear: ends must ascend in pieces");
        CheckPieces(records, first, last, BytesOf(target, "to"), BytesOf(source, "sources"));
      } else if (first < last) {
        cpu::CopyPieces(records + first, last - first,
                        static_cast<const char*>(source.const_data_ptr()),
                        static_cast<char*>(target.mutable_data_ptr()));
      }
      first = last;
    }
  }
}

void PlanRows(at::Tensor& pieces, at::Tensor& ends, at::Tensor& sizes, at::Tensor& lies,
              at::Tensor& room, const at::Tensor& samples, const at::Tensor& windows,
              const at::Tensor& members, const at::Tensor& columns, const at::Tensor& heads,
              const std::optional<at::Tensor>& slots, int64_t first_row, int64_t first_slot) {
  CheckRecords(samples, "samples", kSampleWords);
  CheckRecords(pieces, "pieces", kPieceWords);
  for (const at::Tensor* tensor :
       std::initializer_list<const at::Tensor*>{&ends, &sizes, &lies, &room, &heads})
    CheckTensor(*tensor, "ends, sizes, lies, room and heads", at::kLong);
  if (slots) CheckRecords(*slots, "slots", kSlotWords);
  const cpu::RowLayout layout = LayoutOf(windows, members, columns);
  const int64_t count = samples.size(0), num_peers = heads.numel();
  TORCH_CHECK(pieces.size(0) >= PiecesOf(layout, count) &&
                  ends.numel() == layout.num_columns * num_peers && sizes.numel() == num_peers &&
                  lies.numel() == 2 * count && room.numel() == 2,
              "gear: pieces, ends, sizes, lies and room must hold what a plan may have");
  const auto* records = Records<cpu::RowSample>(samples);
  CheckSamples(records, count, num_peers, layout.num_needs, slots ? slots->size(0) : kMostSteps);
  cpu::RowPlan plan{heads.const_data_ptr<int64_t>(),
                    num_peers,
                    reinterpret_cast<cpu::Piece*>(pieces.mutable_data_ptr<int64_t>()),
                    ends.mutable_data_ptr<int64_t>(),
                    sizes.mutable_data_ptr<int64_t>(),
                    lies.mutable_data_ptr<int64_t>(),
                    0,
                    0};
  cpu::PlanRows(records, count, layout, slots ? Records<Slot>(*slots) : nullptr, first_row,
                first_slot, &plan);
  room.mutable_data_ptr<int64_t>()[0] = plan.num_rows;
  room.mutable_data_ptr<int64_t>()[1] = plan.num_trajectories;
}

}  // namespace gear
