// The packing plan: which trajectory goes into which micro batch of which rank.
//
// 1. Filling puts the trajectories into as few packs as possible, by falling length. At first each
//    goes into the pack that is furthest below its target cost, of those with room for it, which
//    gives similar costs. Where the budget is so tight that this fails, only the longest ones are
//    spread this way, and each of the others goes into the fullest pack with room for it, which
//    wastes the fewest tokens; a binary search finds how many are "the longest ones". Where that
//    fails too, each goes into the pack with the most room, or every pack gets one a round, and the
//    longest go to packs with one less: these suit lengths near a third of the budget.
// 2. Balancing sorts the packs by cost, so that `width` neighbours are a micro step, and swaps
//    trajectories between packs above and below the mean of their micro steps.
// 3. In each micro step the costliest pack goes to the rank with the least cost so far.
//
// Every choice is among integers, and ties go to the lower pack or the longer trajectory, so every
// rank computes the same plan. tests/property/test_packing_plan.py holds the invariants, and
// digests of plans that must never change.
#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <set>
#include <utility>
#include <vector>

#include "common/host_device.h"
#include "pack/plan.h"

namespace gear::cpu {
namespace {

constexpr int kHalvings = 5;        // of the search for how many trajectories are spread by cost
constexpr int kPasses = 6;          // of the balancing, over all packs
constexpr int kMostChanges = 16;    // of a pack in a pass
constexpr int64_t kMembers = 32;    // of a pack that are considered: its longest at first
constexpr int64_t kWindow = 32;     // shorter trajectories that one is compared with
constexpr int kToleranceBits = 12;  // a cost is balanced at 2^-12 above its target
constexpr int64_t kMostShares = 8;  // of a pack in the bound by long trajectories

using Keyed = std::pair<int64_t, int64_t>;  // key, pack
using Values = std::vector<int64_t>;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The trajectories, by falling length.
struct Sorted {
  Values index, length, cost;
  int64_t tokens = 0, total = 0;  // sums of lengths and costs

  Sorted(const int64_t* lengths, int64_t count, const PackBudget& budget) {
    std::vector<Keyed> keys(count);
    for (int64_t i = 0; i < count; ++i) keys[i] = {-lengths[i], i};
    std::sort(keys.begin(), keys.end());
    for (const auto& [key, i] : keys) {
      index.push_back(i);
      length.push_back(-key);
      cost.push_back((budget.linear - budget.quadratic * key) * -key);
      tokens += length.back();
      total += cost.back();
    }
  }

  int64_t Count() const { return static_cast<int64_t>(index.size()); }
};

// What lies in which of num_micro_steps * width packs. Packs [k * width, (k + 1) * width) get what
// the micro step k takes at first.
struct Packs {
  int64_t num_micro_steps = 0, empty = 0;
  Values pack;                // of each trajectory, by falling length
  Values cost, room, places;  // of each pack; room in tokens, places in trajectories

  int64_t Count() const { return static_cast<int64_t>(cost.size()); }

  Packs(int64_t num_steps, int64_t width, int64_t count, const PackBudget& budget)
      : num_micro_steps(num_steps),
        empty(num_steps * width),
        pack(count, 0),
        cost(num_steps * width, 0),
        room(num_steps * width, budget.tokens),
        places(num_steps * width, budget.trajectories) {}
};

class Filling {
 public:
  Filling(const Sorted& items, const PackBudget& budget, int64_t width)
      : items_(items), budget_(budget), tokens_(budget.tokens), width_(width) {}

  // Finds the number of micro steps, and fills their packs.
  Packs Run() {
    int64_t num_micro_steps = CeilDiv(CountAtLeast(), width_);
    if (Fill(num_micro_steps, true)) return std::move(best_);
    const int64_t num_best_fit = CountBestFit();
    do {
      ++num_micro_steps;
    } while (!Fill(num_micro_steps, num_micro_steps * width_ >= num_best_fit));
    return std::move(best_);
  }

