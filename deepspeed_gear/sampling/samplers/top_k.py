"""Top-k sampling: the items of highest priority."""

from __future__ import annotations

import torch

from deepspeed_gear.config import TopKSampler
from deepspeed_gear.sampling.samplers.base import Draw, Sampler, SamplerScope, SamplerSpec


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
