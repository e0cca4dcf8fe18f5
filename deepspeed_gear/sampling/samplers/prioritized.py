"""Prioritized sampling: in proportion to priority ** alpha, with importance weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deepspeed_gear.config import PrioritizedSampler, value_at
from deepspeed_gear.sampling.samplers.base import SamplerScope, SamplerSpec
from deepspeed_gear.sampling.samplers.uniform import RandomDraws


class Prioritized(RandomDraws):
    """Items in proportion to priority ** alpha.

    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016.
    """

    Options = PrioritizedSampler
    options: PrioritizedSampler

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        options = self.options
        alpha, every = schedule(options.alpha, "gear.sampler.alpha"), options.alpha_every

        def held(key: int) -> float:
            return alpha(key - key % every)

        beta = schedule(options.beta, "gear.sampler.beta")
        rule = scope.priority_rule(options.initial, held, beta, options.normalize)
        return replace(super().spec(scope), priorities=rule)


def schedule(value: Any, name: str) -> Callable[[int], float]:
    """Return a config's schedule as a function of the global batch.

    Args:
        value: A number or a schedule.
        name: Of the option, for errors.
    """
    if isinstance(value, (int, float)):
        constant = float(value)
        return lambda _: constant
    return lambda key: value_at(value, key, name)
