"""The `gear` section of a ds_config, and the batch sizes that an engine takes from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.config.cross_checks import Part
from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.errors import ConfigError

_OF_DEEPSPEED = {"train_batch_size", "train_micro_batch_size_per_gpu", "optimizer", "zero_optimization"}
SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def read(config: Any) -> tuple[Any, dict[str, Any]]:
    """Return the gear section of a config, and the batch sizes of the ds_config around it.

    A config is a ds_config with a section `gear`, or the section alone: a mapping, or the path of a JSON
    file. Anything else is returned as it is.
    """
    if isinstance(config, (str, Path)):
        is_readable = ConfigError.on("config", "must be a readable file", OSError, value=str(config))
        with is_readable, ConfigError.on(f"config {config}", "must be JSON", ValueError):
            config = parse_json(Path(config).read_text())
    if not isinstance(config, Mapping):
        return config, {}
    if "gear" not in config:
        if config.keys() & _OF_DEEPSPEED and not config.keys() & {"data", "tables"}:
            remedy = 'add "gear": {"data": "path/of/the/data/set"}'
            raise ConfigError("the config", 'must have a section "gear"', ", ".join(config), remedy)
        return config, {}
    return config["gear"], {name: config[name] for name in SIZES if name in config}


def micro_and_accumulation(sizes: Mapping[str, Any], replicas: int) -> tuple[int, int]:
    """Return the samples of a micro batch, and the micro batches of a rank in a global batch, as an engine.

    `sizes` are those of `SIZES` that a ds_config has; ConfigError where they do not agree for the replicas.
    """
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ConfigError(name, "must be an integer >= 1 where there is no engine", value)
    batch, micro, steps = map(sizes.get, SIZES)
    if micro is None:
        if batch is None:
            raise ConfigError("train_micro_batch_size_per_gpu", "or train_batch_size must be given")
        micro = batch // replicas // (steps or 1)
    if steps is None:
        steps = 1 if batch is None or micro < 1 else batch // replicas // micro
    if micro < 1 or steps < 1 or batch not in (None, micro * steps * replicas):
        rule = f"must be micro batch * accumulation * replicas ({micro} * {steps} * {replicas})"
        remedy = "give train_micro_batch_size_per_gpu and gradient_accumulation_steps instead"
        raise ConfigError("train_batch_size", rule, batch, remedy)
    return micro, steps


def batch_sizes(config: GearOptions, replicas: int) -> tuple[int, int]:
    """Return the sizes of the micro batch and the global batch of a replay without an engine, in samples.

    ConfigError where neither is given, or they do not agree for this number of replicas.
    """
    steps = config.gradient_accumulation_steps
    parts = replicas * steps
    if config.batch_size is None:
        if config.micro_batch_size is None:
            remedy = "or micro_batch_size; train_batch_size in a ds_config"
            raise ConfigError("gear.batch_size", "must be given where there is no engine", None, remedy)
        return config.micro_batch_size, config.micro_batch_size * parts
    micro = config.micro_batch_size or config.batch_size // parts
    if micro * parts != config.batch_size:
        sizes = f"{config.micro_batch_size or 'any'} * {steps} * {replicas}"
        rule = f"must be micro_batch_size * gradient_accumulation_steps * ranks ({sizes})"
        remedy = "change one of them, or the number of ranks"
        raise ConfigError("gear.batch_size", rule, config.batch_size, remedy)
    return micro, config.batch_size


def refuse_batch_sizes(config: GearOptions) -> None:
    for option, of_the_engine in zip(("batch_size", "micro_batch_size", SIZES[2]), SIZES, strict=True):
        remedy = f"use {of_the_engine} of ds_config.json"
        Part("gear", config).leave_out(option, "with an engine or a ds_config", remedy)
