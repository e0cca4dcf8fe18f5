// The ops on messages between nodes: draws, reports of priorities, and rows.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "bindings/host_ops.h"
#include "bindings/tensors.h"
#include "draws/draws.h"
#include "rows/rows.h"

namespace gear {

inline constexpr int64_t kPackedWords = 4;  // of a resolution, and one more with steps

// At least `count` values of int64.
template <typename Tensor>
auto* AtLeast(Tensor& tensor, const char* name, int64_t count) {
  auto* values = Values<int64_t>(tensor, name);
  TORCH_CHECK(tensor.numel() >= count, "gear: ", name, " must have ", count, " values, got ",
              tensor.numel());
  return values;
}

// Values of [0, end), at least `count`; checks so many.
inline const int64_t* IndicesOf(const at::Tensor& tensor, const char* name, int64_t count,
                                int64_t end) {
  const int64_t* values = AtLeast(tensor, name, count);
  CheckIndices(values, count, name, end);
  return values;
}

inline cpu::DrawRoutes RoutesOf(const at::Tensor& need_of, const std::optional<at::Tensor>& steps,
                                int64_t count, int64_t words, int64_t offset, int64_t index,
                                int64_t takes_own) {
  cpu::DrawRoutes routes{};
  routes.need_of = Values<int16_t>(need_of, "need_of");
  TORCH_CHECK(
      need_of.dim() == 2 && need_of.size(1) > 0 && index >= 0 && index < need_of.size(0) &&
          offset >= 0 && (words == kPackedWords || words == kPackedWords + 1),
      "gear: need_of must be [nodes, replicas], the node one of them, the offset at least 0");
  routes.num_nodes = need_of.size(0);
  routes.num_replicas = need_of.size(1);
  routes.index = index;
  routes.offset = offset;
  routes.takes_own = takes_own != 0;
  routes.steps = steps ? AtLeast(*steps, "steps", count) : nullptr;
  routes.words = words;
  return routes;
}

inline void AssignDraws(at::Tensor& owner, at::Tensor& own, at::Tensor& points, at::Tensor& found,
                        const at::Tensor& coordinates, const at::Tensor& totals, int64_t index) {
  const int64_t count = coordinates.numel(), num_shards = totals.numel();
  const int64_t* total = AtLeast(totals, "totals", 1);
  int64_t sum = 0;
  for (int64_t s = 0; s < num_shards; ++s) {
    TORCH_CHECK(total[s] >= 0 && total[s] <= std::numeric_limits<int64_t>::max() - sum,
                "gear: totals must be at least 0, with a sum below 2^63");
    sum += total[s];
  }
  *AtLeast(found, "found", 1) = cpu::AssignDraws(
      IndicesOf(coordinates, "coordinates", count, sum), count, total, num_shards, index,
      AtLeast(owner, "owner", count), AtLeast(own, "own", count), AtLeast(points, "points", count));
}

inline void EncodeDraws(at::Tensor& samples, at::Tensor& encoded, at::Tensor& ends,
                        const at::Tensor& records, const at::Tensor& own,
                        const std::optional<at::Tensor>& steps,
                        const std::optional<at::Tensor>& goals, const at::Tensor& readers,
                        const at::Tensor& need_of, int64_t offset, int64_t index,
                        int64_t takes_own) {
  const auto [resolutions, count] = CountedRows<Resolution>(records, "records");
  int64_t* words = Values<int64_t>(encoded, "encoded");
  TORCH_CHECK(encoded.dim() == 2, "gear: encoded must be [n, words]");
  cpu::DrawRoutes routes =
      RoutesOf(need_of, steps, count, encoded.size(1), offset, index, takes_own);
  routes.readers = Values<int64_t>(readers, "readers");
  TORCH_CHECK(readers.dim() == 2 && readers.size(0) == routes.num_replicas,
              "gear: readers must be [replicas, most], got ", readers.sizes());
  routes.most = readers.size(1);
  TORCH_CHECK(std::all_of(routes.readers, routes.readers + readers.numel(),
                          [&](int64_t node) { return node < routes.num_nodes; }),
              "gear: readers must be nodes");
  auto* rows = Rows<cpu::RowSample>(samples, "samples");
  TORCH_CHECK(samples.size(0) >= count * routes.most && encoded.size(0) >= count * routes.most,
              "gear: samples and encoded must hold what each node may need");
  cpu::EncodeDraws(resolutions,
                   IndicesOf(own, "own", count, std::numeric_limits<int64_t>::max() - offset),
                   goals ? AtLeast(*goals, "goals", count) : nullptr, count, routes, rows, words,
                   AtLeast(ends, "ends", routes.num_nodes));
}

inline void DecodeDraws(at::Tensor& ring, at::Tensor& origins, at::Tensor& samples,
                        at::Tensor& which, at::Tensor& found, at::TensorList received,
                        const at::Tensor& records, const at::Tensor& own,
                        const std::optional<at::Tensor>& steps, const at::Tensor& owner,
                        const at::Tensor& asked, const at::Tensor& need_of, int64_t first,
                        int64_t offset, int64_t index, int64_t takes_own) {
  const auto [resolutions, count] = CountedRows<Resolution>(records, "records");
  const int64_t others = asked.numel();
  const int64_t words = kPackedWords + (steps ? 1 : 0);
  const cpu::DrawRoutes routes = RoutesOf(need_of, steps, count, words, offset, index, takes_own);
  const auto [out, size] = CountedRows<Resolution>(ring, "ring");
  int64_t* origin = AtLeast(origins, "origins", size);
  auto* rows = Rows<cpu::RowSample>(samples, "samples");
  TORCH_CHECK(samples.size(0) >= count + others, "gear: samples must hold all that is taken");
  int64_t* places = AtLeast(which, "which", count + others);
  int64_t* num_found = AtLeast(found, "found", 1);
  const int64_t* own_samples = IndicesOf(own, "own", count, size);
  const int64_t* asked_samples = IndicesOf(asked, "asked", others, size);
  const int64_t* owners = IndicesOf(owner, "owner", others, routes.num_nodes);
  TORCH_CHECK(static_cast<int64_t>(received.size()) == routes.num_nodes,
              "gear: received must have the words of each node");
  std::vector<int64_t> wanted(routes.num_nodes, 0);
  for (int64_t i = 0; i < others; ++i) ++wanted[owners[i]];
  std::vector<const int64_t*> received_words(routes.num_nodes);
  for (int64_t node = 0; node < routes.num_nodes; ++node)
    received_words[node] =
        AtLeast(received[node], "received", node == index ? 0 : words * wanted[node]);
  constexpr int64_t kUnknown = -1;  // id of a sample of which this node has no row
  std::fill(out, out + size, Resolution{kUnknown, 0, 0, 0, 0, 0, 0, 0});
  const int64_t taken = cpu::DecodeDraws(received_words.data(), owners, asked_samples, others,
                                         routes, first, out, origin, rows, places);
  *num_found = taken + cpu::PutDraws(resolutions, own_samples, count, routes, out, origin,
                                     rows + taken, places + taken);
}

inline void EncodeReports(at::Tensor& encoded, at::Tensor& ends, const at::Tensor& reports,
                          int64_t latest) {
  const auto [records, count] = CountedRows<Report>(reports, "reports");
  const int64_t num_shards = ends.numel();
  for (int64_t i = 0; i < count; ++i) {
    const int64_t shard = records[i].update.slot >> 32;
    TORCH_CHECK(shard >= 0 && shard < num_shards, "gear: report ", i, " must be of one of ",
                num_shards, " shards, got ", shard);
  }
  cpu::EncodeReports(records, count, latest, num_shards,
                     Rows<cpu::EncodedReport>(encoded, "encoded", count),
                     Values<int64_t>(ends, "ends"));
}

inline void DecodeReports(at::Tensor& reports, const at::Tensor& encoded, int64_t latest) {
  const auto [records, count] = CountedRows<cpu::EncodedReport>(encoded, "encoded");
  cpu::DecodeReports(records, count, latest, Rows<Report>(reports, "reports", count));
}

inline cpu::RowLayout LayoutOf(const at::Tensor& windows, const at::Tensor& members,
                               const at::Tensor& columns) {
  cpu::RowLayout layout{};
  layout.windows = Rows<cpu::RowWindow>(windows, "windows");
  layout.num_windows = windows.size(0);
  layout.columns = Rows<cpu::RowColumn>(columns, "columns");
  layout.num_columns = columns.size(0);
  layout.members = Values<bool>(members, "members");
  TORCH_CHECK(members.dim() == 2 && members.size(0) >= layout.num_windows,
              "gear: members must be [windows or more, needs], got ", members.sizes());
  layout.num_needs = members.size(1);
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

inline const cpu::RowSample* SamplesOf(const at::Tensor& samples, int64_t num_peers,
                                       int64_t num_needs, int64_t num_slots) {
  constexpr int64_t kMostPeers = int64_t{1} << 20;
  TORCH_CHECK(num_peers <= kMostPeers && num_slots <= kMostSteps, "gear: too many peers or slots");
  const auto* records = Rows<cpu::RowSample>(samples, "samples");
  for (int64_t i = 0; i < samples.size(0); ++i) {
    const cpu::RowSample& s = records[i];
    TORCH_CHECK(s.peer >= 0 && s.peer < num_peers && s.need >= 0 && s.need < num_needs &&
                    s.slot >= 0 && s.slot < num_slots && s.num_steps >= 1 &&
                    s.num_steps <= kMostSteps && s.anchor >= 0 && s.anchor < s.num_steps &&
                    s.n_steps >= 0 && s.n_steps <= s.num_steps && s.goal >= -1 &&
                    s.goal <= s.num_steps,
                "gear: sample ", i, " must be a step of a trajectory, of a peer and a need");
  }
  return records;
}

// The bytes of columns, and the rows that each has.
struct Columns {
  Columns(at::TensorList tensors, const cpu::RowLayout& layout) {
    TORCH_CHECK(static_cast<int64_t>(tensors.size()) == layout.num_columns, "gear: there must be ",
                layout.num_columns, " columns, got ", tensors.size());
    for (int64_t c = 0; c < layout.num_columns; ++c) {
      const at::Tensor& bytes = tensors[c];
      data.push_back(const_cast<char*>(Values<char>(bytes, "columns")));
      TORCH_CHECK(bytes.dim() == 1, "gear: columns must be [n], got ", bytes.sizes());
      const int64_t row_bytes = layout.columns[c].row_bytes;
      num_rows.push_back(row_bytes == 0 ? kMostSteps : bytes.numel() / row_bytes);
    }
  }
  cpu::RowColumns View() const { return {data.data(), num_rows.data()}; }

  c10::SmallVector<char*, 16> data;
  c10::SmallVector<int64_t, 16> num_rows;
};

// Bytes in front of the rows of each message.
inline const int64_t* HeadsOf(const at::Tensor& heads) {
  const int64_t* bytes = Values<int64_t>(heads, "heads");
  TORCH_CHECK(std::all_of(bytes, bytes + heads.numel(),
                          [](int64_t head) { return head >= 0 && head < kMostSteps; }),
              "gear: heads must be at least 0");
  return bytes;
}

inline void EncodeRows(at::Tensor& message, at::Tensor& sizes, at::TensorList stored,
                       const at::Tensor& samples, const at::Tensor& windows,
                       const at::Tensor& members, const at::Tensor& columns,
                       const at::Tensor& heads, const at::Tensor& slots) {
  const Slot* slot_records = Rows<Slot>(slots, "slots");
  const cpu::RowLayout layout = LayoutOf(windows, members, columns);
  const Columns data(stored, layout);
  const int64_t num_peers = heads.numel();
  const auto* records = SamplesOf(samples, num_peers, layout.num_needs, slots.size(0));
  auto* words = Values<int64_t>(message, "message");
  TORCH_CHECK(cpu::EncodeRows(records, samples.size(0), layout, slot_records, data.View(),
                              HeadsOf(heads), num_peers, Values<int64_t>(sizes, "sizes", num_peers),
                              reinterpret_cast<char*>(words), message.nbytes()),
              "gear: rows of samples must lie in the columns");
}

inline void DecodeRows(at::TensorList arrivals, at::Tensor& ring, at::Tensor& sizes,
                       at::Tensor& needed, at::TensorList messages, const at::Tensor& which,
                       const at::Tensor& samples, const at::Tensor& windows,
                       const at::Tensor& members, const at::Tensor& columns,
                       const at::Tensor& heads, at::IntArrayRef room) {
  Resolution* resolutions = Rows<Resolution>(ring, "ring");
  const cpu::RowLayout layout = LayoutOf(windows, members, columns);
  const Columns data(arrivals, layout);
  const int64_t count = samples.size(0), num_peers = heads.numel();
  const auto* records = SamplesOf(samples, num_peers, layout.num_needs, kMostSteps);
  const int64_t* at = Values<int64_t>(which, "which");
  TORCH_CHECK(which.numel() == count &&
                  std::all_of(at, at + count,
                              [&](int64_t index) { return index >= 0 && index < ring.size(0); }),
              "gear: which must have an index of the ring per sample");
  TORCH_CHECK(
      room.size() == 6 && std::all_of(room.begin(), room.end(),
                                      [](int64_t word) { return word >= 0 && word <= kMostSteps; }),
      "gear: room must be first row, rows, first slot, slots, base row, base slot");
  TORCH_CHECK(static_cast<int64_t>(messages.size()) == num_peers,
              "gear: there must be a message of each peer");
  c10::SmallVector<char*, 16> message_bytes;
  c10::SmallVector<int64_t, 16> bytes;
  for (const at::Tensor& message : messages) {
    const auto* words = Values<int64_t>(message, "messages");
    message_bytes.push_back(reinterpret_cast<char*>(const_cast<int64_t*>(words)));
    bytes.push_back(static_cast<int64_t>(message.nbytes()));
  }
  const cpu::RowsTaken taken = cpu::DecodeRows(
      records, count, layout, data.View(), {room[0], room[1], room[2], room[3], room[4], room[5]},
      HeadsOf(heads), num_peers, message_bytes.data(), bytes.data(), at, resolutions,
      Values<int64_t>(sizes, "sizes", num_peers), Values<int64_t>(needed, "needed", 2));
  TORCH_CHECK(taken != cpu::RowsTaken::kShort, "gear: messages must hold the rows of samples");
  TORCH_CHECK(taken != cpu::RowsTaken::kOutside, "gear: the room must lie in the arrivals");
}

}  // namespace gear
