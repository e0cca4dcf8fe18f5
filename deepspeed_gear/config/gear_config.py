"""The `gear` section of ds_config.json: read and parsed, with the batch sizes around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.config.cross_checks import check_options
from deepspeed_gear.config.option_errors import translate
from deepspeed_gear.config.option_rules import Part
from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.config.recipes import expand
from deepspeed_gear.config.resume_options import batch_options, sha256, shared_options
from deepspeed_gear.errors import ConfigError

# Options that only the config of DeepSpeed has: a mapping with one of them is no gear section.
_OF_DEEPSPEED = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "optimizer",
    "zero_optimization",
}
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


class GearConfig(GearOptions):
    """The `gear` section of ds_config.json."""

    @model_validator(mode="after")
    def _check_options(self) -> GearConfig:
        check_options(self)
        return self

    @property
    def digest(self) -> str:
        """SHA-256 of the options that must be the same on all ranks, in hex."""
        return sha256(shared_options(self))

    @property
    def resume_digest(self) -> str:
        """SHA-256 of the options that decide the samples of a global batch, in hex.

        A checkpoint fits a run with an equal one.
        """
        return sha256(batch_options(self))


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
        raise translate(GearConfig, error) from None


def batch_sizes(config: GearOptions, given: Mapping[str, Any], replicas: int) -> tuple[int, int]:
    """Return the samples of a micro batch, and the micro batches per rank of a global batch.

    Args:
        given: The sizes among `SIZES` in a ds_config around the section. If there are none, the
            section's own options count.
    Raises:
        ConfigError: They contradict each other for this number of replicas.
    """
    names = SIZES
    if not given:
        names = ("gear.batch_size", "gear.micro_batch_size", "gear.gradient_accumulation_steps")
        options = {name: getattr(config, name.removeprefix("gear.")) for name in names}
        given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise ConfigError(
                name,
                "must be an integer >= 1 where there is no engine",
                value,
                "give a positive integer, or let DeepSpeed's initialize resolve it",
            )
    # batch = micro * steps * replicas; those that are not given follow from the others.
    batch, micro, steps = map(given.get, names)
    if micro is None:
        if batch is None:
            raise ConfigError(
                names[0], "must be given where there is no engine", None, f"or {names[1]}"
            )
        micro = batch // replicas // (steps or 1)
    if steps is None:
        steps = 1 if batch is None or micro < 1 else batch // replicas // micro
    if micro < 1 or steps < 1 or batch not in (None, micro * steps * replicas):
        raise ConfigError(
            names[0],
            f"must be {names[1]} * {names[2]} * replicas ({micro} * {steps} * {replicas})",
            batch,
            "change one of them, or the number of ranks",
        )
    return micro, steps


def refuse_batch_sizes(config: GearOptions) -> None:
    """Reject the section's batch sizes where an engine or a ds_config gives them."""
    for option, of_the_engine in zip(
        ("batch_size", "micro_batch_size", SIZES[2]), SIZES, strict=True
    ):
        Part("gear", config).leave_out(
            option, "with an engine or a ds_config", f"use {of_the_engine} of ds_config.json"
        )
