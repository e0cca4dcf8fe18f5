"""The `gear` section of ds_config.json: its options and all checks on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deepspeed_gear.config.config_digest import difference
from deepspeed_gear.config.ds_config import batch_sizes, refuse_batch_sizes
from deepspeed_gear.config.error_messages import translate
from deepspeed_gear.config.field_checks import ResolvedField, check_against
from deepspeed_gear.config.model import GearConfig
from deepspeed_gear.config.options import FieldConfig, NStepConfig, PipelineConfig
from deepspeed_gear.config.sampler_options import (
    CustomSampler,
    DrawingOptions,
    EpochSampler,
    EveryConfig,
    FifoSampler,
    LengthSampler,
    LifoSampler,
    MixtureSampler,
    PrioritizedSampler,
    PriorityOptions,
    RecentSampler,
    SamplerOptions,
    TopKSampler,
    UniformSampler,
    WeightedSampler,
)
from deepspeed_gear.config.schedules import value_at
from deepspeed_gear.config.table_options import TableConfig
from deepspeed_gear.errors import ConfigError

__all__ = [
    "CustomSampler",
    "EpochSampler",
    "EveryConfig",
    "FieldConfig",
    "FifoSampler",
    "GearConfig",
    "LengthSampler",
    "LifoSampler",
    "MixtureSampler",
    "NStepConfig",
    "PipelineConfig",
    "PrioritizedSampler",
    "PriorityOptions",
    "RecentSampler",
    "ResolvedField",
    "SamplerOptions",
    "DrawingOptions",
    "TableConfig",
    "TopKSampler",
    "UniformSampler",
    "WeightedSampler",
    "batch_sizes",
    "check_against",
    "difference",
    "parse",
    "refuse_batch_sizes",
    "value_at",
]


def parse(section: Mapping[str, Any] | GearConfig) -> GearConfig:
    """Check a `gear` section.

    Args:
        section: The JSON object under `"gear"`; a GearConfig is returned as it is.
    Returns:
        The frozen config, defaults filled in.
    Raises:
        ConfigError: An option is unknown, of a wrong type or value, or contradicts another.
    """
    if isinstance(section, GearConfig):
        return section
    if not isinstance(section, Mapping) or not all(isinstance(key, str) for key in section):
        raise ConfigError(
            "gear", "must be a JSON object", section, 'write "gear": {"data": "path/of/the/data/set"}'
        )
    try:
        return GearConfig(**section)
    except ValidationError as error:
        raise translate(GearConfig, error) from None
