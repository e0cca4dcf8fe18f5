"""Mixtures: which table each sample of a global batch comes from. Pure: equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.functional import Ops

TOLERANCE = 1e-6  # of the sum of the shares


@dataclass
class Mixture:
    """The tables of the samples of each global batch.

    Args:
        names: Of the tables.
        shares: Of each table by global batch; they sum to 1.
        batch: Samples of a global batch.
        exact: Whole numbers of samples next to the shares; else the table of each sample is drawn.
        seed, key: Of those draws.
        ops: What draws.
    """

    names: Sequence[str]
    shares: Sequence[Callable[[int], float]]
    batch: int
    exact: bool
    seed: int
    key: int
    ops: Ops
    _known: tuple[int, np.ndarray] = field(default=(-1, np.empty(0, np.int64)), repr=False)

    def tables(self, number: int) -> np.ndarray:
        """Return the table of each sample of a global batch. [B], int64.

        Raises:
            ConfigError: The shares do not sum to 1 at this global batch.
        """
        known = self._known  # replaced as a whole: two threads may ask
        if known[0] != number:
            shares = self._shares(number)
            known = number, self._spread(shares) if self.exact else self._draw(shares, number)
            self._known = known
        return known[1]

    def parts(self, number: int) -> list[float]:
        """Return which part of a global batch is each table's: its share where tables are drawn."""
        if not self.exact:
            return self._shares(number)
        return [self.count(table, number) / self.batch for table in range(len(self.names))]

    def count(self, table: int, number: int) -> int:
        """Return how many samples of a global batch are a table's."""
        return int(np.count_nonzero(self.tables(number) == table))

    def part(self, number: int, part: int, num_parts: int) -> list[np.ndarray]:
        """Return which samples of each table's cut belong to every num_parts-th sample from `part` on."""
        tables = self.tables(number)
        chosen = tables[part::num_parts]
        found = []
        for table in range(len(self.names)):
            mine = tables == table
            order = np.cumsum(mine) - 1  # the how many-th sample of its table each sample is
            found.append(order[part::num_parts][chosen == table])
        return found

    def _shares(self, number: int) -> list[float]:
        shares = [share(number) for share in self.shares]
        if abs(sum(shares) - 1) > TOLERANCE:
            given = dict(zip(self.names, shares, strict=True))
            raise ConfigError(f"gear.sampler.shares at global batch {number}", "must sum to 1", given)
        return shares

    def _spread(self, shares: list[float]) -> np.ndarray:
        """Return whole numbers of samples by the largest remainders, spread evenly over the batch."""
        wanted = np.array(shares) / sum(shares) * self.batch
        counts = np.floor(wanted).astype(np.int64)
        behind = np.argsort(counts - wanted, kind="stable")
        counts[behind[: self.batch - counts.sum()]] += 1
        tables = np.repeat(np.arange(len(counts)), counts)
        place = np.concatenate([(2 * np.arange(n) + 1) / (2 * n) for n in counts.tolist() if n])
        return np.asarray(tables[np.argsort(place, kind="stable")])

    def _draw(self, shares: list[float], number: int) -> np.ndarray:
        words = torch.empty(self.batch, dtype=torch.int64)
        self.ops.draw_(words, self.seed, self.key, number * self.batch, ONE_Q62)
        bounds = [int(bound * ONE_Q62) for bound in np.cumsum(shares)[:-1].tolist()]
        return np.searchsorted(np.array(bounds, np.int64), words.numpy(), side="right")
