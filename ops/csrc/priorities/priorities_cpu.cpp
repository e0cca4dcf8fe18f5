// Masses and importance weights of priorities, the least mass, the highest priorities, and updates.
#include <algorithm>
#include <vector>

#include "common/convert.h"
#include "common/power.h"
#include "common/prefetch.h"
#include "priorities/priorities.h"

namespace gear::cpu {
namespace {

// Repairs the nodes from `level` on, above one child that has changed; they were right before.
// Reads a node's children only where its least one has grown.
void MendMinima(const uint64_t* sums, uint64_t* minima, const TreeShape& shape, int level,
                int64_t child, uint64_t before, uint64_t after) {
  for (; level < shape.levels && before != after; ++level) {
    child >>= kFanOutBits;
    uint64_t& node = minima[MinimaOffset(shape, level) + child];
    const uint64_t old = node;
    if (IsLess(after, old))
      node = after;
    else if (before == old)
      node = LeastNonZero(MinimaLevel<const uint64_t*>(sums, minima, shape, level - 1) +
                          child * kFanOut);
    before = old;
    after = node;
  }
}

uint32_t OrderOf(const PriorityUpdate& update) {
  return gear::OrderOf(static_cast<uint32_t>(update.priority));
}

uint32_t OrderOf(float priority) { return gear::OrderOf(BitCast<uint32_t>(priority)); }

void PrefetchItem(const Priorities& priorities, const TreeShape& shape, int64_t item) {
  __builtin_prefetch(priorities.values + item, 1);
  __builtin_prefetch(priorities.sums + item, 1);
  if (shape.levels == 1) return;
  __builtin_prefetch(priorities.sums + shape.offset[1] + (item >> kFanOutBits), 1);
  if (priorities.minima != nullptr)
    __builtin_prefetch(priorities.minima + (item >> kFanOutBits), 1);
}

void SetItem(const Priorities& priorities, const TreeShape& shape, int64_t item, uint64_t mass,
             uint32_t priority, int64_t* counts) {
  const uint64_t before = priorities.sums[item];
  priorities.values[item] = BitCast<float>(priority);
  SetMass(priorities.sums, shape, item, mass);
  if (priorities.minima != nullptr)
    MendMinima(priorities.sums, priorities.minima, shape, 1, item, before, mass);
  counts[kDrawable] += int64_t{mass > 0} - int64_t{before > 0};
}

// The masses of up to kBlock priorities. All logarithms are computed before the first power: see
// DescendTogether.
void MassesTogether(const uint32_t* priorities, int64_t count, MassScale scale, Mass* masses) {
  if (scale.alpha == kOneQ62) {
    for (int64_t i = 0; i < count; ++i) masses[i] = MassOfPriority(priorities[i], scale);
    return;
  }
  int64_t logs[kBlock];
  for (int64_t i = 0; i < count; ++i)  // of a priority of 0 that of another one
    logs[i] = LogOfPriority(Max(priorities[i], uint32_t{1}), scale.alpha);
  for (int64_t i = 0; i < count; ++i)
    masses[i] = priorities[i] == 0 ? Mass{0, false} : MassOfPower(Exp2(logs[i]), scale.most_bits);
}

// The k highest of a sequence in the order of the leaves.
class Highest {
 public:
  // `bar`: only priorities above it are offered.
  Highest(int64_t k, int64_t bar)
      : k_(static_cast<size_t>(k)), room_(k_ + std::max(k_, kSlack)), bar_(bar) {
    found_.reserve(room_);
  }

  // A leaf not above the bar cannot be among the k highest: k found leaves have at least as much,
  // and of equal ones the earlier win.
  int64_t bar() const { return bar_; }

  void Add(uint32_t priority, int64_t leaf) {
    found_.push_back({priority, leaf});
    if (found_.size() == room_) bar_ = DropRest();
  }

  // A bar for the sequence that contains this one: k leaves of it lie above.
  int64_t BarOfWhole() { return found_.size() < k_ ? -1 : DropRest() - 1; }

  // Writes the first `size` places.
  void Write(int64_t* items, int64_t size) {
    std::sort(found_.begin(), found_.end(), Precedes);
    const size_t num_found = std::min(found_.size(), k_);
    for (size_t i = 0; i < num_found; ++i) items[i] = found_[i].leaf;
    std::fill(items + num_found, items + size, -1);
  }

 private:
  struct Candidate {
    uint32_t priority;
    int64_t leaf;
  };

  // Keeps the k highest; returns the priority of the last of them.
  int64_t DropRest() {
    const auto last = found_.begin() + static_cast<std::ptrdiff_t>(k_) - 1;
    std::nth_element(found_.begin(), last, found_.end(), Precedes);
    found_.resize(k_);
    return found_.back().priority;
  }

