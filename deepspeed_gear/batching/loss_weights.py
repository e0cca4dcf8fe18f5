"""Loss weights: factors of tokens that make the summed loss the intended mean.

With x the loss of a token, m its loss mask, and sums over the batch of one optimizer step, of all
ranks:

- token:     sum(m x) / sum(m)                               DAPO; verl's "token-mean"
- sequence:  1/S sum over s of (sum(m x) / sum(m) in s)      GRPO; verl's "seq-mean-token-mean"
- group:     1/G sum over g of (sum(m x) / sum(m) in g)      the mean over prompts
- constant:  1/S sum over s of (sum(m x) in s) / c           Dr. GRPO; verl's
  "seq-mean-token-sum-norm"

With `loss.by_table` the loss is the sum of weighted means, each over the trajectories of one table.

Weights are quotients of integers that are counted over the whole batch. So they do not depend on
ranks or packs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from deepspeed_gear.batching.pack_rows import PackShape
from deepspeed_gear.config.options import ConstantConfig, LossConfig
from deepspeed_gear.distributed.sequence_sum import SequenceSum


@dataclass
class GradientDivisor:
    """Number by which the framework divides the sum of all ranks' gradients.

    Losses are multiplied by it. A replay owns one; micro batches read it when they compute a loss,
    so that a model may be set until then.
    """

    value: float

    def set(self, value: float) -> None:
        self.value = value


class StepLoss(NamedTuple):
    """Loss tokens and loss weights of one optimizer step, over all ranks."""

    num_tokens: int  # loss tokens
    # Weight of each loss token of a trajectory, for the whole rollout batch. [n], float64.
    weights: np.ndarray


def loss_weights(
    options: LossConfig, counts: np.ndarray, sequences: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """Return the weight of each trajectory's loss tokens, 0 where it has none. [n], float64.

    Args:
        options: The section `gear.loss`.
        counts: Loss tokens of each trajectory. [n], int64.
        sequences: Sequence of each trajectory, any numbers. [n], int64.
        groups: Group of each trajectory, any numbers. [n], int64.
    """
    if options.normalize == "token":
        return np.where(counts > 0, 1.0 / max(int(counts.sum()), 1), 0.0)
    _, owner = np.unique(groups if options.normalize == "group" else sequences, return_inverse=True)
    owner = owner.reshape(-1)
    tokens = np.bincount(owner, counts).astype(np.int64)  # exact: counts are below 2^53
    units = len(tokens) if options.count_masked else int((tokens > 0).sum())
    if isinstance(options.normalize, ConstantConfig):
        shares = np.full(len(counts), 1.0 / (max(units, 1) * options.normalize.constant))
    else:
        shares = 1.0 / (max(units, 1) * np.maximum(tokens, 1)[owner].astype(np.float64))
    return np.where(counts > 0, shares, 0.0)


def table_loss_weights(
    parts: Sequence[tuple[float, LossConfig]],
    counts: np.ndarray,
    sequences: np.ndarray,
    groups: np.ndarray,
    tables: np.ndarray,
) -> np.ndarray:
    """Return as `loss_weights`, for a sum of weighted means by table. [n], float64.

    Args:
        parts: Weight and mean of each table.
        counts: As `loss_weights`.
        sequences: As `loss_weights`.
        groups: As `loss_weights`.
        tables: Table of each trajectory, an index of `parts`. [n], int64.
    """
    weights: np.ndarray = np.zeros(len(counts))
    for table, (factor, options) in enumerate(parts):
        own = np.flatnonzero(tables == table)
        weights[own] = factor * loss_weights(options, counts[own], sequences[own], groups[own])
    return weights


class PlannedStep(Protocol):
    """Packs of one optimizer step."""

    @property
    def loss(self) -> StepLoss:
        """The loss of the step, counted when first read: filling a table's columns needs none."""


@dataclass
class PackLoss:
    """Loss mask and loss weights of a pack: its part in the loss of its optimizer step."""

    host_mask: torch.Tensor  # which places of this rank count. [1, rows], bool, in host memory
    mask: torch.Tensor  # the same, on the device
    shape: PackShape
    index: np.ndarray  # trajectories of the pack, as indices into the rollout batch. [S], int64
    step: PlannedStep
    divisor: GradientDivisor
    ranks: SequenceSum | None = None  # None: this rank has whole sequences
    # What a sequence of the loss is: a trajectory, or all those of one member of a group.
    by: Literal["trajectory", "member"] = "trajectory"

    @cached_property
    def weights(self) -> torch.Tensor:
        """Weight of each place without the divisor, 0 outside of the mask. [rows], float32."""
        own = self.step.loss.weights[self.index].astype(np.float32)
        weights = torch.from_numpy(self.shape.spread(own))
        return weights.mul_(self.host_mask[0]).to(self.mask.device)

    @cached_property
    def share(self) -> float:
        """Fraction of the step's loss tokens that lie at this rank's places."""
        return int(np.count_nonzero(self.host_mask.numpy())) / max(self.step.loss.num_tokens, 1)
