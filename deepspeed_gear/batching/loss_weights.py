"""Loss weights: the factor of each token that makes the summed loss the intended mean.

With x the loss of a token, m its loss mask, and sums over the batch of one optimizer step, of all
ranks:

- token:     sum(m x) / sum(m)                               DAPO; verl's "token-mean"
- sequence:  1/S sum over s of (sum(m x) / sum(m) in s)      GRPO; verl's "seq-mean-token-mean"
- group:     1/G sum over g of (sum(m x) / sum(m) in g)      the mean over prompts
- constant:  1/S sum over s of (sum(m x) in s) / c           Dr. GRPO; verl's
  "seq-mean-token-sum-norm"

Weights are quotients of integers that are counted over the whole batch. So they do not depend on
ranks or packs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from deepspeed_gear.config.options import ConstantConfig, LossConfig


@dataclass
class GradientDivisor:
    """The number that the framework divides the sum of all ranks' gradients by.

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
