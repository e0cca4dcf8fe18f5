"""Sampling in proportion to length."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_gear.config import LengthSampler
from deepspeed_gear.sampling.mass_rules import MassRule
from deepspeed_gear.sampling.samplers.base import SamplerScope
from deepspeed_gear.sampling.samplers.uniform import RandomDraws


class Length(RandomDraws):
    """Trajectories in proportion to their number of steps."""

    Options = LengthSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        return replace(scope.admitted, by_length=True)
