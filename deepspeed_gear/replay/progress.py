"""Progress of training: samples per second, share of time waited for data, and policy lag."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Totals(NamedTuple):
    """Sums since a replay was made, and its latest lag; as in `Progress`."""

    num_samples: int
    wait_s: float | None
    lag: float | None


@dataclass(frozen=True)
class Progress:
    """Progress of the training stream in a period; `str` is one line for a log.

    Args:
        num_samples: Samples of all replicas together; of packed batches, trajectories that were trained.
        elapsed_s: Length of the period, with all that the program does in it.
        wait_s: Time that this rank spent in `sample`, or on rollout batches and their packs: gathering, or
            waiting for a prefetch thread, for items or for other ranks. None: the table lies in a device's
            memory, and `sample` waits for nothing.
        lag: Mean policy lag of those samples of the newest global batch that this node stores. None: no table
            has versions, or there is no such sample.
    """

    num_samples: int
    elapsed_s: float
    wait_s: float | None
    lag: float | None

    @property
    def samples_per_s(self) -> float:
        """Samples per second, of all replicas together."""
        return self.num_samples / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def wait_share(self) -> float | None:
        """Part of the time that this rank spent in `sample`, in [0, 1]."""
        if self.wait_s is None:
            return None
        return self.wait_s / self.elapsed_s if self.elapsed_s > 0 else 0.0

    def __str__(self) -> str:
        rate, share = self.samples_per_s, self.wait_share
        parts = [f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"]
        if share is not None:
            parts.append(f"{share:.1%} of the time waiting for data")
        if self.lag is not None:
            parts.append(f"policy lag {self.lag:.1f}")
        return ", ".join(parts)


class ProgressMeter:
    """Measures the progress between two readings.

    Args:
        begin: Totals where the first period begins.
        clock: Returns the time in seconds.
    """

    def __init__(self, begin: Totals, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._begin, self._begin_s = clock, begin, clock()

    def read(self, totals: Totals) -> Progress:
        """Return the progress since the last reading.

        Args:
            totals: Of this time.
        """
        now_s = self._clock()
        before, before_s = self._begin, self._begin_s
        self._begin, self._begin_s = totals, now_s
        wait_s = None
        if totals.wait_s is not None and before.wait_s is not None:
            wait_s = totals.wait_s - before.wait_s
        return Progress(totals.num_samples - before.num_samples, now_s - before_s, wait_s, totals.lag)
