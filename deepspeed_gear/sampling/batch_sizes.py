"""Batch sizes: samples of a micro batch and of a global batch, for the parallel ranks there are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from deepspeed_gear.distributed.topology import RankCoordinates

TRAIN = "train"  # the stream of training batches
# When the ranks of a training run wait for each other.
Turns = Literal["micro", "global", "schedule"]


@dataclass(frozen=True)
class BatchInfo:
    """Sizes of a batch, in samples."""

    micro: int  # of a micro batch: of one `sample()` on one rank
    accumulation: int  # micro batches of a rank in a global batch
    data_world: int  # replicas
    # Ranks of a replica, by axis.
    tensor_world: int = 1
    pipe_world: int = 1
    sequence_world: int = 1
    # Most items of a packed batch, all replicas together; None: batches are not packed.
    items: int | None = None

    @classmethod
    def at(
        cls, place: RankCoordinates, micro: int, accumulation: int, items: int | None = None
    ) -> BatchInfo:
        """Return the sizes of batches over the grid in which a rank has its place."""
        return cls(
            micro,
            accumulation,
            place.data_world,
            place.tensor_world,
            place.pipe_world,
            place.sequence_world,
            items,
        )

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro batches of a global batch, all replicas together."""
        return self.accumulation * self.data_world

    @property
    def lifetime(self) -> int:
        """Latest batches of a stream that a program may still use: those of an optimizer step."""
        return max(2, self.accumulation)

    @property
    def global_batch(self) -> int:
        return self.micro * self.num_micro_batches if self.items is None else self.items

    def __str__(self) -> str:
        others = {
            "tensor": self.tensor_world,
            "pipeline": self.pipe_world,
            "sequence": self.sequence_world,
        }
        rest = "".join(f", {name} {world}" for name, world in others.items() if world > 1)
        if self.items is not None:
            return f"packed batches of at most {self.items} items, data {self.data_world}{rest}"
        product = (
            f"micro batch {self.micro} x accumulation {self.accumulation} x data {self.data_world}"
        )
        return f"global batch {self.global_batch} = {product}{rest}"
