"""Rollout trajectories: those of a rollout batch, as its selections stored them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.ops.records import Resolution


class TableTrajectories(NamedTuple):
    """The trajectories of a rollout batch that lie in one table."""

    # NUM_STEPS is at most what a pack has room for. Trajectories of other nodes have no slot and no
    # rows here. [n, 8], int64, contiguous.
    resolutions: torch.Tensor
    weights: torch.Tensor  # PER weights. [n], float32
    # shard << 32 | slot; the slot alone where each node holds all of the table. [n], int64.
    origins: torch.Tensor
    # Whether the trajectory is longer than a pack: only its first steps are trained. [n], bool.
    is_cut: torch.Tensor


@dataclass(frozen=True)
class RolloutTrajectories:
    """The trajectories of a rollout batch, table by table, each in the order of the selection."""

    resolutions: torch.Tensor  # with the origin as slot, as priority updates have it. [n, 8], int64
    is_weight: np.ndarray  # [n], float32
    is_cut: np.ndarray  # [n], bool
    source: np.ndarray  # table. [n], int64
    row: np.ndarray  # index among the trajectories of its table. [n], int64
    lengths: np.ndarray  # steps. [n], int64
    starts: np.ndarray  # first place in a column: steps of those before it. [n], int64
    num_tokens: int  # steps of all
    has_neighbours: bool = True  # the trajectories of an item stand side by side

    @classmethod
    def of(
        cls, tables: Sequence[TableTrajectories], has_neighbours: bool = True
    ) -> RolloutTrajectories:
        """Join the trajectories of the tables."""
        resolutions = np.concatenate([table.resolutions.numpy() for table in tables])
        origins = np.concatenate([table.origins.numpy() for table in tables])
        resolutions[:, Resolution.SLOT] = origins
        resolutions[:, Resolution.ANCHOR] = 0
        counts = [len(table.weights) for table in tables]
        lengths = resolutions[:, Resolution.NUM_STEPS].copy()
        return cls(
            resolutions=torch.from_numpy(resolutions),
            is_weight=np.concatenate([table.weights.numpy() for table in tables]),
            is_cut=np.concatenate([table.is_cut.numpy() for table in tables]),
            # For tables of 2 and 3 trajectories, source is [0, 0, 1, 1, 1] and row [0, 1, 0, 1, 2].
            source=np.repeat(np.arange(len(tables)), counts),
            row=np.concatenate([np.arange(count) for count in counts]),
            lengths=lengths,
            starts=np.cumsum(lengths) - lengths,  # for lengths [2, 3] starts is [0, 2]
            num_tokens=int(lengths.sum()),
            has_neighbours=has_neighbours,
        )

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return len(self.lengths)

    @cached_property
    def item(self) -> np.ndarray:
        """Item of each trajectory, from 0: those of one group have one number. [n], int64."""
        numbers = self.resolutions[:, Resolution.SAMPLE_NUMBER].numpy()
        if not self.has_neighbours:
            return np.unique(numbers, return_inverse=True)[1].reshape(-1)
        return item_numbers(numbers, self.source)

    @property
    def num_items(self) -> int:
        return int(self.item.max(initial=-1)) + 1


def item_numbers(sample_numbers: np.ndarray, tables: np.ndarray | None = None) -> np.ndarray:
    """Return the number of each trajectory's item, from 0. [n], int64.

    Trajectories of one item are neighbours with equal sample numbers and, if `tables` are given, of
    one table: sample numbers [7, 7, 9] are the items [0, 0, 1].
    """
    is_first = np.ones(len(sample_numbers), bool)
    is_first[1:] = sample_numbers[1:] != sample_numbers[:-1]
    if tables is not None:
        is_first[1:] |= tables[1:] != tables[:-1]
    return np.cumsum(is_first) - 1