 private:
  Packs Empty(int64_t num_micro_steps) const {
    return {num_micro_steps, width_, items_.Count(), budget_};
  }

  // `by_cost`: also by the ways that look at costs, and take longer.
  bool Fill(int64_t num_micro_steps, bool by_cost) {
    return (by_cost && FillBySpread(num_micro_steps)) || FillRoomiest(num_micro_steps) ||
           FillInRounds(num_micro_steps, false) || FillInRounds(num_micro_steps, true) ||
           (by_cost && FillByBestFit());
  }

  // No plan has fewer packs: of trajectories longer than a k-th of it, a pack holds less than k.
  int64_t CountAtLeast() const {
    int64_t least =
        Max(CeilDiv(items_.tokens, tokens_), CeilDiv(items_.Count(), budget_.trajectories));
    for (int64_t k = 2; k <= kMostShares; ++k) {
      const auto end = std::partition_point(items_.length.begin(), items_.length.end(),
                                            [&](int64_t length) { return length > tokens_ / k; });
      least = Max(least, CeilDiv(end - items_.length.begin(), k - 1));
    }
    return least;
  }

  // Puts each trajectory into the pack with the most room. False if one has none, else `best_` has
  // the packs.
  bool FillRoomiest(int64_t num_micro_steps) {
    Packs packs = Empty(num_micro_steps);
    const int64_t in_order = Min(packs.Count(), items_.Count());  // an empty pack has the most room
    for (int64_t i = 0; i < in_order; ++i) Put(&packs, i, i);
    std::vector<Keyed> keys;
    for (int64_t p = 0; p < in_order; ++p)
      if (packs.places[p] > 0) keys.emplace_back(-packs.room[p], p);
    std::priority_queue<Keyed, std::vector<Keyed>, std::greater<>> rooms({}, std::move(keys));
    for (int64_t i = in_order; i < items_.Count(); ++i) {
      if (rooms.empty() || -rooms.top().first < items_.length[i]) return false;
      const int64_t pack = rooms.top().second;
      rooms.pop();
      Put(&packs, i, pack);
      if (packs.places[pack] > 0) rooms.emplace(-packs.room[pack], pack);
    }
    best_ = std::move(packs);
    return true;
  }

  // Gives every pack one trajectory a round, the longest to the one with the most room; `evenly`:
  // at first the longest to those packs that get one less than the others. False if one has no
  // room, else `best_` has the packs.
  bool FillInRounds(int64_t num_micro_steps, bool evenly) {
    Packs packs = Empty(num_micro_steps);
    const int64_t most = CeilDiv(items_.Count(), packs.Count());
    const int64_t fewer = evenly ? most * packs.Count() - items_.Count() : 0;
    const int64_t longest = fewer * (most - 1);
    if (!PutInRounds(0, longest, 0, fewer, &packs) ||
        !PutInRounds(longest, items_.Count(), fewer, packs.Count(), &packs))
      return false;
    best_ = std::move(packs);
    return true;
  }

  // Trajectories [i, end) into packs [low, high).
  bool PutInRounds(int64_t i, int64_t end, int64_t low, int64_t high, Packs* packs) const {
    std::vector<Keyed> keys(high - low);
    while (i < end) {
      for (int64_t p = low; p < high; ++p) keys[p - low] = {-packs->room[p], p};
      std::sort(keys.begin(), keys.end());
      for (const auto& [room, pack] : keys) {
        if (i == end) break;
        if (-room < items_.length[i]) return false;
        Put(packs, i++, pack);
      }
    }
    return true;
  }

  // Puts each trajectory into the pack furthest below its target cost. False if one has no room.
  bool FillBySpread(int64_t num_micro_steps) {
    spread_ = Spread(num_micro_steps);
    if (spread_count_ < items_.Count()) return false;
    best_ = std::move(spread_);
    return true;
  }

