"""Prefixes that trajectories of an item share in packs: of any depth, each in a pack once.

The members of a group share its prompt; the branches of an agent's rollout share what came before
they parted. Shared prefixes are trees: `CommonPrefixes` has what trajectories have in common, and
`Prefixes` is one choice of what they share.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np


def shareable_steps(mask: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return how many first steps each trajectory may share: those before its first loss place.

    The last step is never shared. With the mask [0, 0, 1, 1, 0, 0, 0], the starts [0, 4] and the
    lengths [4, 3], they are [2, 2].

    Args:
        mask: Loss mask of the trajectories, one after the other. [tokens], bool.
        starts: First place of each trajectory. [n], int64.
        lengths: Steps of each trajectory. [n], int64.
    Returns:
        [n], int64.
    """
    actions = np.append(mask.nonzero()[0], len(mask))
    first_action = actions[np.searchsorted(actions, starts)]
    return np.asarray(np.minimum(first_action - starts, lengths - 1))


class Prefixes(NamedTuple):
    """Prefixes that trajectories share with another one, their leader.

    A trajectory has places for the steps after its prefix only. Its leader has places of its own
    for the last step of the prefix, and may have a leader for the first ones. For three responses
    to a prompt of 5 tokens, steps is [0, 5, 5] and leader [0, 0, 0]; a fourth trajectory, which
    leaves the second one after 8 steps, has 8 and 1.
    """

    steps: np.ndarray  #: that a trajectory shares; 0 if it is its own leader. [n], int64
    leader: np.ndarray  #: [n], int64

    def of(self, which: np.ndarray) -> Prefixes:
        """Return the prefixes of some trajectories, in any order; their leaders are among them."""
        ascending = np.argsort(which)
        leader = np.searchsorted(which, self.leader[which], sorter=ascending)
        return Prefixes(self.steps[which], ascending[leader])

    def roots(self) -> np.ndarray:
        """Return the trajectory without a leader that each one's prefixes come from. [n], int64."""
        root = self.leader
        while True:
            above = root[root]
            if (above == root).all():
                return root
            root = above

    def order(self) -> np.ndarray:
        """Return the rank of each trajectory in the order that packs have. [n], int64.

        A trajectory is followed by all that share with it, those that share most first. So the
        places that see a step are neighbours, and end where the first trajectory follows that has
        left before the step.
        """
        count = len(self.steps)
        numbers = np.arange(count)
        followers: list[list[int]] = [[] for _ in numbers]
        leaders = self.leader.tolist()
        # Those that share least first, as the last one of a list is taken first.
        for i in np.lexsort((-numbers, self.steps)).tolist():
            if leaders[i] != i:
                followers[leaders[i]].append(i)
        rank = np.empty(count, np.int64)
        at = 0
        for root in np.flatnonzero(self.leader == numbers).tolist():
            waiting = [root]
            while waiting:
                i = waiting.pop()
                rank[i] = at
                at += 1
                waiting += followers[i]
        return rank


