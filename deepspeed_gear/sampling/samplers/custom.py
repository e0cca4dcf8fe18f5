"""Sampling from masses that a program's own class computes."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_gear.config import CustomSampler
from deepspeed_gear.config.schedules import imported
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.mass_rules import CustomMasses, MassRule
from deepspeed_gear.sampling.samplers.base import SamplerScope
from deepspeed_gear.sampling.samplers.uniform import RandomDraws


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