  // Leaves as many of the longest as they were spread, and puts each of the others into the fullest
  // pack with room. False if one has none.
  bool FillByBestFit() {
    int64_t least = 0, most = spread_count_;
    bool is_filled = false;
    for (int i = 0; i < kHalvings && least < most; ++i) {
      const int64_t first = (least + most) / 2;
      if (BestFit(spread_, first)) {
        is_filled = true;
        least = first;
      } else {
        most = first;
      }
    }
    return is_filled || BestFit(spread_, 0);
  }

  void Put(Packs* packs, int64_t i, int64_t pack) const {
    packs->empty -= packs->room[pack] == tokens_;
    packs->pack[i] = pack;
    packs->cost[pack] += items_.cost[i];
    packs->room[pack] -= items_.length[i];
    --packs->places[pack];
  }

  // What a pack of each micro step should cost: the same, but no less than its longest trajectory.
  Values Targets(int64_t num_micro_steps) const {
    Values targets(num_micro_steps);
    int64_t rest = items_.total;
    bool is_level = false;
    for (int64_t k = 0; k < num_micro_steps; ++k) {
      const int64_t level = rest / ((num_micro_steps - k) * width_);
      const int64_t longest = k * width_ < items_.Count() ? items_.cost[k * width_] : 0;
      is_level = is_level || longest <= level;
      targets[k] = is_level ? level : longest;
      rest = targets[k] > rest / width_ ? 0 : rest - targets[k] * width_;
    }
    return targets;
  }

  // Puts each trajectory into the pack furthest below its target, of those with room for it.
  Packs Spread(int64_t num_micro_steps) {
    Packs packs = Empty(num_micro_steps);
    const Values targets = Targets(num_micro_steps);
    std::vector<Keyed> keys(packs.Count());
    for (int64_t p = 0; p < packs.Count(); ++p) keys[p] = {-targets[p / width_], p};
    std::priority_queue<Keyed, std::vector<Keyed>, std::greater<>> open({}, std::move(keys));
    // Packs without room, by room: a pack gets here only after it got a trajectory.
    std::priority_queue<Keyed> full;
    const auto reopen = [&](int64_t pack) {
      open.emplace(packs.cost[pack] - targets[pack / width_], pack);
    };
    int64_t i = 0;
    for (; i < items_.Count(); ++i) {
      const int64_t length = items_.length[i];
      while (!full.empty() && full.top().first >= length) {
        reopen(full.top().second);
        full.pop();
      }
      while (!open.empty()) {
        const int64_t pack = open.top().second;
        if (packs.places[pack] > 0 && packs.room[pack] >= length) break;
        if (packs.places[pack] > 0) full.emplace(packs.room[pack], pack);
        open.pop();
      }
      if (open.empty()) break;
      const int64_t pack = open.top().second;
      if (packs.empty >= items_.Count() - i && packs.room[pack] < tokens_) break;
      open.pop();
      Put(&packs, i, pack);
      reopen(pack);
    }
    spread_count_ = i;
    return packs;
  }

  // Puts each trajectory from `first` on into the fullest pack with room for it; those before stay
  // as they were spread. False if one has none, else `best_` has the packs.
  bool BestFit(const Packs& spread, int64_t first) {
    Packs packs = Empty(spread.num_micro_steps);
    for (int64_t i = 0; i < first; ++i) Put(&packs, i, spread.pack[i]);
    std::vector<Keyed> keys;
    for (int64_t p = 0; p < packs.Count(); ++p)
      if (packs.places[p] > 0) keys.emplace_back(packs.room[p], p);
    std::sort(keys.begin(), keys.end());
    std::set<Keyed> rooms(keys.begin(), keys.end());
    for (int64_t i = first; i < items_.Count(); ++i) {
      const bool needs_empty = packs.empty >= items_.Count() - i;
      const auto found = rooms.lower_bound({needs_empty ? tokens_ : items_.length[i], -1});
      if (found == rooms.end()) return false;
      auto node = rooms.extract(found);
      const int64_t pack = node.value().second;
      Put(&packs, i, pack);
      if (packs.places[pack] == 0) continue;
      node.value().first = packs.room[pack];
      rooms.insert(std::move(node));
    }
    best_ = std::move(packs);
    return true;
  }

