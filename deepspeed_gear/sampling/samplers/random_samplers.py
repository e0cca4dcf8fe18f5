"""Samplers that draw items at random, each from its own masses; uniform sampling is the base of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from deepspeed_gear.config import DrawingOptions
from deepspeed_gear.config.sampler_options import (
    CustomSampler,
    LengthSampler,
    PrioritizedSampler,
    RecentSampler,
    UniformSampler,
    WeightedSampler,
)
from deepspeed_gear.config.schedules import imported, value_at
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.mass_rules import AgeWindow, CustomMasses, MassRule, weight_bits
from deepspeed_gear.sampling.samplers.base import Draw, NativeDraw, Sampler, SamplerScope, SamplerSpec


class RandomDraws(Sampler):
    """Independent draws from the masses, or stratified ones; a subclass defines the masses."""

    options: DrawingOptions

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        """Return the masses of the items."""
        return scope.admitted

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        native = NativeDraw.STRATIFIED if self.options.stratified else NativeDraw.RANDOM
        return SamplerSpec(self.mass_rule(scope), native)

    def sample(self, draw: Draw) -> torch.Tensor:
        coordinates = draw.random()
        if self.options.stratified:
            stratify_(coordinates, draw.total)
        return coordinates


def stratify_(coordinates: torch.Tensor, total: int) -> None:
    """Move the j-th of B coordinates into the j-th of B equal parts: floor((j * total + c) / B), in place."""
    count = len(coordinates)
    whole, rest = divmod(total, count)
    j = torch.arange(count)
    torch.add(j * whole, (j * rest + coordinates) // count, out=coordinates)


class Uniform(RandomDraws):
    """Every item with the same probability, independently, with replacement."""

    Options = UniformSampler


class Length(RandomDraws):
    """Trajectories in proportion to their number of steps."""

    Options = LengthSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        return replace(scope.admitted, by_length=True)


class Weighted(RandomDraws):
    """Trajectories, or their steps, in proportion to a given weight of the trajectory."""

    Options = WeightedSampler
    options: WeightedSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        return replace(scope.admitted, weight=(self.options.weight, weight_bits(scope.total_weight)))


class Custom(RandomDraws):
    """Trajectories in proportion to integer masses from a program's own class."""

    Options = CustomSampler
    options: CustomSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        """Return the masses. Raises: ConfigError: The class cannot be imported or instantiated."""
        made = imported(self.options.masses, "gear.sampler.masses")
        try:
            masses: CustomMasses = made(**self.options.options)
        except Exception as error:
            raise ConfigError(
                "gear.sampler.options", f"must make a {self.options.masses}", self.options.options, str(error)
            ) from error
        return replace(scope.admitted, custom=masses)


class Recent(RandomDraws):
    """Every item of a window of the newest ones with the same probability."""

    Options = RecentSampler
    options: RecentSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        within = self.options.within
        column, distance = (None, 0) if within is None else (within.column, within.distance)
        return replace(scope.admitted, window=AgeWindow(self.options.newest, column, distance))


class Prioritized(RandomDraws):
    """Items in proportion to priority ** alpha, with importance weights.

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
    """Return a number, or a config's schedule, as a function of the global batch."""
    if isinstance(value, (int, float)):
        constant = float(value)
        return lambda _: constant
    return lambda key: value_at(value, key, name)
