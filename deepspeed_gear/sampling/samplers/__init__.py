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
from deepspeed_gear.sampling.samplers.custom import Custom
from deepspeed_gear.sampling.samplers.epoch import Epoch
from deepspeed_gear.sampling.samplers.fifo import Fifo, Lifo
from deepspeed_gear.sampling.samplers.length import Length
from deepspeed_gear.sampling.samplers.prioritized import Prioritized
from deepspeed_gear.sampling.samplers.recent import Recent
from deepspeed_gear.sampling.samplers.top_k import TopK
from deepspeed_gear.sampling.samplers.uniform import Uniform
from deepspeed_gear.sampling.samplers.weighted import Weighted

SAMPLERS: dict[type[Any], type[Sampler]] = {
    sampler.Options: sampler
    for sampler in (Uniform, Length, Weighted, Custom, Recent, Prioritized, TopK, Epoch, Fifo, Lifo)
}


def sampler_for(config: Any) -> Sampler:
    """Return the sampler of a config.

    Args:
        config: A sampler's part of the config, of one table.
    Raises:
        ConfigError: A class from outside cannot be imported, or is no Sampler.
    """
    if not isinstance(config, ExternalSampler):
        return SAMPLERS[type(config)](config)
    found = imported(config.kind, "gear.sampler.kind")
    if not (isinstance(found, type) and issubclass(found, Sampler)):
        raise ConfigError("gear.sampler.kind", "must name a subclass of Sampler", config.kind)
    return found(config.made_options)
