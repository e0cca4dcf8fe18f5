"""First in, first out, and last in, first out: the oldest or the newest items."""

from __future__ import annotations

import torch

from deepspeed_gear.config import FifoSampler, LifoSampler
from deepspeed_gear.sampling.samplers.base import Draw, Sampler, SamplerScope, SamplerSpec


class Fifo(Sampler):
    """The oldest items, each once in a global batch, oldest first."""

    Options = FifoSampler
    each_once = True

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        return SamplerSpec(scope.admitted, by_age=True)

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.oldest()


class Lifo(Sampler):
    """The newest items, each once in a global batch, newest first."""

    Options = LifoSampler
    each_once = True

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        return SamplerSpec(scope.admitted, by_age=True)

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.newest()
