"""Losses of TRL's GRPOTrainer at the places of packed micro batches.

Sources: TRL 1.16, `GRPOTrainer._compute_loss`, `get_gamma_weights` and `get_off_policy_mask`,
which name the papers. TRL computes them over padded rows [B, T]; here a row is a trajectory of a
pack, and means over rows are `MicroBatch.per_sequence`. Which mean of the token losses is trained
is a loss weight (`NORMALIZE`), not a part of these functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_gear.batching.micro_batch import MicroBatch

#: `gear.loss.normalize` of each `loss_type`; None: the constant `max_completion_length`.
NORMALIZE: dict[str, str | int | None] = {
    "dapo": "token",
    "cispo": "token",
    "vespo": "token",
    "grpo": "sequence",
    "sapo": "sequence",
    "dr_grpo": None,
    "luspo": 1,
}
_LOWEST_LOG = math.log(1e-8)
_HIGHEST_LOG = 20.0


@dataclass(frozen=True)
class GRPOLoss:
    """The loss of a GRPOConfig, by the options' names.

    Attributes:
        importance_sampling_level: "token", or "sequence", where a ratio is that of a response.
        epsilon_high: TRL's default of it, `epsilon`, is already applied.
    """

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    off_policy_mask_threshold: float | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @classmethod
    def of(cls, args: Any) -> GRPOLoss:
        """Return the loss of a GRPOConfig."""
        values = {name: getattr(args, name) for name in cls.__dataclass_fields__}
        if values["epsilon_high"] is None:
            values["epsilon_high"] = args.epsilon
        return cls(**values)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns with a value for each token that the loss reads, beside the advantage."""
        reads = {
            "old_logp": True,
            "is_ratio": True,
            "ref_logp": self.beta != 0,
            "sampling_logp": self.off_policy_mask_threshold is not None,
        }
        return tuple(name for name, is_read in reads.items() if is_read)

    def normalize(self, max_completion_length: int) -> str | dict[str, int]:
        """Return the option `gear.loss.normalize` for this loss."""
        name = NORMALIZE[self.loss_type]
        if isinstance(name, str):
            return name
        return {"constant": max_completion_length if name is None else name}

    def at_places(self, micro: MicroBatch, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each place, and the metrics that TRL logs as means.

        Args:
            micro: Has the fields advantage and `columns`; without sampling_logp, old_logp is that
                of sampling. NaN in old_logp: the policy has not changed since.
            logp: Log-probability of each place's target, with its gradient. [1, N], float32.
        Returns:
            The loss [1, N], and each metric [1, N] by TRL's name.
        """
        old = micro["old_logp"]
        old = torch.where(old.isnan(), logp.detach(), old)
        log_ratio = logp - old
        level = log_ratio
        if self.importance_sampling_level == "sequence":
            level = micro.per_sequence(log_ratio, "mean")
        ratio = level.exp()
        advantage = micro["advantage"]
        loss, metrics = self._policy_loss(micro, logp, log_ratio, ratio)
        if self.off_policy_mask_threshold is not None:
            # A token without a known log-probability, NaN, has no drift.
            sampling = micro.get("sampling_logp", old)
            drift = (sampling - logp).detach().nan_to_num(nan=0.0)
            drift = micro.per_sequence(drift, "mean")
            loss = loss * ((advantage >= 0) | (drift <= self.off_policy_mask_threshold))
        if self.loss_type != "vespo":  # whose weights have it already
            loss = loss * micro["is_ratio"]
        if self.beta != 0:
            difference = micro["ref_logp"] - logp
            kl = difference.exp() - difference - 1
            if self.use_bias_correction_kl:
                kl = kl * ratio
            metrics["kl"] = kl
            loss = loss + self.beta * kl
        return loss, metrics

    def _policy_loss(
        self, micro: MicroBatch, logp: Tensor, log_ratio: Tensor, ratio: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        advantage = micro["advantage"]
        if self.loss_type == "cispo":
            high = ratio > self.epsilon_high
            loss = -ratio.clamp(max=self.epsilon_high).detach() * advantage * logp
            return loss, {"cispo_clip_ratio": (high & (advantage > 0)).float()}
        if self.loss_type == "sapo":
            positive = torch.full_like(advantage, self.sapo_temperature_pos)
            temperature = torch.where(advantage > 0, positive, self.sapo_temperature_neg)
            gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
            return -gate * advantage, {}
        if self.loss_type == "vespo":
            phi = self._gamma_weights(micro, log_ratio.detach())
            return -phi * advantage * logp, {"vespo/phi_seq_mean": phi}
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon_high)
        loss = -torch.minimum(bounded * advantage, clipped * advantage)
        low = ((bounded < 1 - self.epsilon) & (advantage < 0)).float()
        high_clip = ((bounded > 1 + self.epsilon_high) & (advantage > 0)).float()
        metrics = {
            "clip_ratio/low_mean": low,
            "clip_ratio/high_mean": high_clip,
            "clip_ratio/region_mean": low + high_clip,
        }
        return loss, metrics

    def _gamma_weights(self, micro: MicroBatch, log_ratio: Tensor) -> Tensor:
        """Return VESPO's weight e^l w^k e^(-l w) of each place; w is the ratio of its response."""
        log_w = micro.per_sequence(log_ratio.clamp(-_HIGHEST_LOG, _HIGHEST_LOG), "sum")
        corrections = micro["is_ratio"].log().clamp(_LOWEST_LOG, _HIGHEST_LOG)
        log_w = log_w + micro.per_sequence(corrections, "sum")
        log_w = log_w.clamp(_LOWEST_LOG, _HIGHEST_LOG)
        is_positive = micro["advantage"] >= 0
        k = torch.where(is_positive, self.vespo_k_pos, self.vespo_k_neg)
        rate = torch.where(is_positive, self.vespo_lambda_pos, self.vespo_lambda_neg)
        rate = rate.clamp(min=1e-4)
        phi = (rate + k * log_w - rate * log_w.exp()).exp()
        return phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
