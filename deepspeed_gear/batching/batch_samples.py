"""Samples of a batch: their records in the selection, and values derived from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_gear.batching.burn_in import BurnIn


@dataclass(slots=True)
class BatchSamples:
    """Samples of a batch: resolutions, and values derived from them."""

    resolutions: torch.Tensor  # [B, 8], int64.
    # False for samples that only fill up the last batch of an evaluation pass. [B], bool.
    valid: torch.Tensor
    step_items: bool  # whether an item is a step, which has a mass of 1, rather than a trajectory
    total: int | torch.Tensor  # sum of the masses of all items. On a device [], int64.
    epoch: torch.Tensor  # epoch of each sample, 0 where the sampler has none. [B], int64.
    is_weight: torch.Tensor | None = None  # PER weights; None: all 1. [B], float32.
    # Index of each sample's table in the sampler's shares; None: there is one. [B], int64.
    source: torch.Tensor | None = None
    # Probability of each sample's item; None: mass / total. [B], float64.
    probability: torch.Tensor | None = None
    # Row of the achieved goal of each relabelled sample, -1 for its own goal; None: all have their
    # own. [B], int64.
    goal_step: torch.Tensor | None = None
    burn_in: BurnIn | None = None  # None: all steps learn
    # Node and slot of each sample's trajectory, node << 32 | slot; None: they are in this node's
    # store. [B], int64.
    origin: torch.Tensor | None = None
    first_index: int = 0  # index of the first sample in its global batch
    index_step: int = 1  # difference between the indices of consecutive samples
    # Values of opaque fields by name, B each; None: there are none.
    opaque: dict[str, list[Any]] | None = None
    # Position of each sample in its global batch; None: first_index + i * index_step. [B], int64.
    index: torch.Tensor | None = None

    def place(self, first_index: int, index_step: int, source: torch.Tensor | None) -> None:
        """Set the position of the samples in their global batch, and their tables."""
        self.first_index = first_index
        self.index_step = index_step
        self.source = source


# The attributes of `BatchSamples` that hold a value per sample, and those that hold one for all.
OF_EACH = (
    "resolutions",
    "valid",
    "epoch",
    "is_weight",
    "source",
    "probability",
    "goal_step",
    "origin",
    "index",
)
OF_ALL = ("step_items", "total", "burn_in", "first_index", "index_step")
