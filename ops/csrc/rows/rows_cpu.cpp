// Merges the windows of rows that exchange_plan.py asks for, so that each row is sent once, and
// copies rows into messages and out of them.
#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "common/prefetch.h"
#include "common/row_copies.h"
#include "rows/rows.h"

namespace gear::cpu {
namespace {

constexpr int64_t kZero = 0;

// A value with a sort key of at least 0.
struct Keyed {
  int64_t key, value;
};

// Stable radix sort by key, over the digits of the largest key.
void Sort(std::vector<Keyed>* items) {
  int64_t most = 0;
  bool sorted = true;
  for (size_t i = 0; i < items->size(); ++i) {
    sorted = sorted && (i == 0 || (*items)[i - 1].key <= (*items)[i].key);
    most = Max(most, (*items)[i].key);
  }
  if (sorted) return;
  std::vector<Keyed> other(items->size());
  constexpr int kDigitBits = 11;
  constexpr int64_t kMost = (1 << kDigitBits) - 1;
  for (int shift = 0; shift < 64 && most >> shift != 0; shift += kDigitBits) {
    std::array<uint32_t, kMost + 2> place{};
    const auto last = static_cast<size_t>(Min(most >> shift, kMost)) + 1;
    for (const Keyed& item : *items) ++place[static_cast<size_t>(item.key >> shift & kMost) + 1];
    for (size_t i = 1; i <= last; ++i) place[i] += place[i - 1];
    for (const Keyed& item : *items) other[place[item.key >> shift & kMost]++] = item;
    items->swap(other);
  }
}

// Rows of a column that lie together.
struct Placed {
  int64_t row, rows;
};

// Copies rows of a column one after the other, or the inverse.
template <bool kToColumn>
void CopyPlaced(const Placed* placed, int64_t count, int64_t row_bytes, char* column,
                char* together) {
  constexpr int64_t kLookAhead = 48;  // places that are requested before their turn
  WithRowBytes(row_bytes, [&](auto one) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kLookAhead < count) {
        const Placed& next = placed[i + kLookAhead];
        PrefetchBytes(column + next.row * one, next.rows * one);
      }
      char* rows = column + placed[i].row * one;
      char* to = kToColumn ? rows : together;
      const char* from = kToColumn ? together : rows;
      const int64_t bytes = placed[i].rows * one;
      if (placed[i].rows == 1)
        std::memcpy(to, from, static_cast<size_t>(one));
      else
        std::memcpy(to, from, static_cast<size_t>(bytes));
      together += bytes;
    }
  });
}

// Rows [first, end) of a trajectory.
struct Span {
  int64_t trajectory, first, end;
};

// Rows of columns that are read alike, by peer.
struct Group {
  std::vector<Placed> placed;
  std::vector<int64_t> ends, rows;  // of each peer: placed ones up to and with its own; its rows
  int64_t first = 0, end = 0;       // of all rows
};

class Planner {
 public:
  Planner(const RowSample* samples, int64_t count, const RowLayout& layout, int64_t num_peers)
      : samples_(samples),
        count_(count),
        layout_(layout),
        num_peers_(num_peers),
        low_(count),
        high_(count, 0) {
    FindTrajectories();
    for (int64_t i = 0; i < count; ++i) apart_ = Max(apart_, samples[i].num_steps + 2);
    std::fill(low_.begin(), low_.end(), apart_);
    for (int64_t w = 0; w < layout.num_windows; ++w) {
      const RowWindow& window = layout.windows[w];
      if (w == 0 || window.group != layout.windows[w - 1].group) found_.emplace_back();
      AddWindow(window, layout.members + w * layout.num_needs);
      const bool last = w + 1 == layout.num_windows || layout.windows[w + 1].group != window.group;
      if (last) spans_.push_back(Merge(&found_.back(), nullptr));
    }
  }

