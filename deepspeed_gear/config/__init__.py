"""The `gear` section of ds_config.json: its options and all checks on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from deepspeed_gear.config.describe_options import translate
from deepspeed_gear.config.ds_config import batch_sizes as batch_sizes
from deepspeed_gear.config.ds_config import refuse_batch_sizes as refuse_batch_sizes
from deepspeed_gear.config.field_checks import ResolvedField as ResolvedField
from deepspeed_gear.config.field_checks import check_against as check_against
from deepspeed_gear.config.model import GearConfig as GearConfig
from deepspeed_gear.config.recipes import expand as expand
from deepspeed_gear.config.sampler_options import DrawingOptions as DrawingOptions
from deepspeed_gear.config.sampler_options import PriorityOptions as PriorityOptions
from deepspeed_gear.config.sampler_options import SamplerOptions as SamplerOptions
from deepspeed_gear.errors import ConfigError


def parse(section: Mapping[str, Any] | GearConfig) -> GearConfig:
    """Check the JSON object under `"gear"`; return the frozen config with all defaults.

    A GearConfig is returned unchanged.

    Raises:
        ConfigError: An option is unknown, wrong, or contradicts another.
    """
    if isinstance(section, GearConfig):
        return section
    if not isinstance(section, Mapping) or not all(isinstance(key, str) for key in section):
        raise ConfigError(
            "gear",
            "must be a JSON object",
            section,
            'write "gear": {"data": "path/of/the/data/set"}',
        )
    try:
        return GearConfig(**expand(section))
    except ValidationError as error:
        raise translate(GearConfig, error) from None