  static bool Precedes(const Candidate& a, const Candidate& b) {
    return a.priority != b.priority ? a.priority > b.priority : a.leaf < b.leaf;
  }
  static constexpr size_t kSlack = 256;  // so that a small k does not cause too many selections

  size_t k_, room_;
  int64_t bar_;
  std::vector<Candidate> found_;
};

// Offers every `step`-th block of leaves that have a mass.
void Offer(const float* priorities, const uint64_t* sums, int64_t num_items, int64_t step,
           Highest* highest) {
  for (int64_t begin = 0; begin < num_items; begin += step * kBlock) {
    const int64_t end = Min(begin + kBlock, num_items);
    // Most blocks hold nothing above the bar; one maximum, in vector registers, shows it.
    int32_t most = 0;
    for (int64_t i = begin; i < end; ++i)
      most = Max(most, static_cast<int32_t>(OrderOf(priorities[i])));
    if (most <= highest->bar()) continue;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t priority = OrderOf(priorities[i]);
      if (int64_t{priority} > highest->bar() && sums[i] > 0) highest->Add(priority, i);
    }
  }
}

}  // namespace

void MassOf(const float* priorities, int64_t count, MassScale scale, int64_t* masses) {
  // New items often have equal priorities; a power takes as long as many comparisons.
  uint32_t known = 0;
  int64_t mass = static_cast<int64_t>(MassOfPriority(known, scale).value);
  for (int64_t i = 0; i < count; ++i) {
    const auto bits = BitCast<uint32_t>(priorities[i]);
    if (bits != known) {
      known = bits;
      mass = static_cast<int64_t>(MassOfPriority(bits, scale).value);
    }
    masses[i] = mass;
  }
}

void Importance(const Resolution* resolutions, int64_t size, uint64_t numerator, uint64_t count,
                uint64_t beta, float* weights) {
  const int64_t log_ratio = Log2(numerator) - Log2(count);
  int64_t logs[kBlock];
  for (int64_t begin = 0; begin < size; begin += kBlock) {
    const int64_t n = Min(kBlock, size - begin);
    for (int64_t i = 0; i < n; ++i)  // all before the first power, as in MassesTogether
      logs[i] = log_ratio - Log2(static_cast<uint64_t>(resolutions[begin + i].mass));
    for (int64_t i = 0; i < n; ++i)
      weights[begin + i] = BitCast<float>(ImportanceOfLog(logs[i], beta));
  }
}

void MinimaBuild(const uint64_t* sums, int64_t num_items, uint64_t* minima) {
  const TreeShape shape = ShapeOfTree(num_items);
  for (int level = 1; level < shape.levels; ++level) {
    const uint64_t* below = MinimaLevel<const uint64_t*>(sums, minima, shape, level - 1);
    uint64_t* nodes = minima + MinimaOffset(shape, level);
    const int64_t used = shape.width[level - 1] / kFanOut;
    for (int64_t node = 0; node < used; ++node) nodes[node] = LeastNonZero(below + node * kFanOut);
    std::fill(nodes + used, nodes + shape.width[level], 0);
  }
}

// Item by item. Between two items every node above level 1 is the least of its children as they are
// stored, because a change of a node repairs all above it at once. So an item may stop where a node
// does not change, although nodes of level 1 are still stale above later items: those items compare
// with the stored values, and climb from there.
void MinimaUpdate(const uint64_t* sums, int64_t num_items, const int64_t* items, int64_t count,
                  uint64_t* minima) {
  const TreeShape shape = ShapeOfTree(num_items);
  if (shape.levels == 1) return;
  constexpr int64_t kAhead = 8;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) PrefetchNode(sums + (items[i + kAhead] >> kFanOutBits) * kFanOut);
    const int64_t node = items[i] >> kFanOutBits;
    const uint64_t before = minima[node];
    minima[node] = LeastNonZero(sums + node * kFanOut);
    MendMinima(sums, minima, shape, 2, node, before, minima[node]);
  }
}

void TopK(const float* priorities, const uint64_t* sums, int64_t num_items, int64_t k,
          int64_t* items) {
  if (k == 0) return;
  const int64_t most = Clamp<int64_t>(num_items, 1, k);
  // A part of the blocks sets the bar so high that few leaves pass it afterwards, also where
  // priorities rise from leaf to leaf: new ones often start at the highest so far.
  constexpr int64_t kPart = 16;
  Highest part(most, -1);
  Offer(priorities, sums, num_items, kPart, &part);
  Highest highest(most, part.BarOfWhole());
  Offer(priorities, sums, num_items, 1, &highest);
  highest.Write(items, k);
}

