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
import heapq
from dataclasses import dataclass

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
    """Plan packs: whole trajectories, as many packs on every rank, none over the budget.

    A trajectory of l tokens costs linear * l + quadratic * l * l. The number of packs of a rank is the least
    that is found; what the costliest rank of each micro step costs, summed, is kept close to the mean over
    the ranks. No pack is empty if there are as many trajectories as packs.

    Args:
        micro: Gets the micro step of each trajectory, the costliest first. [n], int64.
        rank: Gets the rank of each trajectory. [n], int64.
        num_micro: Gets the number of packs of each rank. [1], int64.
        lengths: In [1, tokens]. [n], int64.
        tokens: Of a pack at most.
        linear: Cost of a token.
        quadratic: Cost of each pair of tokens of a trajectory.
        width: Ranks.
        trajectories: Of a pack at most.
    Raises:
        ShapeError: A length or an argument lies outside its range, or all costs together are 2^62 or more;
            nothing is written.
    Cost: O(n log n) for the packs and O(packs) to balance them; if not even the fewest packs that the tokens
        need suffice, as much again for each number of them that is tried.
    """
    _check(lengths, tokens, linear, quadratic, width, trajectories)
    values = lengths.tolist()
    if not values:
        num_micro[0] = 0
        return
    items = _Items.of(values, linear, quadratic)
    packs = _Filling(items, tokens, width, trajectories).run()
    _Balancing(items, width, packs).run()
    order = packs.by_cost()
    ranks = [(0, r) for r in range(width)]  # cost so far, rank
    place = [(0, 0)] * len(order)
    for k in range(packs.num_micro):
        ranks.sort()
        for r, pack in enumerate(order[k * width : (k + 1) * width]):
            cost, chosen = ranks[r]
            place[pack] = k, chosen
            ranks[r] = cost + packs.cost[pack], chosen
    places = torch.tensor([place[pack] for pack in packs.pack], dtype=torch.int64)
    index = torch.tensor(items.index, dtype=torch.int64)
    micro[index], rank[index] = places[:, 0], places[:, 1]
    num_micro[0] = packs.num_micro


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


@dataclass(frozen=True)
class _Items:
    """The trajectories, by falling length."""

    index: list[int]
    length: list[int]
    cost: list[int]

    @classmethod
    def of(cls, lengths: list[int], linear: int, quadratic: int) -> _Items:
        index = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        length = [lengths[i] for i in index]
        return cls(index, length, [linear * n + quadratic * n * n for n in length])

    def __len__(self) -> int:
        return len(self.index)


@dataclass
class _Packs:
    """What lies in which of num_micro * width packs."""

    num_micro: int
    tokens: int
    pack: list[int]  # of each trajectory, by falling length
    cost: list[int]  # of each pack
    room: list[int]  # of each pack, in tokens
    places: list[int]  # of each pack, in trajectories
    num_empty: int

    def put(self, i: int, pack: int, items: _Items) -> None:
        self.num_empty -= self.room[pack] == self.tokens
        self.pack[i] = pack
        self.cost[pack] += items.cost[i]
        self.room[pack] -= items.length[i]
        self.places[pack] -= 1

    def by_cost(self) -> list[int]:
        """Return the packs by falling cost: `width` neighbours are a micro step."""
        return sorted(range(len(self.cost)), key=lambda pack: (-self.cost[pack], pack))


