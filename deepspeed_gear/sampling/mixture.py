"""Mixtures: how many samples of a global batch come from each table. Pure: equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deepspeed_gear.errors import ConfigError

TOLERANCE = 1e-6  # of the sum of the shares


@dataclass
class Mixture:
    """Numbers of samples by table for each global batch.

    Args:
        names: Of the tables.
        shares: Of each table by global batch; they sum to 1.
        batch: Samples of a global batch.
    """

    names: Sequence[str]
    shares: Sequence[Callable[[int], float]]
    batch: int
    _known: tuple[int, np.ndarray] = field(default=(-1, np.empty(0, np.int64)), repr=False)

    def counts(self, number: int) -> np.ndarray:
        """Return the number of samples of each table in a global batch. [tables], int64.

        Raises:
            ConfigError: The shares do not sum to 1 at this global batch.
        """
        known = self._known  # replaced as a whole: two threads may read it
        if known[0] != number:
            known = number, self._round(self._shares(number))
            self._known = known
        return known[1]

    def count(self, table: int, number: int) -> int:
        """Return the number of samples of one table in a global batch."""
        return int(self.counts(number)[table])

    def offset(self, table: int, number: int) -> int:
        """Return the number of samples of the tables before one in a global batch."""
        return int(self.counts(number)[:table].sum())

    def parts(self, number: int) -> list[float]:
        """Return each table's share of a global batch."""
        return [n / self.batch for n in self.counts(number).tolist()]

    def part(self, number: int, part: int, num_parts: int) -> list[np.ndarray]:
        """Return which samples of each table's selection belong to a part of the global batch.

        With all samples in a row, table by table, every num_parts-th belongs to a part. So all parts have
        the same size and the same shares of the tables.
        """
        counts = self.counts(number)
        first = (part - (np.cumsum(counts) - counts)) % num_parts
        return [np.arange(f, n, num_parts) for f, n in zip(first.tolist(), counts.tolist(), strict=True)]

    def _shares(self, number: int) -> list[float]:
        shares = [share(number) for share in self.shares]
        if abs(sum(shares) - 1) > TOLERANCE:
            given = dict(zip(self.names, shares, strict=True))
            raise ConfigError(f"gear.sampler.shares at global batch {number}", "must sum to 1", given)
        return shares

    def _round(self, shares: list[float]) -> np.ndarray:
        """Return whole numbers of samples, by the largest remainders."""
        wanted = np.array(shares) / sum(shares) * self.batch
        counts = np.floor(wanted).astype(np.int64)
        lacking = np.argsort(counts - wanted, kind="stable")
        counts[lacking[: self.batch - counts.sum()]] += 1
        return counts