void AppendReports(Report* log, int64_t size, const Resolution* resolutions,
                   const float* priorities, int64_t count, int64_t tail, int64_t batch) {
  int64_t at = tail % size;
  for (int64_t i = 0; i < count; ++i) {
    const Resolution& r = resolutions[i];
    const PriorityUpdate update{r.slot, r.generation, r.anchor, BitCast<uint32_t>(priorities[i])};
    log[at] = {update, batch, r.sample_number};
    if (++at == size) at = 0;
  }
}

const Report* InOrder(const Report* reports, int64_t count, std::vector<Report>* sorted) {
  if (std::is_sorted(reports, reports + count, Precedes)) return reports;
  sorted->assign(reports, reports + count);
  std::stable_sort(sorted->begin(), sorted->end(), Precedes);
  return sorted->data();
}

int64_t ItemsOf(const Slot* slots, int64_t num_slots, const AnchorRule& rule, int64_t unit,
                const Updates& updates, int64_t count, int64_t num_items, int64_t* items) {
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) Prefetch(slots, updates[i + kAhead].slot);
    const PriorityUpdate& update = updates[i];
    items[i] = -1;
    if (!IsCurrent(slots, num_slots, rule, unit, update)) continue;
    items[i] = ItemOf(slots, unit, update);
    if (items[i] < 0 || items[i] >= num_items) return i;
  }
  return count;
}

void Prioritize(const Priorities& priorities, const Updates& updates, const int64_t* items,
                int64_t count, MassScale scale, int64_t* counts) {
  const TreeShape shape = ShapeOfTree(priorities.num_items);
  uint32_t given[kBlock];  // bits of the priorities
  Mass masses[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = Min(kBlock, count - begin);
    for (int64_t i = 0; i < n; ++i)
      if (items[begin + i] >= 0) PrefetchItem(priorities, shape, items[begin + i]);
    // Computing the masses takes as long as the loads.
    for (int64_t i = 0; i < n; ++i) given[i] = OrderOf(updates[begin + i]);
    MassesTogether(given, n, scale, masses);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t item = items[begin + i];
      const uint32_t priority = given[i];
      counts[kHighestPriority] = Max(counts[kHighestPriority], int64_t{priority});
      counts[item >= 0 ? kApplied : kStale] += 1;
      if (item < 0) continue;
      counts[kClamped] += masses[i].clamped;
      SetItem(priorities, shape, item, masses[i].value, priority, counts);
    }
  }
}

int64_t SlotPriorities(const Priorities& priorities, const PrioritizedSlots& known,
                       const Slot* slots, const int64_t* log, int64_t log_size, int64_t first,
                       int64_t last, const AnchorRule& rule, int64_t unit, uint32_t initial,
                       MassScale scale, int64_t* counts) {
  constexpr int64_t kEvicted = 3;  // kRetired of store/store.h
  const TreeShape shape = ShapeOfTree(priorities.num_items);
  const uint64_t initial_mass = MassOfPriority(initial, scale).value;
  const auto set = [&](int64_t item, bool has_mass) {
    SetItem(priorities, shape, item, has_mass ? initial_mass : 0, has_mass ? initial : 0, counts);
  };
  for (int64_t i = first; i < last; ++i) {
    const int64_t s = log[i % log_size];
    const Slot& slot = slots[s];
    const bool by_step = known.steps != nullptr;
    if (by_step && slot.state != kCommitted && slot.state != kEvicted) {
      known.bases[s] = 0;  // its rows may be another trajectory's; they were cleared when freed
      continue;
    }
    const int64_t base = slot.state == kCommitted ? MassOfSlot(rule, unit, slot.num_steps) : 0;
    const bool differs =
        known.generations[s] != slot.generation || (known.bases[s] > 0) != (base > 0);
    if (!by_step) {
      if (differs) set(s, base > 0);
    } else {
      if (slot.first_row < 0 || slot.num_rows < 0 ||
          slot.first_row > priorities.num_items - slot.num_rows)
        return i;
      const bool has_grown = !differs && base > 0 && known.steps[s] != slot.num_steps;
      for (int64_t t = 0; t < (differs || has_grown ? slot.num_rows : 0); ++t) {
        const bool is_anchor = base > 0 && IsAnchor(rule, slot.num_steps, t);
        if (differs) known.row_slots[slot.first_row + t] = static_cast<int32_t>(s);
        if (differs || is_anchor != IsAnchor(rule, known.steps[s], t))
          set(slot.first_row + t, is_anchor);
      }
      known.steps[s] = slot.num_steps;
    }
    known.bases[s] = base;
    known.generations[s] = slot.generation;
  }
  return last;
}

}  // namespace gear::cpu
