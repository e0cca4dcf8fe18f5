"""Epochs: every item once, in a random order for training, in stored order for an evaluation pass."""

from __future__ import annotations

import torch

from deepspeed_gear.config import EpochSampler
from deepspeed_gear.sampling.samplers.base import Draw, Sampler, SamplerScope, SamplerSpec


class Epoch(Sampler):
    """Every item once per epoch, in a random order keyed by the seed. New items join the next epoch."""

    Options = EpochSampler
    walks = True

    def __init__(self, options: EpochSampler) -> None:
        super().__init__(options)
        self.drops_tail = options.tail == "drop"

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        return SamplerSpec(scope.admitted)

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.permuted()


class EvaluationPass(Sampler):
    """Every item of a split once, in stored order, in each pass. Fillers repeat the first items."""

    walks = is_pass = True

    def __init__(self) -> None:
        super().__init__(None)

    @property
    def kind(self) -> str:
        return "pass"

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        return SamplerSpec(scope.admitted)

    def sample(self, draw: Draw) -> torch.Tensor:
        return torch.arange(draw.at, draw.at + draw.count)
