"""What a cut asks of a table as a whole. Here the table lies in one store; parallel/ asks several nodes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.rate_gate import RateGate
from deepspeed_gear.sampling.samplers.age import AgeMasses
from deepspeed_gear.sampling.samplers.prioritized import PriorityMasses
from deepspeed_gear.sampling.selection import StreamSpec
from deepspeed_gear.sampling.sum_tree import ItemMasses

Check = Callable[[], None]


class GateClosedError(Exception):
    """No node makes a cut yet: what all hold together is not enough. Never leaves the stream."""


class LocalSelector:
    """The items of one store. Every method wants the table's lock.

    Args:
        spec: The stream.
        masses: Of its items.
    """

    in_store = True  # a cut holds the table's lock from its beginning to its end
    counts_draws = True  # all that is drawn lies in this store

    def __init__(self, spec: StreamSpec, masses: ItemMasses) -> None:
        self.spec, self.masses = spec, masses

    @property
    def waiting(self) -> bool:
        """Whether `apply` would change a mass."""
        return self.masses.waiting

    @property
    def total(self) -> int:
        """Sum of all masses, as the latest cut has left them."""
        return self.masses.total

    def begin(self, key: int, entry: int, count: int, check: Check) -> None:
        """Begin the cut of a global batch.

        Args:
            key: Its number.
            entry: Where it goes in the ring.
            count: Its samples.
            check: Raises where a wait must end.
        Raises:
            GateClosedError: It may not be made yet.
        """

    def apply(self, key: int) -> int:
        """Bring all masses to the state that the cut draws from. Returns their sum."""
        self.masses.apply(key)
        return self.masses.total

    def resolve(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> None:
        """Find what some of a cut's coordinates hit.

        Args:
            rows: Gets the resolutions of the cut. [count, 8], int64.
            done: Index of the first of these samples in the cut.
            coordinates: In [0, total). [n], int64.
            first: Sample number of the first one.
        """
        count = len(coordinates)
        self.masses.resolve(rows if count == len(rows) else rows[done : done + count], coordinates, first)

    def resolve_until(
        self,
        rows: torch.Tensor,
        done: int,
        coordinates: torch.Tensor,
        first: int,
        gate: RateGate,
        counted: np.ndarray,
    ) -> int:
        """Find what coordinates hit up to the first that uses a trajectory up, which is drawn no more.

        Args:
            rows: As `resolve`.
            done: As `resolve`.
            coordinates: As `resolve`.
            first: As `resolve`.
            gate: Knows how often trajectories were drawn.
            counted: Draws of each slot in this cut so far; these are added. [slots], int64.
        Returns:
            How many of them stand; the others hit what they hit without that trajectory.
        """
        self.resolve(rows, done, coordinates, first)
        slots = rows[done:, Resolution.SLOT].numpy()
        standing = min(gate.num_admitted(slots, counted) + 1, len(slots))
        np.add.at(counted, slots[:standing], 1)
        if standing < len(slots):
            self.masses.take_out(int(slots[standing - 1]))
        return standing

    def drawn(self, rows: np.ndarray) -> np.ndarray:
        """Return the resolutions of the latest cut that lie in this store.

        Args:
            rows: All of them. [count, 8], int64.
        """
        return rows

    def highest(self, count: int) -> torch.Tensor:
        """Return the coordinates of the items of highest priority; fewer if there are not so many. [n]."""
        assert isinstance(self.masses, PriorityMasses)
        return self.masses.highest(count)

    def extreme(self, count: int, newest: bool) -> torch.Tensor:
        """Return the coordinates of the oldest items, or of the newest; or fewer. [n]."""
        assert isinstance(self.masses, AgeMasses)
        return self.masses.extreme(count, newest)

    def finish(self) -> None:
        """Make what was resolved ready to be collected."""

    def weigh(self, key: int, drawn: np.ndarray, total: int) -> tuple[int, int, int]:
        """Return numerator, divisor and exponent of importance weights, as `PriorityMasses.weigh`."""
        assert isinstance(self.masses, PriorityMasses)
        return self.masses.weigh(key, drawn, total)

    def fail(self, key: int, error: Exception) -> None:
        """Take note that a cut could not be made."""
