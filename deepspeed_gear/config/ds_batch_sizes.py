"""Batch sizes: those of ds_config (not by `elasticity`) or of the section, and micro batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed_gear.config.option_rules import Part
from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.errors import ConfigError

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


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


def check_elasticity(config: Mapping[str, Any]) -> None:
    """Refuse DeepSpeed's elastic training, which chooses batch sizes itself.

    Newer versions do not have it.
    """
    section = config.get("elasticity")
    if section is not None and (not isinstance(section, Mapping) or section.get("enabled", True)):
        rule = "must not be a section of the DeepSpeed config beside gear"
        remedy = "leave it out; torchrun --max-restarts starts ranks again, on any number of nodes"
        raise ConfigError("elasticity", rule, None, remedy)
