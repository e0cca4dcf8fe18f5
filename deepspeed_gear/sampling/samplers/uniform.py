"""Uniform sampling: every admitted item with the same probability; the base of all random draws."""

from __future__ import annotations

import torch

from deepspeed_gear.config import DrawingOptions, UniformSampler
from deepspeed_gear.sampling.mass_rules import MassRule
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


class Uniform(RandomDraws):
    """Every item with the same probability, independently, with replacement."""

    Options = UniformSampler


def stratify_(coordinates: torch.Tensor, total: int) -> None:
    """Move the j-th of B coordinates into the j-th of B equal parts: floor((j * total + c) / B), in place."""
    count = len(coordinates)
    whole, rest = divmod(total, count)
    j = torch.arange(count)
    torch.add(j * whole, (j * rest + coordinates) // count, out=coordinates)
