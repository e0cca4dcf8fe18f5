"""The samplers, one class for each kind, and the registry that finds the class of a config.

The package's own samplers are registered here by their config model. Another sampler is named in the
config by "module:Class" and imported, on every rank: see docs/how-to/add-a-sampler.md.
"""

from __future__ import annotations

from typing import Any

from deepspeed_gear.config.sampler_options import ExternalSampler
from deepspeed_gear.config.schedules import imported
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.sampling.samplers.base import Sampler
from deepspeed_gear.sampling.samplers.ordered_samplers import Epoch, Fifo, Lifo, TopK
from deepspeed_gear.sampling.samplers.random_samplers import (
    Custom,
    Length,
    Prioritized,
    Recent,
    Uniform,
    Weighted,
)

SAMPLERS: dict[type[Any], type[Sampler]] = {
    sampler.Options: sampler
    for sampler in (Uniform, Length, Weighted, Custom, Recent, Prioritized, TopK, Epoch, Fifo, Lifo)
}


def sampler_for(config: Any) -> Sampler:
    """Return the sampler of its part of the config, of one table.

    Raises:
        ConfigError: A class from outside cannot be imported, or is no Sampler.
    """
    if not isinstance(config, ExternalSampler):
        return SAMPLERS[type(config)](config)
    found = imported(config.kind, "gear.sampler.kind")
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        raise ConfigError("gear.sampler.kind", "must name a subclass of Sampler", config.kind)
    return found(config.made_options)
