"""The samplers: uniform, length, weighted, custom, recent, prioritized, top-k, epoch, fifo, lifo.

Each kind is a class, found by its config model; "module:Class" is imported on every rank
(docs/how-to/add-a-sampler.md). The random ones draw from masses of their own; the others take items
in order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

import deepspeed_gear.config.sampler_options as models
from deepspeed_gear.config import DrawingOptions
from deepspeed_gear.config.schedules import imported, value_at
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.mass_rules import AgeWindow, CustomMasses, Decay, MassRule, weight_bits
from deepspeed_gear.sampling.samplers.base import (
    Draw,
    NativeDraw,
    Sampler,
    SamplerScope,
    SamplerSpec,
)


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
    """Move the j-th of B coordinates into the j-th of B equal parts: floor((j * total + c) / B), in
    place.
    """
    count = len(coordinates)
    whole, rest = divmod(total, count)
    j = torch.arange(count)
    torch.add(j * whole, (j * rest + coordinates) // count, out=coordinates)


class Uniform(RandomDraws):
    """Every item with the same probability, independently, with replacement."""

    Options = models.UniformSampler


class Length(RandomDraws):
    """Trajectories in proportion to their number of steps."""

    Options = models.LengthSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        return replace(scope.admitted, by_length=True)


class Weighted(RandomDraws):
    """Trajectories, or their steps, in proportion to a given weight of the trajectory."""

    Options = models.WeightedSampler
    options: models.WeightedSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        return replace(
            scope.admitted, weight=(self.options.weight, weight_bits(scope.total_weight))
        )


class Custom(RandomDraws):
    """Trajectories in proportion to integer masses from a program's own class."""

    Options = models.CustomSampler
    options: models.CustomSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        """Return the masses. Raises: ConfigError: The class cannot be imported or instantiated."""
        made = imported(self.options.masses, "gear.sampler.masses")
        rule = f"must make a {self.options.masses}"
        given = self.options.options
        with ConfigError.on(
            "gear.sampler.options",
            rule,
            Exception,
            value=given,
            remedy="give the arguments that the class takes",
        ):
            masses: CustomMasses = made(**given)
        return replace(scope.admitted, custom=masses)


class Recent(RandomDraws):
    """Every item of a window of the newest ones with the same probability."""

    Options = models.RecentSampler
    options: models.RecentSampler

    def mass_rule(self, scope: SamplerScope) -> MassRule:
        within = self.options.within
        column, distance = (None, 0) if within is None else (within.column, within.distance)
        return replace(scope.admitted, window=AgeWindow(self.options.newest, column, distance))


class Prioritized(RandomDraws):
    """Items in proportion to priority ** alpha, with importance weights.

    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016.
    """

    Options = models.PrioritizedSampler
    options: models.PrioritizedSampler

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        options = self.options
        alpha = schedule(options.alpha, "gear.sampler.alpha")
        every = options.alpha_every

        def held(number: int) -> float:
            return alpha(number - number % every)

        beta = schedule(options.beta, "gear.sampler.beta")
        rule = scope.priority_rule(options.initial, held, beta, options.normalize)
        decay = None if options.decay is None else Decay(options.decay)
        return replace(super().spec(scope), priorities=replace(rule, decay=decay))


class Epoch(Sampler):
    """Every item once per epoch, in a random order keyed by the seed. New items join the next
    epoch.
    """

    Options = models.EpochSampler
    walks = True

    def __init__(self, options: models.EpochSampler) -> None:
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
        super().__init__(SimpleNamespace(kind="pass"))

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        return SamplerSpec(scope.admitted)

    def sample(self, draw: Draw) -> torch.Tensor:
        return torch.arange(draw.at, draw.at + draw.count)


class Fifo(Sampler):
    """First in, first out: the oldest items, each once in a global batch, oldest first."""

    Options: ClassVar[type[Any]] = models.FifoSampler
    each_once = True

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        return SamplerSpec(scope.admitted, by_age=True)

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.oldest()


class Lifo(Fifo):
    """Last in, first out: the newest items, each once in a global batch, newest first."""

    Options = models.LifoSampler

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.newest()


class TopK(Sampler):
    """The items of highest priority, each once in a global batch; of equal ones those with the
    lowest id.
    """

    Options = models.TopKSampler
    options: models.TopKSampler
    each_once = True

    def spec(self, scope: SamplerScope) -> SamplerSpec:
        return SamplerSpec(scope.admitted, priorities=scope.priority_rule(self.options.initial))

    def sample(self, draw: Draw) -> torch.Tensor:
        return draw.highest_priorities()


SAMPLERS: dict[type[Any], type[Sampler]] = {
    sampler.Options: sampler
    for sampler in (Uniform, Length, Weighted, Custom, Recent, Prioritized, TopK, Epoch, Fifo, Lifo)
}


def sampler_for(config: Any) -> Sampler:
    """Return a table's sampler; raise ConfigError where a class from outside cannot be used."""
    if not isinstance(config, models.ExternalSampler):
        return SAMPLERS[type(config)](config)
    sampler_type = imported(config.kind, "gear.sampler.kind")
    if not (isinstance(sampler_type, type) and issubclass(sampler_type, Sampler)):
        raise ConfigError(
            "gear.sampler.kind",
            "must name a subclass of Sampler",
            config.kind,
            "derive the class from deepspeed_gear.sampling.samplers.base.Sampler",
        )
    return sampler_type(config.made_options)


def schedule(value: Any, name: str) -> Callable[[int], float]:
    """Return a number, or a config's schedule, as a function of the global batch."""
    if isinstance(value, (int, float)):
        constant = float(value)
        return lambda _: constant
    return lambda number: value_at(value, number, name)