  // The packs that best fit needs if any number may be opened.
  int64_t CountBestFit() const {
    std::multiset<Keyed> rooms;  // room and places of each pack with a place
    int64_t count = 0;
    for (const int64_t length : items_.length) {
      const auto fits = rooms.lower_bound({length, 0});
      auto [room, places] = fits == rooms.end() ? Keyed{tokens_, budget_.trajectories} : *fits;
      if (fits == rooms.end()) {
        ++count;
      } else {
        rooms.erase(fits);
      }
      if (places > 1) rooms.emplace(room - length, places - 1);
    }
    return count;
  }

  const Sorted& items_;
  const PackBudget& budget_;
  const int64_t tokens_, width_;
  int64_t spread_count_ = 0;
  Packs spread_{0, 0, 0, {}}, best_{0, 0, 0, {}};
};

// The indices of values as `precedes` orders these, those of equal ones in their own order.
template <typename Precedes>
Values OrderOf(const Values& values, const Precedes& precedes) {
  Values order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return values[a] != values[b] ? precedes(values[a], values[b]) : a < b;
  });
  return order;
}

// The packs by falling cost: `width` neighbours are a micro step.
Values ByCost(const Packs& packs) { return OrderOf(packs.cost, std::greater<>()); }

// Swaps trajectories, so that the packs of a micro step cost the same.
class Balancing {
 public:
  Balancing(const Sorted& items, int64_t width, Packs* packs)
      : items_(items),
        width_(width),
        packs_(*packs),
        members_(packs->Count()),
        excess_(packs->Count()),
        tolerance_(packs->Count()) {
    for (int64_t i = 0; i < items.Count(); ++i) members_[packs_.pack[i]].push_back(i);
  }

  void Run() {
    bool is_changed = true;
    for (int pass = 0; pass < kPasses && is_changed; ++pass) {
      SetTargets();
      is_changed = false;
      for (int64_t p = 0; p < packs_.Count(); ++p)
        for (int i = 0; i < kMostChanges && excess_[p] > tolerance_[p]; ++i) {
          if (!GiveToLowest(p) && !GiveToSimilar(p)) break;
          is_changed = true;
        }
    }
  }

 private:
  // Of trajectory `give` for `take`, which is -1 for none.
  struct Change {
    int64_t most, give = -1, take = -1;  // most: the larger excess of the two packs, afterwards
  };

  void SetTargets() {
    const Values order = ByCost(packs_);
    for (int64_t k = 0; k < packs_.num_micro_steps; ++k) {
      int64_t target = 0;
      for (int64_t r = 0; r < width_; ++r) target += packs_.cost[order[k * width_ + r]];
      target /= width_;
      for (int64_t r = 0; r < width_; ++r) {
        const int64_t pack = order[k * width_ + r];
        excess_[pack] = packs_.cost[pack] - target;
        tolerance_[pack] = target >> kToleranceBits;
      }
    }
    lowest_ = OrderOf(excess_, std::less<>());
    next_lowest_ = 0;
  }

  int64_t NumConsidered(int64_t pack) const {
    return Min(kMembers, static_cast<int64_t>(members_[pack].size()));
  }

  // Moves a trajectory to the pack furthest below its target, or swaps two.
  bool GiveToLowest(int64_t pack) {
    const int64_t count = packs_.Count();
    while (next_lowest_ < count && excess_[lowest_[next_lowest_]] >= 0) ++next_lowest_;
    if (next_lowest_ == count) return false;
    const int64_t other = lowest_[next_lowest_], excess = excess_[pack], below = excess_[other];
    Change best{excess};
    for (int64_t x = 0; x < NumConsidered(pack); ++x) {
      const int64_t give = members_[pack][x], cost = items_.cost[give];
      const int64_t room = packs_.room[other] - items_.length[give];
      if (members_[pack].size() > 1 && room >= 0 && packs_.places[other] > 0) {
        const int64_t most = Max(excess - cost, below + cost);
        if (most < best.most) best = {most, give, -1};
      }
      for (int64_t y = 0; y < NumConsidered(other); ++y) {
        const int64_t take = members_[other][y], change = cost - items_.cost[take];
        const int64_t most = Max(excess - change, below + change);
        if (most < best.most && room + items_.length[take] >= 0) best = {most, give, take};
      }
    }
    if (best.give < 0) {
      ++next_lowest_;
      return false;
    }
    Apply(pack, other, best);
    return true;
  }