  // Finds where the rows lie in a store.
  void PlaceInStore(const Slot* slots) {
    for (const std::vector<Span>& spans : spans_)
      groups_.push_back(Place(spans, [&](const Span& span) {
        return slots[slots_[span.trajectory]].first_row + span.first;
      }));
    PlaceSingle([&](const Span& span) { return slots_[span.trajectory]; });
  }

  // Finds where the rows lie among the arrivals: blocks of rows, one for all columns.
  void PlaceArrivals(const RowRoom& room, const int64_t* which, Resolution* ring, int64_t* needed) {
    std::vector<Keyed> ordered;
    ordered.reserve(order_.size());
    for (const int64_t i : order_)
      if (low_[i] < high_[i]) ordered.push_back({trajectory_[i] * apart_ + low_[i], i});
    std::vector<int64_t> block(count_, -1);
    const std::vector<Span> blocks = Merge(&ordered, &block);
    std::vector<int64_t> begin(blocks.size() + 1, 0);
    for (size_t i = 0; i < blocks.size(); ++i)
      begin[i + 1] = begin[i] + blocks[i].end - blocks[i].first;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t shift = block[i] < 0 ? 0 : begin[block[i]] - blocks[block[i]].first;
      ring[which[i]].first_row = room.base_row + room.first_row + shift;
      ring[which[i]].slot = room.base_slot + room.first_slot + trajectory_[i];
    }
    needed[0] = begin.back();
    needed[1] = static_cast<int64_t>(slots_.size());
    for (const std::vector<Span>& spans : spans_) {
      size_t at = 0;
      groups_.push_back(Place(spans, [&](const Span& span) {
        while (blocks[at].trajectory < span.trajectory || blocks[at].end <= span.first) ++at;
        return room.first_row + begin[at] + span.first - blocks[at].first;
      }));
    }
    PlaceSingle([&](const Span& span) { return room.first_slot + span.trajectory; });
  }

  // Sets the bytes of rows in each peer's message.
  void Measure(int64_t* sizes) const {
    std::fill(sizes, sizes + num_peers_, 0);
    for (int64_t c = 0; c < layout_.num_columns; ++c)
      for (int64_t p = 0; p < num_peers_; ++p)
        sizes[p] += GroupOf(c).rows[p] * layout_.columns[c].row_bytes;
  }

  // Whether all rows lie in their columns.
  bool Fits(const RowColumns& columns) const {
    for (int64_t c = 0; c < layout_.num_columns; ++c)
      if (GroupOf(c).first < 0 || GroupOf(c).end > columns.num_rows[c]) return false;
    return true;
  }

  // Copies every row between its column and its message, after the message's head.
  template <bool kToColumn>
  void CopyAll(const RowColumns& columns, std::vector<char*> messages) const {
    for (int64_t c = 0; c < layout_.num_columns; ++c) {
      const Group& group = GroupOf(c);
      const Placed* placed = group.placed.data();
      for (int64_t p = 0; p < num_peers_; ++p) {
        const Placed* end = group.placed.data() + group.ends[p];
        const int64_t row_bytes = layout_.columns[c].row_bytes;
        CopyPlaced<kToColumn>(placed, end - placed, row_bytes, columns.data[c], messages[p]);
        messages[p] += group.rows[p] * row_bytes;
        placed = end;
      }
    }
  }

 private:
  // Numbers the trajectories by peer and slot, and orders samples by trajectory and anchor: so what
  // a window reads of them is mostly in order already.
  void FindTrajectories() {
    int64_t wide = 1;
    std::vector<Keyed> ordered(count_);
    for (int64_t i = 0; i < count_; ++i) {
      wide = Max(wide, samples_[i].slot + 1);
      ordered[i] = {samples_[i].anchor, i};
    }
    Sort(&ordered);
    for (Keyed& item : ordered)
      item.key = samples_[item.value].peer * wide + samples_[item.value].slot;
    Sort(&ordered);
    trajectory_.resize(count_);
    order_.reserve(count_);
    for (size_t i = 0; i < ordered.size(); ++i) {
      const RowSample& sample = samples_[ordered[i].value];
      if (i == 0 || ordered[i].key != ordered[i - 1].key) {
        peers_.push_back(sample.peer);
        slots_.push_back(sample.slot);
      }
      trajectory_[ordered[i].value] = static_cast<int64_t>(slots_.size()) - 1;
      order_.push_back(ordered[i].value);
    }
  }

  // Adds what one window reads of each sample that has it, and widens the samples' own rows by it.
  void AddWindow(const RowWindow& window, const bool* members) {
    found_.back().reserve(found_.back().size() + order_.size());
    for (const int64_t i : order_) {
      const RowSample& s = samples_[i];
      if (!members[s.need]) continue;
      int64_t first = s.goal, end = s.goal + 1;
      if (window.is_goal) {
        if (s.goal < 0) continue;
      } else {
        const int64_t held = s.num_steps + window.final_row;
        const int64_t at = s.anchor + window.first + (window.follows ? s.n_steps : 0);
        const int64_t nearest = Min(Max(at, kZero), held - 1);
        first = Min(Max(at, kZero), held);
        end = Max(first, Min(Max(at + window.end - window.first, kZero), held));
        // The nearest row has a place even if it is not sent: ops check that it has.
        Widen(i, nearest, nearest + 1);
        if (end <= first && window.edge) first = nearest, end = nearest + 1;
        if (end <= first) continue;
      }
      Widen(i, first, end);
      found_.back().push_back({trajectory_[i] * apart_ + first, end - first});
    }
  }

  void Widen(int64_t sample, int64_t first, int64_t end) {
    low_[sample] = Min(low_[sample], first);
    high_[sample] = Max(high_[sample], end);
  }

  // Merges spans that overlap or touch. `ordered` has lengths as values or, where the block of each
  // sample is wanted, samples.
  std::vector<Span> Merge(std::vector<Keyed>* ordered, std::vector<int64_t>* block) {
    Sort(ordered);
    std::vector<Span> merged;
    merged.reserve(ordered->size());
    int64_t reach = -1, trajectory = 0;
    for (const Keyed& item : *ordered) {
      const int64_t rows = block == nullptr ? item.value : high_[item.value] - low_[item.value];
      if (item.key > reach || merged.empty()) {
        while (item.key >= (trajectory + 1) * apart_) ++trajectory;
        const int64_t first = item.key - trajectory * apart_;
        merged.push_back({trajectory, first, first});
      }
      reach = Max(reach, item.key + rows);
      merged.back().end = reach - trajectory * apart_;
      if (block != nullptr) (*block)[item.value] = static_cast<int64_t>(merged.size()) - 1;
    }
    return merged;
  }

  // Lists the places of spans, by peer; calls row_of(span) in their order. Spans that are
  // contiguous in both places are merged.
  template <typename RowOf>
  Group Place(const std::vector<Span>& spans, const RowOf& row_of) {
    Group group;
    group.ends.assign(num_peers_, 0);
    group.rows.assign(num_peers_, 0);
    group.placed.reserve(spans.size());
    int64_t last = -1;  // the peer of the one before
    for (const Span& span : spans) {
      const int64_t peer = peers_[span.trajectory], rows = span.end - span.first;
      const int64_t row = row_of(span);
      group.first = Min(group.first, row);
      group.end = Max(group.end, row + rows);
      group.rows[peer] += rows;
      if (peer == last && group.placed.back().row + group.placed.back().rows == row) {
        group.placed.back().rows += rows;
        continue;
      }
      group.placed.push_back({row, rows});
      ++group.ends[peer];
      last = peer;
    }
    for (int64_t p = 1; p < num_peers_; ++p) group.ends[p] += group.ends[p - 1];
    return group;
  }

  // Lists the places of rows of columns of one row per trajectory, and the group of each column.
  template <typename RowOf>
  void PlaceSingle(const RowOf& row_of) {
    for (int64_t c = 0; c < layout_.num_columns; ++c) {
      const RowColumn& column = layout_.columns[c];
      group_of_.push_back(column.group < 0 ? groups_.size() : static_cast<size_t>(column.group));
      if (column.group < 0) groups_.push_back(Place(Single(column), row_of));
    }
  }

  const Group& GroupOf(int64_t column) const { return groups_[group_of_[column]]; }

  // The trajectories of which a column of one row each is read.
  std::vector<Span> Single(const RowColumn& column) {
    const bool* members = layout_.members + column.members * layout_.num_needs;
    std::vector<bool> wanted(slots_.size());
    for (int64_t i = 0; i < count_; ++i)
      if (members[samples_[i].need]) wanted[trajectory_[i]] = true;
    std::vector<Span> spans;
    for (size_t t = 0; t < wanted.size(); ++t)
      if (wanted[t]) spans.push_back({static_cast<int64_t>(t), 0, 1});
    return spans;
  }

  const RowSample* samples_;
  int64_t count_;
  RowLayout layout_;
  int64_t num_peers_;
  int64_t apart_ = 2;                   // of the rows of neighbouring trajectories
  std::vector<int64_t> low_, high_;     // of each sample's rows
  std::vector<int64_t> trajectory_;     // of each sample
  std::vector<int64_t> order_;          // of samples, by trajectory and anchor
  std::vector<int64_t> peers_, slots_;  // of each trajectory, ascending
  std::vector<std::vector<Keyed>> found_;
  std::vector<std::vector<Span>> spans_;  // of each group of windows
  std::vector<Group> groups_;             // those of windows first
  std::vector<size_t> group_of_;          // of each column
};

}  // namespace

