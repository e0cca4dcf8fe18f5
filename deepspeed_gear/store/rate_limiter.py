"""Rate limiter: when writers or samplers of a table must block, and the quotas of several nodes.

Pure. The native store tests whether writers may add (`MayInsert` in store/rate_limiter.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from deepspeed_gear.store.records import Control

Unit = Literal["trajectory", "step", "group"]


@dataclass(frozen=True)
class RateLimiter:
    """Bounds on samples drawn per item added: Cassirer et al., "Reverb", 2021, section 3.3.

    With I items ever added and S samples drawn, I * samples_per_insert - S stays in [least, most]
    once `min_size` items are held: the side that would leave it blocks. No sample is drawn while
    fewer are held; so many may always be added.
    """

    unit: Unit
    min_size: int
    samples_per_insert: float
    least: float
    most: float

    @classmethod
    def ratio(
        cls, unit: Unit, min_size: int, samples_per_insert: float, buffer: float
    ) -> RateLimiter:
        """Return a limiter whose bounds are `buffer` around the difference at `min_size` items."""
        offset = samples_per_insert * min_size
        return cls(unit, min_size, samples_per_insert, offset - buffer, offset + buffer)

    @classmethod
    def least_size(cls, unit: Unit, min_size: int) -> RateLimiter:
        """Return a limiter that only blocks samplers until `min_size` items are held."""
        return cls(unit, min_size, 1.0, -math.inf, math.inf)

    @classmethod
    def queue(cls, unit: Unit, size: int) -> RateLimiter:
        """Return a limiter of a queue: at most `size` items wait to be drawn."""
        return cls(unit, 1, 1.0, 0.0, float(size))

    def may_sample(self, size: int, inserted: int, sampled: int, count: int) -> bool:
        """Return whether `count` samples may be drawn."""
        return (
            size >= self.min_size
            and inserted * self.samples_per_insert - sampled - count >= self.least
        )

    def missing(self, size: int, inserted: int, sampled: int, count: int) -> int:
        """Return how many items must be added before `count` samples; arguments as `may_sample`."""
        missing = max(self.min_size - size, 0)
        if self.least > -math.inf:
            wanted = math.ceil((self.least + sampled + count) / self.samples_per_insert)
            missing = max(missing, wanted - inserted)
        while not self.may_sample(size + missing, inserted + missing, sampled, count):
            missing += 1  # the quotient was rounded
        return missing

    @property
    def holds_back(self) -> bool:
        """Whether writers may ever block."""
        return self.most < math.inf

    def room(self, size: int, inserted: int, sampled: int) -> int:
        """Return how many items may be added before another sample, if it `holds_back`.

        Arguments as `may_sample`.
        """
        ahead = math.floor((self.most + sampled) / self.samples_per_insert) + 1 - inserted
        while (inserted + ahead) * self.samples_per_insert - sampled > self.most:
            ahead -= 1
        return max(ahead, self.min_size - size, 0)

    def counted(self, control: np.ndarray) -> tuple[int, int, int]:
        """Return the trajectories or steps held, ever added, and reserved, by the control words.
        [32].
        """
        words = Control.NUM_COMMITTED, Control.INSERTED, Control.PENDING
        if self.unit == "step":
            words = Control.STEPS_COMMITTED, Control.STEPS_INSERTED, Control.STEPS_PENDING
        size, inserted, pending = (int(control[word]) for word in words)
        return size, inserted, pending


def kept(admitted: int, quota: int, gives_all: bool) -> int:
    """Return a node's quota for a round, in which its writers go on adding.

    It is half of what the node leaves after the `admitted` items; 0 where samplers wait, as then
    even the longest must be admitted on some node.
    """
    return admitted if gives_all else max(admitted, admitted + (quota - admitted) // 2)


def divide(pool: int, wanted: Sequence[int], turn: int) -> list[int]:
    """Divide a pool of items equally among nodes whose writers wait, or all; return each part. [S].

    If a part is too small for what one adds at once (`wanted`, 0: none waits, [S]), one node
    receives the pool, first in turn by the round's number.
    """
    count = len(wanted)
    order = [(turn + i) % count for i in range(count)]
    order = [node for node in order if wanted[node]] or order
    parts = [0] * count
    part, rest = divmod(pool, len(order))
    if any(wanted[node] > part for node in order):
        part = 0
        rest = 0
        parts[order[0]] = pool
    for i, node in enumerate(order):
        parts[node] += part + (i < rest)
    return parts
