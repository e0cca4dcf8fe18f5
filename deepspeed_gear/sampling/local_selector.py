"""What a selection asks of the masses, where the whole table lies in one store.

distributed/sharded/ has the selectors of tables that several nodes hold.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.rate_limiting import SelectionLimiter
from deepspeed_gear.sampling.stream_state import StreamState

Check = Callable[[], None]


class RateLimitedError(Exception):
    """The rate limiter of all nodes together admits no selection yet. Never leaves the batch stream."""


class LocalSelector:
    """The items of one store. Every method wants the table's lock.

    Args:
        state: Of the batch stream.
    """

    in_store = True  # the table's lock is held for the whole selection
    counts_draws = True  # all samples lie in this store

    def __init__(self, state: StreamState) -> None:
        self.state, self.spec, self.masses = state, state.spec, state.masses

    @property
    def total(self) -> int:
        """Sum of all masses, as the latest selection has left them."""
        return self.masses.total

    def begin(self, key: int, entry: int, count: int, check: Check) -> None:
        """Begin the selection of a global batch.

        Args:
            key: Its number.
            entry: Of the ring.
            count: Its samples.
            check: Raises where a wait must end.
        Raises:
            RateLimitedError: It may not be made yet.
        """

    def apply(self, key: int) -> int:
        """Bring all masses to the state that the selection draws from. Returns their sum."""
        self.masses.apply(key)
        return self.masses.total

    def resolve(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> None:
        """Resolve coordinates to items.

        Args:
            rows: Gets the resolutions of the selection. [count, 8], int64.
            done: Index of the first of these samples in the selection.
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
        limiter: SelectionLimiter,
        counted: np.ndarray,
    ) -> int:
        """Resolve coordinates up to the first that uses a trajectory up, whose mass becomes 0 then.

        Args:
            rows: As `resolve`.
            done: As `resolve`.
            coordinates: As `resolve`.
            first: As `resolve`.
            limiter: Knows how often trajectories were sampled.
            counted: Samples of each slot in this selection so far; these are added. [slots], int64.
        Returns:
            How many of them stand; the others must be drawn again without that trajectory.
        """
        self.resolve(rows, done, coordinates, first)
        slots = rows[done:, Resolution.SLOT].numpy()
        standing = min(limiter.num_admitted(slots, counted) + 1, len(slots))
        np.add.at(counted, slots[:standing], 1)
        if standing < len(slots):
            self.masses.take_out(int(slots[standing - 1]))
        return standing

    def own_samples(self, rows: np.ndarray) -> np.ndarray:
        """Return the resolutions of the latest selection that lie in this store.

        Args:
            rows: All of them. [count, 8], int64.
        """
        return rows

    def highest(self, count: int) -> torch.Tensor:
        """Return the coordinates of the items of highest priority; fewer if there are not so many. [n]."""
        return self.state.with_priorities.highest(count)

    def extreme(self, count: int, newest: bool) -> torch.Tensor:
        """Return the coordinates of the oldest items, or of the newest; or fewer. [n]."""
        return self.state.with_ages.extreme(count, newest)

    def finish(self) -> None:
        """Make the resolved samples ready to be gathered."""

    def weigh(self, key: int, drawn: np.ndarray, total: int) -> tuple[int, int, int]:
        """Return numerator, divisor and exponent of PER weights, as `PriorityMasses.weigh`."""
        return self.state.with_priorities.weigh(key, drawn, total)

    def fail(self, key: int, error: Exception) -> None:
        """Publish that a selection could not be made."""

    def restart(self) -> None:
        """Begin again with other contents of the table."""
