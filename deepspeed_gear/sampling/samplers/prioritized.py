"""Prioritized sampling: in proportion to priority ** alpha, with importance weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deepspeed_gear.config import PrioritizedSampler, value_at
from deepspeed_gear.sampling.mass_rules import PriorityRule
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
        rule = PriorityRule(
            alpha=alpha if every == 1 else lambda key: alpha(key - key % every),
            beta=schedule(options.beta, "gear.sampler.beta"),
            initial=options.initial,
            normalize=options.normalize,
            lag=scope.prefetch,
            log_size=scope.max_waiting_updates,
            most_bits=scope.max_mass_bits,
        )
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
