// Which rows of which trajectories travel, each once, and where they lie in messages.
#include <algorithm>
#include <array>
#include <vector>

#include "common/host_device.h"
#include "cpu/ops.h"

namespace gear::cpu {
namespace {

constexpr int64_t kZero = 0;

// Something that is ordered by a number which is at least 0.
struct Keyed {
  int64_t key, value;
};

// Sorts by key, equal ones as they stand: digit by digit, as far as the largest key reaches.
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

// Rows [first, end) of a trajectory.
struct Span {
  int64_t trajectory, first, end;
};

// Rows that lie together, in the store or among the arrivals.
struct Placed {
  int64_t row, rows;
};

// What is copied of columns that are read alike, by peer.
struct Group {
  std::vector<Placed> pieces;
  std::vector<int64_t> ends, rows;  // of each peer: pieces up to and with its own; its rows
};

class Planner {
 public:
  Planner(const RowSample* samples, int64_t count, const RowLayout& layout)
      : samples_(samples), count_(count), layout_(layout), low_(count), high_(count, 0) {
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

  // Writes pieces from where they lie in the store to messages one behind the other.
  void Send(const Slot* slots, RowPlan* plan) {
    std::vector<Group> groups;
    for (const std::vector<Span>& spans : spans_)
      groups.push_back(Place(spans, plan->num_peers, [&](const Span& span) {
        return slots[slots_[span.trajectory]].first_row + span.first;
      }));
    Emit(&groups, [&](const Span& span) { return slots_[span.trajectory]; }, true, plan);
  }

  // Writes pieces from each peer's message to the arrivals: blocks of rows, one for all columns.
  void Receive(int64_t first_row, int64_t first_slot, RowPlan* plan) {
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
      plan->lies[2 * i] = block[i] < 0 ? 0 : begin[block[i]] - blocks[block[i]].first;
      plan->lies[2 * i + 1] = trajectory_[i];
    }
    plan->num_rows = begin.back();
    plan->num_trajectories = static_cast<int64_t>(slots_.size());
    std::vector<Group> groups;
    for (const std::vector<Span>& spans : spans_) {
      size_t at = 0;
      groups.push_back(Place(spans, plan->num_peers, [&](const Span& span) {
        while (blocks[at].trajectory < span.trajectory || blocks[at].end <= span.first) ++at;
        return first_row + begin[at] + span.first - blocks[at].first;
      }));
    }
    Emit(&groups, [&](const Span& span) { return first_slot + span.trajectory; }, false, plan);
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
        // The nearest row has a place even if it does not travel: ops check that it has.
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

  // Says where spans lie, by peer; row_of(span) is asked in their order.
  template <typename RowOf>
  Group Place(const std::vector<Span>& spans, int64_t num_peers, const RowOf& row_of) {
    Group group{{}, std::vector<int64_t>(num_peers, 0), std::vector<int64_t>(num_peers, 0)};
    group.pieces.reserve(spans.size());
    for (const Span& span : spans) {
      const int64_t peer = peers_[span.trajectory], rows = span.end - span.first;
      group.pieces.push_back({row_of(span), rows});
      group.rows[peer] += rows;
      ++group.ends[peer];
    }
    for (int64_t p = 1; p < num_peers; ++p) group.ends[p] += group.ends[p - 1];
    return group;
  }

  // Writes the pieces of every column, by peer; single_row_of(span) says where the rows of columns
  // of one row per trajectory lie.
  template <typename RowOf>
  void Emit(std::vector<Group>* groups, const RowOf& single_row_of, bool sends, RowPlan* plan) {
    std::vector<size_t> group_of;
    std::fill(plan->sizes, plan->sizes + plan->num_peers, 0);
    for (int64_t c = 0; c < layout_.num_columns; ++c) {
      const RowColumn& column = layout_.columns[c];
      group_of.push_back(column.group < 0 ? groups->size() : static_cast<size_t>(column.group));
      if (column.group < 0)
        groups->push_back(Place(Single(column), plan->num_peers, single_row_of));
      const Group& group = (*groups)[group_of.back()];
      for (int64_t p = 0; p < plan->num_peers; ++p)
        plan->sizes[p] += group.rows[p] * column.row_bytes;
    }
    std::vector<int64_t> filled(plan->heads, plan->heads + plan->num_peers);
    for (int64_t p = 0, begin = 0; sends && p < plan->num_peers; ++p) {
      filled[p] += begin;
      begin += (plan->heads[p] + plan->sizes[p] + 7) / 8 * 8;
    }
    Piece* piece = plan->pieces;
    for (int64_t c = 0; c < layout_.num_columns; ++c) {
      const int64_t row_bytes = layout_.columns[c].row_bytes;
      const Group& group = (*groups)[group_of[c]];
      const Placed* placed = group.pieces.data();
      for (int64_t p = 0; p < plan->num_peers; ++p) {
        for (int64_t at = filled[p]; placed < group.pieces.data() + group.ends[p]; ++placed) {
          const int64_t from = placed->row * row_bytes, bytes = placed->rows * row_bytes;
          *piece++ = sends ? Piece{at, from, bytes} : Piece{from, at, bytes};
          filled[p] = at += bytes;
        }
        plan->ends[c * plan->num_peers + p] = piece - plan->pieces;
      }
    }
  }

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
  int64_t apart_ = 2;                   // of the rows of neighbouring trajectories
  std::vector<int64_t> low_, high_;     // of each sample's rows
  std::vector<int64_t> trajectory_;     // of each sample
  std::vector<int64_t> order_;          // of samples, by trajectory and anchor
  std::vector<int64_t> peers_, slots_;  // of each trajectory, ascending
  std::vector<std::vector<Keyed>> found_;
  std::vector<std::vector<Span>> spans_;  // of each group of windows
};

}  // namespace

void PlanRows(const RowSample* samples, int64_t count, const RowLayout& layout, const Slot* slots,
              int64_t first_row, int64_t first_slot, RowPlan* plan) {
  Planner planner(samples, count, layout);
  if (slots != nullptr)
    planner.Send(slots, plan);
  else
    planner.Receive(first_row, first_slot, plan);
}

}  // namespace gear::cpu