bool EncodeRows(const RowSample* samples, int64_t count, const RowLayout& layout, const Slot* slots,
                const RowColumns& columns, const int64_t* heads, int64_t num_peers, int64_t* sizes,
                char* message, int64_t message_bytes) {
  Planner planner(samples, count, layout, num_peers);
  planner.PlaceInStore(slots);
  planner.Measure(sizes);
  std::vector<int64_t> begins(num_peers + 1, 0);
  for (int64_t p = 0; p < num_peers; ++p)
    begins[p + 1] = begins[p] + (heads[p] + sizes[p] + 7) / 8 * 8;
  if (begins.back() > message_bytes) return true;
  if (!planner.Fits(columns)) return false;
  std::vector<char*> messages;
  for (int64_t p = 0; p < num_peers; ++p) messages.push_back(message + begins[p] + heads[p]);
  planner.CopyAll<false>(columns, std::move(messages));
  return true;
}

RowsTaken DecodeRows(const RowSample* samples, int64_t count, const RowLayout& layout,
                     const RowColumns& columns, const RowRoom& room, const int64_t* heads,
                     int64_t num_peers, char* const* messages, const int64_t* message_bytes,
                     const int64_t* which, Resolution* ring, int64_t* sizes, int64_t* needed) {
  Planner planner(samples, count, layout, num_peers);
  planner.PlaceArrivals(room, which, ring, needed);
  planner.Measure(sizes);
  if (needed[0] > room.num_rows || needed[1] > room.num_slots) return RowsTaken::kNoRoom;
  std::vector<char*> behind;
  for (int64_t p = 0; p < num_peers; ++p) {
    if (sizes[p] == 0) {
      behind.push_back(nullptr);
      continue;
    }
    if (message_bytes[p] - heads[p] < sizes[p]) return RowsTaken::kShort;
    behind.push_back(messages[p] + heads[p]);
  }
  if (!planner.Fits(columns)) return RowsTaken::kOutside;
  planner.CopyAll<true>(columns, std::move(behind));
  return RowsTaken::kAll;
}

}  // namespace gear::cpu
