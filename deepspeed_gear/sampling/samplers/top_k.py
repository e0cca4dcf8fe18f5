"""Top-k sampling: the items of highest priority."""

from __future__ import annotations

import torch

from deepspeed_gear.config import TopKSampler
from deepspeed_gear.sampling.mass_rules import PriorityRule
from deepspeed_gear.sampling.samplers.base import Draw, Sampler, SamplerScope, SamplerSpec


class TopK(Sampler):
    """The items of highest priority, each once in a global batch; of equal ones those with the lowest id."""

    Options = TopKSampler
    options: TopKSampler
    each_once = True

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        rule = PriorityRule(
            alpha=lambda _: 1.0,
            beta=lambda _: 0.0,
            initial=self.options.initial,
            normalize=None,
            lag=scope.prefetch,
            log_size=scope.max_waiting_updates,
            most_bits=scope.max_mass_bits,
        )
        return SamplerSpec(scope.admitted, priorities=rule)

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.highest_priorities()