class CommonPrefixes(NamedTuple):
    """First steps that the trajectories of an item have in common, and may share.

    Trajectories stand in an order in which those with a common prefix are neighbours. So the common
    prefix of two of them is the least of those between neighbours from one to the other.
    """

    order: np.ndarray  #: trajectories, item by item. [n], int64
    #: Equal first steps of each, in this order, and the one before it; 0 for the first of an item.
    #: [n], int64.
    common: np.ndarray
    #: Most steps that a trajectory may share: those before its first loss place. [n], int64.
    bound: np.ndarray

    def of(self, which: np.ndarray) -> CommonPrefixes:
        """Return those of some trajectories, which are numbered in the order given."""
        number = np.full(len(self.order), -1)
        number[which] = np.arange(len(which))
        kept = np.flatnonzero(number[self.order] >= 0)
        if not len(kept):
            return CommonPrefixes(*(np.zeros(0, np.int64) for _ in self))
        # Of the common prefixes [0, 5, 3, 4], the first, second and last are left with [0, 5, 3].
        begins = np.append(0, kept[:-1] + 1)
        common = np.minimum.reduceat(self.common[: kept[-1] + 1], begins)
        return CommonPrefixes(number[self.order[kept]], common, self.bound[which])

    @property
    def longest_run(self) -> int:
        """Most trajectories in a row that can share with a neighbour."""
        begins = np.append(np.flatnonzero(self.common <= 1), len(self.common))
        return max((after - before for before, after in pairwise(begins.tolist())), default=0)

    def share(self, lengths: np.ndarray, size: int, most: int) -> Prefixes:
        """Divide the trajectories into bundles, and choose what those of a bundle share.

        A trajectory shares with one that has a lower bound, or an equal one and a lower number:
        with that one of its bundle with which it has most in common. Within a bundle no other
        choice has fewer places. No step is shared whose next token differs, so that a place
        predicts the same token for all that share it.

        Args:
            lengths: Steps of each trajectory. [n], int64.
            size: Trajectories of a bundle, at most.
            most: Places of a bundle, at most.
        Cost: at most 3 n calls of Python: a bundle that is cut keeps half of what was added to it.
        """
        steps = [0] * len(lengths)
        leader = [*range(len(lengths))]
        given = (lengths.tolist(), self.bound.tolist())
        order = self.order.tolist()
        common = self.common.tolist()
        begin = 0
        while begin < len(order):
            bundle = _Bundle(*given)
            end = begin
            while end < len(order) and end - begin < size and (end == begin or common[end] > 1):
                if not bundle.add(order[end], common[end], most):
                    break
                end += 1
            if end < len(order) and common[end] > 1:
                # It is full. It ends in its second half, where neighbours have least in common.
                middle = begin + (end - begin) // 2 + 1
                cut = min(range(end, middle - 1, -1), key=common.__getitem__)
                if cut < end:
                    bundle = _Bundle(*given)
                    for at in range(begin, cut):
                        bundle.add(order[at], common[at], most)
                    end = cut
            for number, shared in bundle.steps.items():
                steps[number] = shared
                leader[number] = bundle.leader[number]
            begin = end
        # A leader has the last shared step itself: else its own leader does.
        for i in np.lexsort((np.arange(len(lengths)), self.bound)).tolist():
            while steps[i] and steps[i] <= steps[leader[i]]:
                leader[i] = leader[leader[i]]
        return Prefixes(np.array(steps, np.int64), np.array(leader, np.int64))


class _Bundle:
    """Trajectories that are packed together, and what they share with each other."""

    def __init__(self, lengths: list[int], bound: list[int]) -> None:
        self._lengths = lengths
        self._bound = bound
        self._places = 0
        # Those that later ones may share with: their bounds rise. Each with what it has in common
        # with the one below it.
        self._stack: list[tuple[int, int]] = []
        #: Steps that each trajectory shares, and the trajectory that has them.
        self.steps: dict[int, int] = {}
        self.leader: dict[int, int] = {}

    def _precedes(self, one: int, other: int) -> bool:
        return (self._bound[one], one) < (self._bound[other], other)

    def add(self, number: int, common: int, most: int) -> bool:
        """Add the next trajectory in the order; return False if it would be over `most` places.

        Args:
            number: The trajectory.
            common: First steps that it has in common with the one added before it.
            most: Places of the bundle, at most.
        """
        # Those before it with higher bounds may share more with it than with others.
        moved: list[tuple[int, int]] = []
        depth = len(self._stack)
        while depth and self._precedes(number, self._stack[depth - 1][0]):
            depth -= 1
            other, below = self._stack[depth]
            shared = min(common - 1, self._bound[other])
            if shared > self.steps[other]:
                moved.append((other, shared))
            common = min(common, below)
        own = max(min(common - 1, self._bound[number]), 0) if depth else 0
        added = self._lengths[number] - own
        added -= sum(shared - self.steps[other] for other, shared in moved)
        if self.steps and self._places + added > most:
            return False
        self._places += added
        for other, shared in moved:
            self._share(other, shared, number)
        self._share(number, own, self._stack[depth - 1][0] if own else number)
        self._stack[depth:] = [(number, common)]
        return True

    def _share(self, number: int, steps: int, leader: int) -> None:
        self.steps[number] = steps
        self.leader[number] = leader
