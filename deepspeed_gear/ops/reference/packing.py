"""Reference op of the packing plan: which trajectory goes into which micro batch of which rank.

1. `_Filling` puts the trajectories into as few packs as possible, by falling length. At first each goes into
   the pack that is furthest below its target cost, of those with room for it, which gives similar costs.
   Where the budget is so tight that this fails, it does so for the longest ones only, and each of the others
   goes into the fullest pack with room for it, which wastes the fewest tokens; how many are the longest ones
   is found by halving. Where that fails too, each goes into the pack with the most room, or every pack gets
   one a round, and the longest go to packs with one less: these suit lengths near a third of the budget.
2. `_Balancing` sorts the packs by cost, so that `width` neighbours are a micro step, and exchanges
   trajectories between packs above and below the mean of their micro steps.
3. In each micro step the costliest pack goes to the rank with the least cost so far.

Every choice is among integers, and ties go to the lower pack or the longer trajectory.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.constants import MOST_PACK_TOKENS, MOST_PACK_WIDTH, MOST_TOTAL_BITS

_HALVINGS = 5  # of the search for how many trajectories are spread by cost
_PASSES = 6  # of the balancing, over all packs
_MOST_CHANGES = 16  # of a pack in a pass
_MEMBERS = 32  # of a pack that are considered: its longest at first
_WINDOW = 32  # shorter trajectories that one is compared with
_TOLERANCE_BITS = 12  # a cost is balanced at 2^-12 above its target
_SHARES = 8  # of a pack in the bound by long trajectories
_COST_END = 1 << MOST_TOTAL_BITS  # of all trajectories
_NEVER = np.iinfo(np.int64).max  # above any cost and any length
_NONE = -1  # in place of a trajectory


def plan_packs_(
    micro: Tensor,
    rank: Tensor,
    num_micro: Tensor,
    lengths: Tensor,
    tokens: int,
    linear: int,
    quadratic: int,
    width: int,
    trajectories: int,
) -> None:
    """Plan packs: as many on every rank, none over the budget; see `PackBudget` and `plan_packs`.

    Args:
        micro, rank: Get the micro step, the costliest first, and the rank of each trajectory. [n], int64.
        num_micro: Gets the number of packs of each rank. [1], int64.
        lengths: In [1, tokens]. [n], int64.
        tokens, trajectories: Of a pack at most.
    Raises:
        ShapeError: A length or an argument lies outside its range, or all costs together are 2^62 or more;
            nothing is written.
    Cost: as C++, O(n log n) for the packs and O(packs) to balance them; if not even the fewest packs that the
        tokens need suffice, as much again for each number of them that is tried.
    """
    _check(lengths, tokens, linear, quadratic, width, trajectories)
    if not len(lengths):
        num_micro[0] = 0
        return
    filling = _Filling(lengths.numpy(), tokens, linear, quadratic, width, trajectories)
    packs = filling.run()
    _Balancing(filling, packs).run()
    micro_of, rank_of = np.empty_like(packs.cost), np.empty_like(packs.cost)
    spent = np.zeros(width, np.int64)  # of each rank so far
    for k, step in enumerate(packs.by_cost().reshape(-1, width)):
        ranks = np.argsort(spent, kind="stable")
        micro_of[step], rank_of[step] = k, ranks
        spent[ranks] += packs.cost[step]
    micro[filling.index] = torch.from_numpy(micro_of[packs.pack])
    rank[filling.index] = torch.from_numpy(rank_of[packs.pack])
    num_micro[0] = len(packs.cost) // width


def _check(lengths: Tensor, tokens: int, linear: int, quadratic: int, width: int, trajectories: int) -> None:
    ranges = {
        "tokens": (tokens, 1, MOST_PACK_TOKENS),
        "linear": (linear, 0, _COST_END - 1),
        "quadratic": (quadratic, 0, _COST_END - 1),
        "width": (width, 1, MOST_PACK_WIDTH),
        "trajectories": (trajectories, 1, MOST_PACK_TOKENS),
    }
    for name, (value, least, most) in ranges.items():
        if not least <= value <= most:
            raise ShapeError(name, f"must be in [{least}, {most}]", value)
    if linear + quadratic == 0:
        raise ShapeError("linear and quadratic", "must not both be 0", [linear, quadratic])
    if len(lengths) and not 1 <= int(lengths.min()) <= int(lengths.max()) <= tokens:
        i = int(torch.nonzero((lengths < 1) | (lengths > tokens))[0])
        raise ShapeError(f"length {i}", f"must be in [1, {tokens}]", int(lengths[i]))
    if sum(linear * length + quadratic * length * length for length in lengths.tolist()) >= _COST_END:
        raise ShapeError("the cost of all trajectories", "must be below 2^62", [linear, quadratic])


class _Packs:
    """Packs: `cost`, free tokens (`room`) and `places` of each; `pack` of trajectories, by falling length."""

    def __init__(self, filling: _Filling, count: int) -> None:
        self.pack = np.zeros(len(filling.index), np.int64)
        self.cost = np.zeros(count, np.int64)
        self.room = np.full(count, filling.tokens)
        self.places = np.full(count, filling.trajectories)

    def by_cost(self) -> np.ndarray:
        """Return the packs by falling cost: `width` neighbours are a micro step."""
        return np.argsort(-self.cost, kind="stable")


class _Filling:
    """Fills as few packs as possible; `length` and `cost` are by falling length, and 0 in place of none."""

    def __init__(
        self, lengths: np.ndarray, tokens: int, linear: int, quadratic: int, width: int, trajectories: int
    ) -> None:
        self.index = np.argsort(-lengths, kind="stable")
        self.length = np.append(lengths[self.index], 0)
        self.cost = linear * self.length + quadratic * self.length * self.length
        self.tokens, self.width, self.trajectories = tokens, width, trajectories

    def run(self) -> _Packs:
        # No plan has fewer packs: of trajectories longer than a k-th of it, a pack holds less than k.
        bounds = [-(-int(self.length.sum()) // self.tokens), -(-len(self.index) // self.trajectories)]
        for k in range(2, _SHARES + 1):
            bounds.append(-(-int((self.length > self.tokens // k).sum()) // (k - 1)))
        num_micro = -(-max(bounds) // self.width)
        packs = self._fill(num_micro, by_cost=True)
        num_best_fit = 0 if packs else self._count_best_fit()
        while packs is None:
            num_micro += 1
            packs = self._fill(num_micro, by_cost=num_micro * self.width >= num_best_fit)
        return packs

    def _count_best_fit(self) -> int:
        """Return the packs that best fit needs if any number may be opened."""
        rooms: list[tuple[int, int]] = []  # room and places of each pack with a place
        count = 0
        for length in self.length[:-1].tolist():
            fits = bisect.bisect_left(rooms, (length, 0))
            count += fits == len(rooms)
            room, places = rooms.pop(fits) if fits < len(rooms) else (self.tokens, self.trajectories)
            if places > 1:
                bisect.insort(rooms, (room - length, places - 1))
        return count

    def _fill(self, num_micro: int, by_cost: bool) -> _Packs | None:
        """Fill the packs; `by_cost`: also by the ways that look at costs, and take longer."""
        count, spread, most = num_micro * self.width, None, 0
        if by_cost:
            spread, targets = _Packs(self, count), self._targets(num_micro)
            most = self._put(spread, 0, lambda packs: packs.cost - targets, may_stop=True)
            if most == len(self.index):
                return spread
        roomiest = _Packs(self, count)
        if self._put(roomiest, 0, lambda packs: -packs.room) == len(self.index):
            return roomiest
        packs = self._fill_in_rounds(count, evenly=False) or self._fill_in_rounds(count, evenly=True)
        if packs is None and spread is not None:
            packs = self._fill_by_best_fit(spread, most)
        return packs

    def _put(
        self, packs: _Packs, first: int, score: Callable[[_Packs], np.ndarray], may_stop: bool = False
    ) -> int:
        """Put each trajectory from `first` on into the pack of least score, of those with room; return the
        first one left. As soon as only empty packs are left for the others, each goes into one; `may_stop`:
        or it ends there.
        """
        for i in range(first, len(self.index)):
            needs_empty = (packs.room == self.tokens).sum() >= len(self.index) - i
            least = self.tokens if needs_empty and not may_stop else self.length[i]
            fits = (packs.places > 0) & (packs.room >= least)
            pack = int(np.argmin(np.where(fits, score(packs), _NEVER)))
            if not fits[pack] or (needs_empty and packs.room[pack] < self.tokens):
                return i
            self._place(packs, i, pack)
        return len(self.index)

    def _place(self, packs: _Packs, i: int, pack: int) -> None:
        packs.pack[i] = pack
        packs.cost[pack] += self.cost[i]
        packs.room[pack] -= self.length[i]
        packs.places[pack] -= 1

    def _targets(self, num_micro: int) -> np.ndarray:
        """Return what each pack should cost: as all of its micro steps, but no less than its longest item."""
        targets: list[int] = []
        rest, is_level = int(self.cost.sum()), False
        for k in range(num_micro):
            level = rest // ((num_micro - k) * self.width)
            longest = int(self.cost[min(k * self.width, len(self.index))])
            is_level = is_level or longest <= level
            targets.append(level if is_level else longest)
            rest = max(0, rest - targets[k] * self.width)
        return np.repeat(targets, self.width)

    def _fill_in_rounds(self, count: int, evenly: bool) -> _Packs | None:
        """Give every pack one a round, the longest to the most room (`evenly`: first to those of fewer)."""
        packs, num_items = _Packs(self, count), len(self.index)
        most = -(-num_items // count)
        fewer = most * count - num_items if evenly else 0
        longest = fewer * (most - 1)
        for items, into in ((range(longest), range(fewer)), (range(longest, num_items), range(fewer, count))):
            for first in items[:: max(1, len(into))]:
                order = sorted(into, key=lambda pack: (-packs.room[pack], pack))
                for i, pack in zip(range(first, items.stop), order, strict=False):
                    if packs.room[pack] < self.length[i]:
                        return None
                    self._place(packs, i, pack)
        return packs

    def _fill_by_best_fit(self, spread: _Packs, most: int) -> _Packs | None:
        """Leave as many of the longest as they were spread, and put the others where they fit best."""

        def fill(first: int) -> _Packs | None:
            packs = _Packs(self, len(spread.cost))
            for i in range(first):
                self._place(packs, i, int(spread.pack[i]))
            return packs if self._put(packs, first, lambda packs: packs.room) == len(self.index) else None

        least, best = 0, None
        for _ in range(_HALVINGS):
            if least >= most:
                break
            first = (least + most) // 2
            packs = fill(first)
            best, least, most = (packs, first, most) if packs else (best, least, first)
        return best or fill(0)


class _Balancing:
    def __init__(self, items: _Filling, packs: _Packs) -> None:
        self._items, self._packs = items, packs
        self._members = [np.flatnonzero(packs.pack == pack).tolist() for pack in range(len(packs.cost))]
        self._excess = np.zeros_like(packs.cost)  # cost above the micro step's target
        self._tolerance = np.zeros_like(packs.cost)
        self._lowest: list[int] = []  # packs by excess as the pass began, without those that can take no more

    def run(self) -> None:
        for _ in range(_PASSES):
            steps = self._packs.by_cost().reshape(-1, self._items.width)
            costs = self._packs.cost[steps]
            targets = costs.sum(axis=1, keepdims=True) // self._items.width
            self._excess[steps], self._tolerance[steps] = costs - targets, targets >> _TOLERANCE_BITS
            self._lowest = np.argsort(self._excess, kind="stable").tolist()
            changed = [self._lower(pack) for pack in range(len(self._members))]
            if not any(changed):
                return

    def _lower(self, pack: int) -> bool:
        for changes in range(_MOST_CHANGES):
            is_low = self._excess[pack] <= self._tolerance[pack]
            if is_low or not (self._give_to_lowest(pack) or self._give_to_similar(pack)):
                return changes > 0
        return True

    def _give_to_lowest(self, pack: int) -> bool:
        """Move a trajectory to the pack furthest below its target, or exchange two."""
        while self._lowest and self._excess[self._lowest[0]] >= 0:
            self._lowest.pop(0)
        if not self._lowest:
            return False
        other = self._lowest[0]
        mine, theirs = self._members[pack], self._members[other]
        can_move = len(mine) > 1 and self._packs.places[other] > 0
        takes = [*([_NONE] if can_move else []), *theirs[:_MEMBERS]]
        is_changed = self._exchange(pack, mine[:_MEMBERS], np.array([takes], np.int64), other)
        if not is_changed:
            self._lowest.pop(0)
        return is_changed

    def _give_to_similar(self, pack: int) -> bool:
        """Exchange a trajectory for a slightly shorter one of any other pack."""
        gives = self._members[pack][:_MEMBERS]
        takes = np.array(gives)[:, None] + np.arange(1, _WINDOW + 1)
        takes = np.minimum(takes, len(self._items.index) - 1)
        return self._exchange(pack, gives, takes, self._packs.pack[takes], 2 * int(self._excess[pack]))

    def _exchange(
        self, pack: int, gives: list[int], takes: np.ndarray, others: np.ndarray | int, cost_end: int = _NEVER
    ) -> bool:
        """Make the exchange after which the costlier of two packs exceeds its target least, if it gains.

        `pack` gives one of `gives`, [g], for one of `takes`, [g or 1, t] (`_NONE`: nothing), of the packs
        `others`; its cost may fall by less than `cost_end`.
        """
        items, packs, excess = self._items, self._packs, self._excess
        give, take, other = np.broadcast_arrays(np.array(gives)[:, None], takes, others)
        cost, length = items.cost[give] - items.cost[take], items.length[give] - items.length[take]
        most = np.maximum(excess[pack] - cost, excess[other] + cost)
        most[(other == pack) | (packs.room[other] < length) | (cost >= cost_end)] = _NEVER
        if most.min(initial=_NEVER) >= excess[pack]:
            return False
        best = np.unravel_index(int(np.argmin(most)), most.shape)
        given, taken, to = int(give[best]), int(take[best]), int(other[best])
        for p, sign in ((pack, -1), (to, 1)):
            packs.cost[p] += sign * cost[best]
            packs.room[p] -= sign * length[best]
            packs.places[p] -= sign * (taken == _NONE)
            excess[p] += sign * cost[best]
        mine, theirs = self._members[pack], self._members[to]
        packs.pack[given] = to
        if taken == _NONE:
            mine.remove(given)
            theirs.append(given)
        else:
            packs.pack[taken] = pack
            mine[mine.index(given)] = taken
            theirs[theirs.index(taken)] = given
        return True
