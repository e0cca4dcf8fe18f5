"""Mixtures: how many samples of a global batch come from each table. Pure: equal on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from deepspeed_gear.config.sampler_options import SHARES_TOLERANCE
from deepspeed_gear.errors import ConfigError

_ONE = 1 << 40  # a sample: parts of a batch are integers, so that their sums are exact
_NUM_KEPT = 4096  # latest global batches whose counts are kept


class Mixture:
    """Numbers of samples by table for each global batch. Thread-safe.

    A table that has had a share of S samples since global batch 0 has had floor(S) or ceil(S)
    samples: sample j falls due at the first batch that takes S to j, and may come once S is above j
    - 1. Each batch takes the samples that are due, then those that fall due first. With constant
    shares this never fails (jobs of unit length on one machine); where shares change, a table may
    be up to 2 samples off.

    Cost: some microseconds a global batch, once; after a resume also for those before it. Source:
    Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980.
    """

    def __init__(
        self, names: Sequence[str], shares: Sequence[Callable[[int], float]], batch: int
    ) -> None:
        self.names = names
        self.batch = batch  # samples of a global batch
        self._by_batch = shares  # of each table by global batch; they sum to 1
        self._mutex = threading.Lock()
        self._kept = dict[int, np.ndarray]()
        self._shares = list[float]()
        self._weights = list[int]()
        self._restart()

    def _restart(self) -> None:
        self._next = 0  # global batch that is counted next
        # Each table's parts so far less its samples, in 1 / _ONE.
        self._lacking = [0] * len(self.names)

    def counts(self, number: int) -> np.ndarray:
        """Return the samples of each table in a global batch; raises as `shares`.
        [tables], int64.
        """
        with self._mutex:
            if number not in self._kept:
                if number < self._next:
                    self._restart()
                for each in range(self._next, number + 1):
                    counts = self._count(each)
                    self._kept.pop(each - _NUM_KEPT, None)
                    self._kept[each] = np.array(counts)
                    self._next = each + 1
            return self._kept[number]

    def count(self, table: int, number: int) -> int:
        return int(self.counts(number)[table])

    def offset(self, table: int, number: int) -> int:
        """Return the number of samples of the tables before one in a global batch."""
        return int(self.counts(number)[:table].sum())

    def shares(self, number: int) -> list[float]:
        """Return each table's share at a global batch; raise a ConfigError unless they sum to 1."""
        shares = [share(number) for share in self._by_batch]
        if abs(sum(shares) - 1) > SHARES_TOLERANCE:
            given = dict(zip(self.names, shares, strict=True))
            raise ConfigError(
                f"gear.sampler.shares at global batch {number}",
                "must sum to 1",
                given,
                "correct the shares, or the functions of their schedules",
            )
        return shares

    def part(self, number: int, part: int, num_parts: int) -> list[np.ndarray]:
        """Return each table's samples of a part: every num_parts-th of all, table by table, so that
        parts have the same size and shares.
        """
        counts = self.counts(number)
        # Of 5 and 3 samples, part 0 of 2 has the indices [0, 2, 4, 6] of all 8: the first table's
        # [0, 2, 4], and the second one's [1], as it begins at 5.
        first = (part - (np.cumsum(counts) - counts)) % num_parts
        return [
            np.arange(f, n, num_parts) for f, n in zip(first.tolist(), counts.tolist(), strict=True)
        ]

    def _count(self, number: int) -> list[int]:
        """Return the samples of each table in the next global batch, and carry the remainders."""
        shares = self.shares(number)
        batch = self.batch
        if shares != self._shares:  # 0.8 of 5 samples are 4 exactly, in every batch
            weights = [round(share / sum(shares) * batch * _ONE) for share in shares]
            weights[weights.index(max(weights))] += batch * _ONE - sum(weights)
            self._shares = shares
            self._weights = weights
        weights = self._weights
        lacking = [rest + w for rest, w in zip(self._lacking, weights, strict=True)]
        counts = [max(rest // _ONE, 0) for rest in lacking]  # those that are due
        spare = batch - sum(counts)
        if spare:
            rests = [rest - count * _ONE for rest, count in zip(lacking, counts, strict=True)]
            if spare > 0:  # e.g. a table lacks 3.4 samples: 3 are due, a fourth may come
                order = [table for table, rest in enumerate(rests) if rest > 0]
                order.sort(key=lambda at: -((rests[at] - _ONE) // (weights[at] or 1)))  # until due
            else:
                order = [table for table, count in enumerate(counts) if count]
                order.sort(key=rests.__getitem__)
            for table in order[: abs(spare)]:
                counts[table] += 1 if spare > 0 else -1
        self._lacking = [rest - count * _ONE for rest, count in zip(lacking, counts, strict=True)]
        return counts
