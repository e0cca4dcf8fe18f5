"""Samplers that take items in an order: of epochs, of age, of priority."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from deepspeed_gear.config.sampler_options import EpochSampler, FifoSampler, LifoSampler, TopKSampler
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


class Fifo(Sampler):
    """First in, first out: the oldest items, each once in a global batch, oldest first."""

    Options: ClassVar[type[Any]] = FifoSampler
    each_once = True

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        return SamplerSpec(scope.admitted, by_age=True)

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.oldest()


class Lifo(Fifo):
    """Last in, first out: the newest items, each once in a global batch, newest first."""

    Options = LifoSampler

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.newest()


class TopK(Sampler):
    """The items of highest priority, each once in a global batch; of equal ones those with the lowest id."""

    Options = TopKSampler
    options: TopKSampler
    each_once = True

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        rule = scope.priority_rule(self.options.initial)
        return SamplerSpec(scope.admitted, priorities=rule)

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.highest_priorities()
