"""Sizes of a batch."""

from __future__ import annotations

from dataclasses import dataclass

TRAIN = "train"  # the stream of training batches


@dataclass(frozen=True)
class BatchInfo:
    """Sizes of a batch, in samples.

    Args:
        micro: Of one `sample()` on one rank.
        accumulation: Micro batches of a rank in a global batch.
        data_world: Replicas.
    """

    micro: int
    accumulation: int
    data_world: int

    @property
    def num_micro(self) -> int:
        """Micro batches of a global batch, all ranks together."""
        return self.accumulation * self.data_world

    @property
    def global_batch(self) -> int:
        return self.micro * self.num_micro
