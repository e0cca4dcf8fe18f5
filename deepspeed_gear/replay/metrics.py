"""Metrics of a Replay: counts and times of its batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass
class Trained:
    """Sums over the optimizer steps of packed batches that were trained.

    Args:
        steps: Their number.
        trajectories, tokens: Trained in them, all ranks together.
        micro_batches: Of this rank.
        fill: Part of this rank's places that hold a trajectory's step; a sum over steps.
        imbalance: Cost of the slowest rank in each micro step / the mean, minus 1; a sum over steps.
        skipped: Steps that the engine skipped for an overflow; they are among the others.
    """

    steps: int = 0
    trajectories: int = 0
    tokens: int = 0
    micro_batches: int = 0
    fill: float = 0.0
    imbalance: float = 0.0
    skipped: int = 0

    def add(self, trajectories: int, tokens: int, micro_batches: int, fill: float, imbalance: float) -> None:
        """Count an optimizer step; arguments as the attributes."""
        self.steps += 1
        self.trajectories += trajectories
        self.tokens += tokens
        self.micro_batches += micro_batches
        self.fill += fill
        self.imbalance += imbalance

    def since(self, earlier: Trained) -> dict[str, float]:
        """Return means per optimizer step since an earlier value, their number, and all skipped ones."""
        steps = max(self.steps - earlier.steps, 1)
        names = ("trajectories", "tokens", "micro_batches", "fill", "imbalance")
        found = {f"step_{name}": (getattr(self, name) - getattr(earlier, name)) / steps for name in names}
        return {
            **found,
            "train_steps": float(self.steps - earlier.steps),
            "skipped_steps": float(self.skipped),
        }


class Metrics:
    """Sums that only increase. Thread safe: a prefetch thread adds, the main thread adds and reads."""

    def __init__(self) -> None:
        self.num_batches, self.num_made, self.epoch = 0, 0, 0
        self.digest: tuple[int, int] | None = None  # the last verified global batch, and its digest
        self.wait_s = 0.0  # in all calls of `sample`, or for rollout batches and their packs
        self._sample_s = 0.0
        self._taken: list[float] = [0] * 7
        self.trained, self._trained = Trained(), Trained()

    def produced(self, seconds: float) -> None:
        """Count a micro batch that was selected and gathered."""
        self._sample_s += seconds
        self.num_made += 1

    def waited(self, seconds: float, epoch: int) -> None:
        """Count a call of `sample`, or a rollout batch, and its duration."""
        self.num_batches += 1
        self.epoch = epoch
        self.wait_s += seconds

    def gathered(self, seconds: float) -> None:
        """Count time in which packs of a rollout batch were gathered, or other ranks were waited for."""
        self.wait_s += seconds

    def skipped_step(self) -> None:
        """Count an optimizer step of packed batches whose update was skipped."""
        self.trained.skipped += 1

    def take_trained(self) -> dict[str, float]:
        """Return means per optimizer step since the last call, of packed batches."""
        now = replace(self.trained)
        found, self._trained = now.since(self._trained), now
        return found

    def take(self, counters: torch.Tensor) -> dict[str, float]:
        """Return means per micro batch since the last call.

        Args:
            counters: Real rows, all rows and bytes gathered so far. [3], int64.
        Returns:
            `sample_ms`, `wait_ms`, `bytes`, `padding` (fraction of rows that are padding) and `epoch`.
        """
        now = [*counters.tolist(), self._sample_s, self.num_made, self.wait_s, self.num_batches]
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
