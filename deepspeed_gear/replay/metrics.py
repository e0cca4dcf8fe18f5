"""Metrics of a Replay: counts and times of its batches."""

from __future__ import annotations

import torch


class Metrics:
    """Sums that only increase. Thread safe: a prefetch thread adds, the main thread adds and reads."""

    def __init__(self) -> None:
        self.num_batches, self.num_made, self.epoch = 0, 0, 0
        self.digest: tuple[int, int] | None = None  # the last verified global batch, and its digest
        self._sample_s, self._wait_s = 0.0, 0.0
        self._taken: list[float] = [0] * 7

    def produced(self, seconds: float) -> None:
        """Count a micro batch that was selected and gathered."""
        self._sample_s += seconds
        self.num_made += 1

    def waited(self, seconds: float, epoch: int) -> None:
        """Count a call of `sample` and its duration."""
        self.num_batches += 1
        self.epoch = epoch
        self._wait_s += seconds

    def take(self, counters: torch.Tensor) -> dict[str, float]:
        """Return means per micro batch since the last call.

        Args:
            counters: Real rows, all rows and bytes gathered so far. [3], int64.
        Returns:
            `sample_ms`, `wait_ms`, `bytes`, `padding` (fraction of rows that are padding) and `epoch`.
        """
        now = [*counters.tolist(), self._sample_s, self.num_made, self._wait_s, self.num_batches]
        real, rows, size, sample_s, made, wait_s, batches = (
            a - b for a, b in zip(now, self._taken, strict=True)
        )
        self._taken = now
        return {
            "sample_ms": 1e3 * sample_s / max(made, 1),
            "wait_ms": 1e3 * wait_s / max(batches, 1),
            "bytes": size / max(made, 1),
            "padding": 1 - real / rows if rows else 0.0,
            "epoch": float(self.epoch),
        }
