"""Counters of a rank's batches and optimizer steps, their means since the last call; progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deepspeed_gear.store.records import RankProgress

# Of an optimizer step of packed batches: trajectories and tokens of all ranks, tokens that shared
# prefixes save, micro batches of this rank, the part of its places that hold a trajectory's step,
# and the cost of the slowest rank in each micro step / the mean, minus 1.
TRAINED = ("trajectories", "tokens", "shared_tokens", "micro_batches", "fill", "imbalance")
# Sums of `add` that the store has, too.
_PUBLISHED = {
    "wait_s": RankProgress.WAIT_S,
    "steps": RankProgress.STEPS,
    "trajectories": RankProgress.TRAJECTORIES,
    "tokens": RankProgress.TOKENS,
}


class Metrics:
    """Counters of a replay's batches and steps: sums that only increase.

    Some are published in the store, where `gear watch` reads them.

    Thread safety: a prefetch thread adds, the main thread adds and reads.

    Args:
        progress: This rank's words of `RankProgress` in the store; None: nothing is published.
        rank: This rank's number in the job.
    """

    def __init__(self, progress: np.ndarray | None = None, rank: int = 0) -> None:
        # A memoryview: an element of an array takes three times as long.
        self._progress: Any = None if progress is None else progress.data
        if progress is not None:
            progress[:] = 0
            progress[RankProgress.RANK] = rank
            progress[RankProgress.BEGUN_S] = time.monotonic()
        self.epoch = 0
        self.digest: tuple[int, int] | None = None  # the last verified global batch, and its digest
        # `wait_s`: in all calls of `sample`, or for rollout batches and their packs; `made`,
        # `sample_s`: micro batches that were gathered; the others are of optimizer steps of packed
        # batches, and `skipped` those whose update was, for an overflow.
        names = (
            "batches",
            "wait_s",
            "made",
            "sample_s",
            "real",
            "rows",
            "bytes",
            "steps",
            "skipped",
        )
        self.sums = dict.fromkeys((*names, *TRAINED), 0.0)
        self._taken = dict(self.sums)  # at the last `take`
        self._taken_s = time.perf_counter()
        self._means = dict[str, float]()  # as they were last returned
        self._num_new = 0.0  # batches, or optimizer steps, between the last two calls of `take`
        self._elapsed_s = 0.0  # between these calls
        self._counted: Mapping[str, float] = {}  # counts of the tables and ranks at the last one

    def end_publishing(self) -> None:
        """Release the words in the store, whose memory they would keep."""
        self._progress = None

    def add(self, **sums: float) -> None:
        """Add to sums by name."""
        words = self._progress
        for name, value in sums.items():
            self.sums[name] += value
            if words is not None and name in _PUBLISHED:
                words[_PUBLISHED[name]] = self.sums[name]

    def made(self, taken_s: float) -> None:
        """Count a micro batch that was gathered."""
        sums = self.sums
        sums["sample_s"] += taken_s
        sums["made"] += 1
        words = self._progress
        if words is not None:
            words[RankProgress.MADE] = sums["made"]
            words[RankProgress.GATHER_S] = sums["sample_s"]

    def used(self, epoch: int, waited_s: float, now_s: float) -> None:
        """Count a batch that was returned, of an epoch, at a time of `time.monotonic`."""
        self.epoch = epoch
        sums = self.sums
        sums["wait_s"] += waited_s
        sums["batches"] += 1
        words = self._progress
        if words is not None:
            words[RankProgress.WAIT_S] = sums["wait_s"]
            words[RankProgress.BATCHES] = sums["batches"]
            words[RankProgress.RETURNED_S] = now_s

    def take_rates(
        self, counts: Mapping[str, float], late_s: Mapping[int, float]
    ) -> dict[str, float]:
        """Return counts per second, and how late ranks were per batch, after `take`.

        Args:
            counts: What was ever counted, by the name of its rate.
            late_s: Seconds by which each rank was late at the batch barriers, in all.
        """
        sums = {name: (count, self._elapsed_s) for name, count in counts.items()}
        for rank, total_s in late_s.items():
            sums[f"late_ms.rank{rank}"] = (1e3 * total_s, self._num_new)
        found = {}
        for name, (total, divisor) in sums.items():
            of_period = max(total - self._counted.get(name, 0.0), 0.0)  # a load sets counts back
            found[name] = self._mean(name, of_period, divisor if self._num_new else 0.0)
        if self._num_new:
            self._counted = {name: total for name, (total, _) in sums.items()}
        return found

    def _new(self, counted: str) -> dict[str, float]:
        """Return what was added since the last call; a period is one with something `counted`."""
        now = dict(self.sums)
        before = self._taken
        self._taken = now
        new = {name: value - before[name] for name, value in now.items()}
        self._num_new = new[counted]
        if self._num_new:
            now_s = time.perf_counter()
            self._elapsed_s = now_s - self._taken_s
            self._taken_s = now_s
        return new

    def _wait_share(self, wait_s: float) -> float:
        """Return the part of the period that this rank waited for batches, in [0, 1]."""
        elapsed_s = self._elapsed_s if self._num_new else 0.0
        return min(self._mean("wait_share", wait_s, elapsed_s), 1.0)

    def _mean(self, name: str, total: float, count: float) -> float:
        """Return a mean since the last call, or of the period before if nothing was counted."""
        if count:
            self._means[name] = total / count
        return self._means.get(name, 0.0)

    def take_trained(self) -> dict[str, float]:
        """Return means per optimizer step since the last call, and the number of skipped steps."""
        new = self._new("steps")
        means = {f"step_{name}": self._mean(name, new[name], new["steps"]) for name in TRAINED}
        return {
            **means,
            "wait_share": self._wait_share(new["wait_s"]),
            "train_steps": new["steps"],
            "skipped_steps": self.sums["skipped"],
        }

    def take(self, counters: torch.Tensor) -> dict[str, float]:
        """Return means per micro batch since the last call.

        Args:
            counters: Real rows, all rows and bytes, ever. [3].
        """
        self.sums |= zip(("real", "rows", "bytes"), counters.tolist(), strict=True)
        new = self._new("batches")
        return {
            "sample_ms": self._mean("sample_ms", 1e3 * new["sample_s"], new["made"]),
            "wait_ms": self._mean("wait_ms", 1e3 * new["wait_s"], new["batches"]),
            "wait_share": self._wait_share(new["wait_s"]),
            "bytes": self._mean("bytes", new["bytes"], new["made"]),
            # A fraction of the rows.
            "padding": self._mean("padding", new["rows"] - new["real"], new["rows"]),
            "epoch": float(self.epoch),
        }


@dataclass(frozen=True)
class Progress:
    """Progress of the training stream in a period; `str` is one line for a log.

    Args:
        num_samples: Samples of all replicas together; of packed batches, trajectories that were
            trained.
        elapsed_s: Length of the period, with all that the program does in it.
        wait_s: Time that this rank spent in `sample`, or on rollout batches and their packs:
            gathering, or waiting for a prefetch thread, for items or for other ranks. None: the
            table lies in a device's memory, and `sample` waits for nothing.
        lag: Mean policy lag of those samples of the newest global batch that this node stores.
            None: no table has versions, or there is no such sample.
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

    def __sub__(self, before: Progress) -> Progress:
        """Return the progress from one period's end to this one's, which began together."""
        wait_s = None if self.wait_s is None else self.wait_s - (before.wait_s or 0.0)
        samples = self.num_samples - before.num_samples
        elapsed_s = self.elapsed_s - before.elapsed_s
        return Progress(samples, elapsed_s, wait_s, self.lag)

    def __str__(self) -> str:
        rate = self.samples_per_s
        share = self.wait_share
        parts = [f"{rate:,.0f} samples/s" if rate >= 100 else f"{rate:.3g} samples/s"]
        if share is not None:
            parts.append(f"{share:.1%} of the time waiting for data")
        if self.lag is not None:
            parts.append(f"policy lag {self.lag:.1f}")
        return ", ".join(parts)
