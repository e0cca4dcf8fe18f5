"""How far writers and samplers of a table may be ahead of each other. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deepspeed_gear.store.records import Control


@dataclass(frozen=True)
class RateLimiter:
    """How many samples are drawn for each item that is added, as Reverb's rate limiters say it.

    With I items ever added and S samples ever drawn, the difference I * samples_per_insert - S stays in
    [least, most] once `min_size` items are held: the side that would leave it waits.

    Args:
        unit: What an item is.
        min_size: No sample is drawn as long as fewer items are held, and as many may always be added.
        samples_per_insert: The ratio.
        least, most: Of the difference.

    Source: Cassirer et al., "Reverb: A Framework For Experience Replay", 2021, section 3.3.
    """

    unit: Literal["step", "trajectory"]
    min_size: int
    samples_per_insert: float
    least: float
    most: float

    @classmethod
    def ratio(
        cls, unit: Literal["step", "trajectory"], min_size: int, samples_per_insert: float, buffer: float
    ) -> RateLimiter:
        """Allow the difference to stray by `buffer` from what it is at `min_size` items."""
        offset = samples_per_insert * min_size
        return cls(unit, min_size, samples_per_insert, offset - buffer, offset + buffer)

    @classmethod
    def least_size(cls, unit: Literal["step", "trajectory"], min_size: int) -> RateLimiter:
        """Wait for `min_size` items only."""
        return cls(unit, min_size, 1.0, -math.inf, math.inf)

    @classmethod
    def queue(cls, unit: Literal["step", "trajectory"], size: int) -> RateLimiter:
        """Let at most `size` items wait to be drawn."""
        return cls(unit, 1, 1.0, 0.0, float(size))

    def may_sample(self, size: int, inserted: int, sampled: int, count: int) -> bool:
        """Return whether so many samples may be drawn.

        Args:
            size: Items held.
            inserted: Items ever added.
            sampled: Samples ever drawn.
            count: Samples wanted.
        """
        return size >= self.min_size and inserted * self.samples_per_insert - sampled - count >= self.least

    def may_insert(self, size: int, inserted: int, sampled: int, count: int = 1) -> bool:
        """Return whether so many items may be added; arguments as `may_sample`."""
        if size + count <= self.min_size:
            return True
        return (inserted + count) * self.samples_per_insert - sampled <= self.most

    @property
    def holds_back(self) -> bool:
        """Whether writers may ever have to wait."""
        return self.most < math.inf

    def room(self, size: int, inserted: int, sampled: int) -> int:
        """Return how many items may be added, alone or many at once, before another sample is drawn.

        Only where it `holds_back`; arguments as `may_sample`.
        """
        ahead = math.floor((self.most + sampled) / self.samples_per_insert) + 1 - inserted
        while (inserted + ahead) * self.samples_per_insert - sampled > self.most:
            ahead -= 1
        return max(ahead, self.min_size - size, 0)

    def counted(self, control: np.ndarray) -> tuple[int, int, int]:
        """Return the items held, those ever added, and those that are reserved and not committed.

        Args:
            control: The store's control words. [32], int64.
        """
        words = Control.NUM_COMMITTED, Control.INSERTED, Control.PENDING
        if self.unit == "step":
            words = Control.STEPS_COMMITTED, Control.STEPS_INSERTED, Control.STEPS_PENDING
        size, inserted, pending = (int(control[word]) for word in words)
        return size, inserted, pending
