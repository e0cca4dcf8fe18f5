"""Sampling from a window of the newest items."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_gear.config import RecentSampler
from deepspeed_gear.sampling.mass_rules import AgeWindow, MassRule
from deepspeed_gear.sampling.samplers.base import SamplerScope
from deepspeed_gear.sampling.samplers.uniform import RandomDraws


class Recent(RandomDraws):
    """Every item of a window of the newest ones with the same probability."""

    Options = RecentSampler
    options: RecentSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        within = self.options.within
        column, distance = (None, 0) if within is None else (within.column, within.distance)
        return replace(scope.admitted, window=AgeWindow(self.options.newest, column, distance))
