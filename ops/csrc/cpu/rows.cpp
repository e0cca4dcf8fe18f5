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

// Sorts by key, equal ones as they stand: byte by byte, as far as the largest key reaches.
void Sort(std::vector<Keyed>* items) {
  int64_t most = 0;
  bool sorted = true;
  for (size_t i = 0; i < items->size(); ++i) {
    sorted = sorted && (i == 0 || (*items)[i - 1].key <= (*items)[i].key);
    most = Max(most, (*items)[i].key);
  }
  if (sorted) return;
  std::vector<Keyed> other(items->size());
  for (int shift = 0; shift < 64 && most >> shift != 0; shift += 8) {
    std::array<size_t, 257> place{};
    for (const Keyed& item : *items) ++place[static_cast<size_t>(item.key >> shift & 255) + 1];
    for (size_t i = 1; i < place.size(); ++i) place[i] += place[i - 1];
    for (const Keyed& item : *items) other[place[item.key >> shift & 255]++] = item;
    items->swap(other);
  }
}

// Rows [first, end) of a trajectory.
struct Span {
  int64_t trajectory, first, end;
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
    Emit(plan, [&](const RowColumn& column, const Span& span, int64_t) {
      const int64_t slot = slots_[span.trajectory];
      return column.group < 0 ? slot : slots[slot].first_row + span.first;
    });
    std::vector<int64_t> begin(plan->num_peers + 1, 0);
    for (int64_t p = 0; p < plan->num_peers; ++p)
      begin[p + 1] = begin[p] + (plan->heads[p] + plan->sizes[p] + 7) / 8 * 8;
    Piece* piece = plan->pieces;
    for (int64_t i = 0; i < layout_.num_columns * plan->num_peers; ++i)
      for (; piece < plan->pieces + plan->ends[i]; ++piece)
        *piece = {begin[i % plan->num_peers] + piece->source, piece->to, piece->bytes};
  }

  // Writes pieces from each peer's message to the arrivals: blocks of rows, one for all columns.
  void Receive(int64_t first_row, int64_t first_slot, RowPlan* plan) {
    std::vector<Keyed> ordered;
    for (int64_t i = 0; i < count_; ++i)
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
    size_t at = 0;
    Emit(plan, [&](const RowColumn& column, const Span& span, int64_t index) {
      if (column.group < 0) return first_slot + span.trajectory;
      if (index == 0) at = 0;
      while (blocks[at].trajectory < span.trajectory || blocks[at].end <= span.first) ++at;
      return first_row + begin[at] + span.first - blocks[at].first;
    });
  }

 private:
  void FindTrajectories() {
    int64_t wide = 1;
    for (int64_t i = 0; i < count_; ++i) wide = Max(wide, samples_[i].slot + 1);
    std::vector<Keyed> ordered(count_);
    for (int64_t i = 0; i < count_; ++i)
      ordered[i] = {samples_[i].peer * wide + samples_[i].slot, i};
    Sort(&ordered);
    trajectory_.resize(count_);
    for (int64_t i = 0; i < count_; ++i) {
      if (i == 0 || ordered[i].key != ordered[i - 1].key) {
        peers_.push_back(ordered[i].key / wide);
        slots_.push_back(ordered[i].key % wide);
      }
      trajectory_[ordered[i].value] = static_cast<int64_t>(slots_.size()) - 1;
    }
  }

  // Adds what one window reads of each sample that has it, and widens the samples' own rows by it.
  void AddWindow(const RowWindow& window, const bool* members) {
    for (int64_t i = 0; i < count_; ++i) {
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
    int64_t reach = -1;
    for (const Keyed& item : *ordered) {
      const int64_t rows = block == nullptr ? item.value : high_[item.value] - low_[item.value];
      if (item.key > reach || merged.empty()) {
        const int64_t trajectory = item.key / apart_, first = item.key % apart_;
        merged.push_back({trajectory, first, first});
      }
      reach = Max(reach, item.key + rows);
      merged.back().end = reach - merged.back().trajectory * apart_;
      if (block != nullptr) (*block)[item.value] = static_cast<int64_t>(merged.size()) - 1;
    }
    return merged;
  }

  // Writes the pieces of every column, by peer; row_of(column, span, index) says where each lies.
  template <typename RowOf>
  void Emit(RowPlan* plan, const RowOf& row_of) {
    std::vector<int64_t> filled(plan->heads, plan->heads + plan->num_peers);
    int64_t count = 0;
    for (int64_t c = 0; c < layout_.num_columns; ++c) {
      const RowColumn& column = layout_.columns[c];
      int64_t* ends = plan->ends + c * plan->num_peers;
      std::fill(ends, ends + plan->num_peers, 0);
      const std::vector<Span> wanted = column.group < 0 ? Single(column) : std::vector<Span>{};
      const std::vector<Span>& spans = column.group < 0 ? wanted : spans_[column.group];
      for (size_t i = 0; i < spans.size(); ++i) {
        const int64_t peer = peers_[spans[i].trajectory];
        const int64_t bytes = (spans[i].end - spans[i].first) * column.row_bytes;
        const int64_t row = row_of(column, spans[i], static_cast<int64_t>(i));
        plan->pieces[count++] = {row * column.row_bytes, filled[peer], bytes};
        filled[peer] += bytes;
        ++ends[peer];
      }
      int64_t before = c == 0 ? 0 : ends[-1];
      for (int64_t p = 0; p < plan->num_peers; ++p) before = ends[p] += before;
    }
    for (int64_t p = 0; p < plan->num_peers; ++p) plan->sizes[p] = filled[p] - plan->heads[p];
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
