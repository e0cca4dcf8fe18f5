"""A user's transform of batches, and the random words that it gets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.ops.philox import philox_words
from deepspeed_gear.ops.records import RandomPurpose

#: A program's function that changes a batch: (batch, random word per sample [B] int64) -> batch.
Transform = Callable[[Batch, torch.Tensor], Batch]


def transform_words(seed: int, stream: int, numbers: torch.Tensor) -> torch.Tensor:
    """Return a random word per sample for a user's transform, the same on any number of ranks.

    Args:
        seed: The run's seed.
        stream: The random key of the batch stream and its table.
        numbers: Sample numbers. [B], int64.
    Returns:
        [B], int64, on the device of `numbers`.
    """
    return philox_words(seed, numbers, stream, RandomPurpose.TRANSFORM)[0]
