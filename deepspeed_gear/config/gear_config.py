"""Reading the `gear` section: ds_config around it, recipe, unknown options, defaults, checks.

`parse` expands the recipe (`recipes.py`), and pydantic fills in defaults (`options.py`). Errors of
single options, such as unknown ones, are made in `option_errors.py`; rules between options are in
`cross_checks.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.config.cross_checks import check_options
from deepspeed_gear.config.ds_batch_sizes import SIZES
from deepspeed_gear.config.option_errors import config_error
from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.config.recipes import expand
from deepspeed_gear.errors import ConfigError

# Options that only the config of DeepSpeed has: a mapping with one of them is no gear section.
_OF_DEEPSPEED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "optimizer",
    "zero_optimization",
}


class GearConfig(GearOptions):
    """The `gear` section of ds_config.json."""

    @model_validator(mode="after")
    def _check_options(self) -> GearConfig:
        check_options(self)
        return self


def load(config: Any) -> Any:
    """Return the content of a JSON file, given its path; anything else is returned unchanged."""
    if not isinstance(config, (str, Path)):
        return config
    is_readable = ConfigError.on(
        "config",
        "must be a readable file",
        OSError,
        remedy="give the path of a DeepSpeed config, or the config as a dict",
    )
    is_json = ConfigError.on(
        f"config {config}", "must be JSON", ValueError, remedy="correct the file"
    )
    with is_readable, is_json:
        return parse_json(Path(config).read_text(encoding="utf-8"), object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; ValueError if a key occurs twice, since one would be ignored."""
    if twice := [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]:
        raise ValueError(f"{twice[0]!r} is given twice in one object")
    return dict(pairs)


def read(config: Any) -> tuple[Any, dict[str, Any]]:
    """Return the gear section of a config, and the batch sizes of the ds_config around it.

    Args:
        config: A ds_config with a section `gear`, or the section alone; a mapping, or the path of a
            JSON file. Anything else is returned unchanged, without sizes.
    """
    config = load(config)
    if not isinstance(config, Mapping):
        return config, {}
    if "gear" not in config:
        if config.keys() & _OF_DEEPSPEED and not config.keys() & {"data", "tables"}:
            raise ConfigError(
                "the config",
                'must have a section "gear"',
                ", ".join(config),
                'add "gear": {"data": "path/of/the/data/set"}',
            )
        return config, {}
    return config["gear"], {name: config[name] for name in SIZES if name in config}


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
        raise config_error(GearConfig, error) from None
