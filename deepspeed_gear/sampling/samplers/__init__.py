"""The samplers, one class for each kind, by config model; "module:Class" is imported on every rank
(docs/how-to/add-a-sampler.md).
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
    """Return a table's sampler; raise ConfigError where a class from outside cannot be used."""
    if not isinstance(config, ExternalSampler):
        return SAMPLERS[type(config)](config)
    found = imported(config.kind, "gear.sampler.kind")
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        raise ConfigError("gear.sampler.kind", "must name a subclass of Sampler", config.kind)
    return found(config.made_options)
