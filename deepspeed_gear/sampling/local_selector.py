"""The selector of a table that lies in one store: masses, draws and resolutions of a selection.

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
    """Selects among the items of one store. Every method requires the table's lock.

    Args:
        state: Of the batch stream.
    """

    in_store = True  # the table's lock is held for the whole selection
    counts_draws = True  # all samples lie in this store

    def __init__(self, state: StreamState) -> None:
        self.state, self.spec, self.masses = state, state.spec, state.masses

    @property
    def total(self) -> int:
        """Sum of all masses, as of the latest selection."""
        return self.masses.total

    def begin(self, key: int, entry: int, count: int, check: Check) -> None:
        """Begin the selection of a global batch.

        Args:
            key: Its number.
            entry: Of the ring.
            count: Its samples.
            check: Raises where a wait must end.
        Raises:
            RateLimitedError: The rate limiter does not admit it yet.
        """

    def apply(self, key: int) -> int:
        """Apply all changes of masses that precede the selection. Returns their sum."""
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
        count = coordinates.size(0)  # `len` of a tensor takes ten times as long
        self.masses.resolve(rows if count == rows.size(0) else rows[done : done + count], coordinates, first)

    def walk(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> int:
        """Resolve the next coordinates of an epoch, without items that were evicted since it began.

        Args:
            rows: As `resolve`.
            done: As `resolve`.
            coordinates: As `resolve`.
            first: Sample number of the first item that is left.
        Returns:
            How many are left.
        """
        self.resolve(rows, done, coordinates, first)
        if self.state.walked is None:
            return coordinates.size(0)
        slots = rows[done : done + coordinates.size(0), Resolution.SLOT].numpy()
        left = torch.from_numpy(~self.state.evicted(slots))
        if not left.all():
            coordinates = coordinates[left]
            self.resolve(rows, done, coordinates, first)  # with the sample numbers of those that are left
        return coordinates.size(0)

    def drop(self) -> None:
        """Drop the samples of the selection so far: they do not fill a batch at the end of an epoch."""

    def resolve_until(
        self,
        rows: torch.Tensor,
        done: int,
        coordinates: torch.Tensor,
        first: int,
        limiter: SelectionLimiter,
        counted: np.ndarray,
    ) -> int:
        """Resolve coordinates up to the first that uses up a trajectory, whose mass then becomes 0.

        Args:
            rows: As `resolve`.
            done: As `resolve`.
            coordinates: As `resolve`.
            first: As `resolve`.
            limiter: Counts how often trajectories were sampled.
            counted: Samples of each slot in this selection so far; these are added. [slots], int64.
        Returns:
            How many of them are valid; the others must be drawn again without that trajectory.
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
        """Return the coordinates of the items of highest priority; fewer if there are fewer items. [n]."""
        return self.state.with_priorities.highest(count)

    def extreme(self, count: int, newest: bool) -> torch.Tensor:
        """Return the coordinates of the oldest or the newest items; or fewer. [n]."""
        return self.state.with_ages.extreme(count, newest)

    def finish(self, entry: int, count: int) -> int:
        """Make the resolved samples ready to be gathered.

        Args:
            entry: Of the ring.
            count: Items that were drawn for it.
        Returns:
            The records of the selection: its samples, or the trajectories of its groups.
        """
        return self.state.expand(entry, count) if self.spec.by_group else count

    def weigh(self, key: int, drawn: np.ndarray, total: int) -> tuple[int, int, int]:
        """Return numerator, divisor and exponent of PER weights, as `PriorityMasses.weigh`."""
        return self.state.with_priorities.weigh(key, drawn, total)

    def fail(self, key: int, error: Exception) -> None:
        """Publish the failure of a selection."""

    def restart(self) -> None:
        """Reset the selector after the table's contents were replaced."""
