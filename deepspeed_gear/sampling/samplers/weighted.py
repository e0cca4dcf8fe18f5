"""Sampling in proportion to a column of weights."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_gear.config import WeightedSampler
from deepspeed_gear.sampling.mass_rules import MassRule, weight_bits
from deepspeed_gear.sampling.samplers.base import SamplerScope
from deepspeed_gear.sampling.samplers.uniform import RandomDraws


class Weighted(RandomDraws):
    """Trajectories, or their steps, in proportion to a given weight of the trajectory."""

    Options = WeightedSampler
    options: WeightedSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        column = self.options.weight
        return replace(scope.admitted, weight=(column, weight_bits(scope.total_weight(column))))