  // Swaps a trajectory for a slightly shorter one of any other pack.
  bool GiveToSimilar(int64_t pack) {
    const int64_t excess = excess_[pack];
    Change best{excess};
    for (int64_t x = 0; x < NumConsidered(pack); ++x) {
      const int64_t give = members_[pack][x];
      const int64_t end = Min(items_.Count(), give + 1 + kWindow);
      for (int64_t take = give + 1; take < end; ++take) {
        const int64_t change = items_.cost[give] - items_.cost[take];
        if (change >= 2 * excess) break;
        const int64_t other = packs_.pack[take];
        const int64_t most = Max(excess - change, excess_[other] + change);
        if (most < best.most && other != pack &&
            packs_.room[other] >= items_.length[give] - items_.length[take])
          best = {most, give, take};
      }
    }
    if (best.give < 0) return false;
    Apply(pack, packs_.pack[best.take], best);
    return true;
  }

  void Apply(int64_t pack, int64_t other, const Change& change) {
    Place(change.give, pack, other);
    std::vector<int64_t>&mine = members_[pack], &theirs = members_[other];
    const auto given = std::find(mine.begin(), mine.end(), change.give);
    if (change.take < 0) {
      mine.erase(given);
      theirs.push_back(change.give);
      return;
    }
    Place(change.take, other, pack);
    *given = change.take;
    *std::find(theirs.begin(), theirs.end(), change.take) = change.give;
  }

  void Place(int64_t item, int64_t from, int64_t to) {
    const int64_t cost = items_.cost[item], length = items_.length[item];
    packs_.pack[item] = to;
    packs_.cost[from] -= cost;
    packs_.cost[to] += cost;
    excess_[from] -= cost;
    excess_[to] += cost;
    packs_.room[from] += length;
    packs_.room[to] -= length;
    ++packs_.places[from];
    --packs_.places[to];
  }

  const Sorted& items_;
  const int64_t width_;
  Packs& packs_;
  std::vector<Values> members_;
  Values excess_, tolerance_;  // of each pack: cost above the target of its micro step
  Values lowest_;              // packs by excess, as the pass began
  int64_t next_lowest_ = 0;
};

}  // namespace

int64_t PlanPacks(const int64_t* lengths, int64_t count, const PackBudget& budget, int64_t width,
                  int64_t* micro_step, int64_t* rank) {
  if (count == 0) return 0;
  const Sorted items(lengths, count, budget);
  Packs packs = Filling(items, budget, width).Run();
  Balancing(items, width, &packs).Run();
  // The costliest pack of a micro step goes to the rank with the least cost so far.
  const Values order = ByCost(packs);
  std::vector<Keyed> ranks(width);  // cost so far, rank
  for (int64_t r = 0; r < width; ++r) ranks[r] = {0, r};
  Values rank_of(packs.Count()), step_of(packs.Count());
  for (int64_t k = 0; k < packs.num_micro_steps; ++k) {
    std::sort(ranks.begin(), ranks.end());
    for (int64_t r = 0; r < width; ++r) {
      const int64_t pack = order[k * width + r];
      step_of[pack] = k;
      rank_of[pack] = ranks[r].second;
      ranks[r].first += packs.cost[pack];
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    micro_step[items.index[i]] = step_of[packs.pack[i]];
    rank[items.index[i]] = rank_of[packs.pack[i]];
  }
  return packs.num_micro_steps;
}

}  // namespace gear::cpu