class _Filling:
    """Fills as few packs as possible."""

    def __init__(self, items: _Items, tokens: int, width: int, trajectories: int) -> None:
        self._items, self._tokens, self._width, self._trajectories = items, tokens, width, trajectories

    def run(self) -> _Packs:
        num_micro = -(-self._count_at_least() // self._width)
        packs = self._fill(num_micro, by_cost=True)
        num_best_fit = 0 if packs else self._count_best_fit()
        while packs is None:
            num_micro += 1
            packs = self._fill(num_micro, by_cost=num_micro * self._width >= num_best_fit)
        return packs

    def _fill(self, num_micro: int, by_cost: bool) -> _Packs | None:
        """Fill the packs; `by_cost`: also by the ways that look at costs, and take longer."""
        spread, most = self._spread(num_micro) if by_cost else (self._empty(num_micro), 0)
        if most == len(self._items):
            return spread
        packs = self._fill_roomiest(num_micro) or self._fill_in_rounds(num_micro, evenly=False)
        packs = packs or self._fill_in_rounds(num_micro, evenly=True)
        return packs or (self._fill_by_best_fit(num_micro, spread.pack, most) if by_cost else None)

    def _empty(self, num_micro: int) -> _Packs:
        size, count = num_micro * self._width, len(self._items)
        room, places = [self._tokens] * size, [self._trajectories] * size
        return _Packs(num_micro, self._tokens, [0] * count, [0] * size, room, places, size)

    def _count_at_least(self) -> int:
        """No plan has fewer packs: of trajectories longer than a k-th of it, a pack holds less than k."""
        lengths = self._items.length
        bounds = [-(-sum(lengths) // self._tokens), -(-len(lengths) // self._trajectories)]
        for k in range(2, _SHARES + 1):
            bounds.append(-(-sum(length > self._tokens // k for length in lengths) // (k - 1)))
        return max(bounds)

    def _fill_roomiest(self, num_micro: int) -> _Packs | None:
        """Put each trajectory into the pack with the most room; None if there is none."""
        items, packs = self._items, self._empty(num_micro)
        rooms = [(-room, pack) for pack, room in enumerate(packs.room)]
        for i, length in enumerate(items.length):
            if not rooms or -rooms[0][0] < length:
                return None
            _, pack = heapq.heappop(rooms)
            packs.put(i, pack, items)
            if packs.places[pack]:
                heapq.heappush(rooms, (-packs.room[pack], pack))
        return packs

    def _fill_in_rounds(self, num_micro: int, evenly: bool) -> _Packs | None:
        """Give every pack one trajectory a round, the longest to the one with the most room.

        Args:
            num_micro: Micro steps.
            evenly: At first the longest to those packs that get one less than the others.
        """
        packs, count = self._empty(num_micro), len(self._items)
        size = len(packs.room)
        most = -(-count // size)
        fewer = most * size - count if evenly else 0
        longest = fewer * (most - 1)
        parts = (range(longest), range(fewer)), (range(longest, count), range(fewer, size))
        is_filled = all(self._put_in_rounds(packs, items, into) for items, into in parts)
        return packs if is_filled else None

    def _put_in_rounds(self, packs: _Packs, items: range, into: range) -> bool:
        for first in items[:: max(1, len(into))]:
            order = sorted(into, key=lambda pack: (-packs.room[pack], pack))
            for i, pack in zip(range(first, items.stop), order, strict=False):
                if packs.room[pack] < self._items.length[i]:
                    return False
                packs.put(i, pack, self._items)
        return True

    def _fill_by_best_fit(self, num_micro: int, spread: list[int], most: int) -> _Packs | None:
        """Leave as many of the longest as they were spread, and put the others where they fit best."""
        least, packs = 0, None
        for _ in range(_HALVINGS):
            if least >= most:
                break
            first = (least + most) // 2
            packed = self._best_fit(num_micro, spread, first)
            if packed:
                packs, least = packed, first
            else:
                most = first
        return packs or self._best_fit(num_micro, spread, 0)

    def _targets(self, num_micro: int) -> list[int]:
        """Return what a pack of each micro step should cost: the same, but no less than its longest item."""
        targets: list[int] = []
        rest, is_level = sum(self._items.cost), False
        for k in range(num_micro):
            level = rest // ((num_micro - k) * self._width)
            longest = self._items.cost[k * self._width] if k * self._width < len(self._items) else 0
            is_level = is_level or longest <= level
            targets.append(level if is_level else longest)
            rest = max(0, rest - targets[k] * self._width)
        return targets

    def _spread(self, num_micro: int) -> tuple[_Packs, int]:
        """Put each trajectory into the pack furthest below its target, of those with room for it.

        Returns:
            The packs, and the number of trajectories up to the first one that has no room.
        """
        items, width, targets = self._items, self._width, self._targets(num_micro)
        packs = self._empty(num_micro)
        open_ = [(-targets[p // width], p) for p in range(num_micro * width)]
        heapq.heapify(open_)
        full: list[tuple[int, int]] = []  # by falling room: packs without room for the last trajectory
        for i, length in enumerate(items.length):
            while full and -full[0][0] >= length:
                pack = heapq.heappop(full)[1]
                heapq.heappush(open_, (packs.cost[pack] - targets[pack // width], pack))
            while open_ and (not packs.places[open_[0][1]] or packs.room[open_[0][1]] < length):
                pack = heapq.heappop(open_)[1]
                if packs.places[pack]:
                    heapq.heappush(full, (-packs.room[pack], pack))
            if not open_:
                return packs, i
            pack = open_[0][1]
            if packs.num_empty >= len(items) - i and packs.room[pack] < self._tokens:
                return packs, i  # each of the others has to go into an empty pack
            packs.put(i, pack, items)
            heapq.heapreplace(open_, (packs.cost[pack] - targets[pack // width], pack))
        return packs, len(items)

    def _best_fit(self, num_micro: int, spread: list[int], first: int) -> _Packs | None:
        """Put each trajectory from `first` on into the fullest pack with room; None if there is none."""
        items = self._items
        packs = self._empty(num_micro)
        for i in range(first):
            packs.put(i, spread[i], items)
        rooms = sorted((room, pack) for pack, room in enumerate(packs.room) if packs.places[pack])
        for i in range(first, len(items)):
            needs_empty = packs.num_empty >= len(items) - i
            found = bisect.bisect_left(rooms, (self._tokens if needs_empty else items.length[i], -1))
            if found == len(rooms):
                return None
            _, pack = rooms.pop(found)
            packs.put(i, pack, items)
            if packs.places[pack]:
                bisect.insort(rooms, (packs.room[pack], pack))
        return packs

    def _count_best_fit(self) -> int:
        """Return the packs that best fit needs if any number may be opened."""
        rooms: list[tuple[int, int]] = []  # room and places of each pack with a place
        count = 0
        for length in self._items.length:
            fits = bisect.bisect_left(rooms, (length, 0))
            count += fits == len(rooms)
            room, places = rooms.pop(fits) if fits < len(rooms) else (self._tokens, self._trajectories)
            if places > 1:
                bisect.insort(rooms, (room - length, places - 1))
        return count


class _Balancing:
    """Exchanges trajectories, so that the packs of a micro step cost the same."""

    def __init__(self, items: _Items, width: int, packs: _Packs) -> None:
        self._items, self._width, self._packs = items, width, packs
        count = len(packs.cost)
        self._members: list[list[int]] = [[] for _ in range(count)]
        for i, pack in enumerate(packs.pack):
            self._members[pack].append(i)
        self._excess, self._tolerance = [0] * count, [0] * count  # excess: cost above the micro step's target
        self._lowest: list[int] = []  # packs by excess, as the pass began
        self._next_lowest = 0

    def run(self) -> None:
        for _ in range(_PASSES):
            self._set_targets()
            changed = [self._lower(pack) for pack in range(len(self._members))]
            if not any(changed):
                return

    def _set_targets(self) -> None:
        order, width = self._packs.by_cost(), self._width
        for k in range(self._packs.num_micro):
            packs = order[k * width : (k + 1) * width]
            target = sum(self._packs.cost[pack] for pack in packs) // width
            for pack in packs:
                self._excess[pack] = self._packs.cost[pack] - target
                self._tolerance[pack] = target >> _TOLERANCE_BITS
        self._lowest = sorted(range(len(order)), key=lambda pack: (self._excess[pack], pack))
        self._next_lowest = 0

    def _lower(self, pack: int) -> bool:
        """Lower the cost of a pack to its target; return whether anything was changed."""
        for changes in range(_MOST_CHANGES):
            is_low = self._excess[pack] <= self._tolerance[pack]
            if is_low or not (self._give_to_lowest(pack) or self._give_to_similar(pack)):
                return changes > 0
        return True

    def _give_to_lowest(self, pack: int) -> bool:
        """Move a trajectory to the pack furthest below its target, or exchange two."""
        lowest, excess = self._lowest, self._excess
        while self._next_lowest < len(lowest) and excess[lowest[self._next_lowest]] >= 0:
            self._next_lowest += 1
        if self._next_lowest == len(lowest):
            return False
        other = lowest[self._next_lowest]
        mine, theirs = self._members[pack], self._members[other]
        can_move = len(mine) > 1 and self._packs.places[other] > 0
        takes = [*([_NONE] if can_move else []), *theirs[:_MEMBERS]]
        best, chosen = excess[pack], None
        for give in mine[:_MEMBERS]:
            for take in takes:
                cost, length = self._difference(give, take)
                most = max(excess[pack] - cost, excess[other] + cost)
                if most < best and self._packs.room[other] >= length:
                    best, chosen = most, (give, take)
        if chosen is None:
            self._next_lowest += 1
            return False
        self._apply(pack, other, *chosen)
        return True

    def _give_to_similar(self, pack: int) -> bool:
        """Exchange a trajectory for a slightly shorter one of any other pack."""
        excess, best, chosen = self._excess, self._excess[pack], None
        for give in self._members[pack][:_MEMBERS]:
            for take in range(give + 1, min(len(self._items), give + 1 + _WINDOW)):
                cost, length = self._difference(give, take)
                if cost >= 2 * excess[pack]:
                    break
                other = self._packs.pack[take]
                most = max(excess[pack] - cost, excess[other] + cost)
                if most < best and other != pack and self._packs.room[other] >= length:
                    best, chosen = most, (give, take)
        if chosen is None:
            return False
        self._apply(pack, self._packs.pack[chosen[1]], *chosen)
        return True

    def _difference(self, give: int, take: int) -> tuple[int, int]:
        """Return by how much the cost and the tokens of a pack fall."""
        items = self._items
        if take == _NONE:
            return items.cost[give], items.length[give]
        return items.cost[give] - items.cost[take], items.length[give] - items.length[take]

    def _apply(self, pack: int, other: int, give: int, take: int) -> None:
        cost, length = self._difference(give, take)
        for p, sign in ((pack, -1), (other, 1)):
            self._packs.cost[p] += sign * cost
            self._packs.room[p] -= sign * length
            self._packs.places[p] -= sign * (take == _NONE)
            self._excess[p] += sign * cost
        mine, theirs = self._members[pack], self._members[other]
        self._packs.pack[give] = other
        if take == _NONE:
            mine.remove(give)
            theirs.append(give)
        else:
            self._packs.pack[take] = pack
            mine[mine.index(give)] = take
            theirs[theirs.index(take)] = give
