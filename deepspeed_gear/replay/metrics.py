"""What a Replay measures about itself."""

from __future__ import annotations

import threading

import torch


class Metrics:
    """Sums since the last `take`. Thread safe: a prefetch thread produces, the main thread waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_batches = 0
        self.epoch = 0
        self.digest: tuple[int, int] | None = None  # the last global batch that was verified, and its digest
        self._sums = {"sample_s": 0.0, "wait_s": 0.0, "batches": 0, "made": 0}
        self._counters = [0, 0, 0]

    def produced(self, seconds: float) -> None:
        """Count a micro batch that was selected and collected."""
        with self._lock:
            self._sums["sample_s"] += seconds
            self._sums["made"] += 1

    def waited(self, seconds: float, epoch: int) -> None:
        """Count a call of `sample` that took this long."""
        self.num_batches += 1
        self.epoch = epoch
        with self._lock:
            self._sums["wait_s"] += seconds
            self._sums["batches"] += 1

    def take(self, counters: torch.Tensor) -> dict[str, float]:
        """Return means per micro batch since the last call.

        Args:
            counters: Real rows, all rows and bytes collected so far. [3], int64.
        Returns:
            `sample_ms`, `wait_ms`, `bytes`, `padding` (fraction of rows that are padding) and `epoch`.
        """
        now = counters.tolist()
        real, rows, size = (a - b for a, b in zip(now, self._counters, strict=True))
        with self._lock:
            sums, self._sums = self._sums, dict.fromkeys(self._sums, 0)
        self._counters = now
        made, batches = max(sums["made"], 1), max(sums["batches"], 1)
        return {
            "sample_ms": 1e3 * sums["sample_s"] / made,
            "wait_ms": 1e3 * sums["wait_s"] / batches,
            "bytes": size / made,
            "padding": 1 - real / rows if rows else 0.0,
            "epoch": float(self.epoch),
        }
