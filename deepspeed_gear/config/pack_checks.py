"""Checks of the options of packed batches against the other options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from deepspeed_gear.config.pack_options import LossConfig, PackConfig
from deepspeed_gear.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_gear.config.options import GearOptions


def room(pack: PackConfig) -> int:
    """Return the most steps of trajectories in a micro batch, whose length is a multiple."""
    return pack.tokens // pack.pad.multiple * pack.pad.multiple


def check_pack(config: GearOptions) -> None:
    """Reject options that do not suit packed batches, and those of packed batches without `gear.pack`.

    Raises:
        ConfigError: Two options conflict, or one needs another that is missing.
    """
    if config.pack is None:
        for option, given in (
            ("batch", config.batch),
            ("rollout", config.rollout),
            ("loss", None if config.loss == LossConfig() else config.loss),
        ):
            if given is not None:
                rule = "must not be given without gear.pack"
                raise ConfigError(
                    f"gear.{option}", rule, None, 'give "pack": {"tokens": ...}, or leave it out'
                )
        if config.item_sampler.unit == "group":
            rule = 'must be given where gear.sampler.unit is "group"'
            remedy = 'give "pack": {"tokens": ...} and "batch": {"groups": ...}'
            raise ConfigError("gear.pack", rule, None, remedy)
        return
    _check_length(config, config.pack)
    _check_others(config)
    _check_size(config)
    for name, field in config.fields.items():
        at = f"gear.fields.{name}"
        for option, value, only in (
            ("length", field.length, None),
            ("align", field.align, "in_place"),
            ("hindsight", field.hindsight, None),
        ):
            if value != only:
                raise ConfigError(f"{at}.{option}", "must not be given with gear.pack", value, _WHOLE)
        if field.offset == "n_step" or field.pad == "edge" or field.derived == "position":
            option = "offset" if field.offset == "n_step" else "pad" if field.pad == "edge" else "derived"
            raise ConfigError(
                f"{at}.{option}", "must be another one with gear.pack", getattr(field, option), _WHOLE
            )


SPLITS = 'evaluate on a data set of its own, with another Replay: "sampler": {"kind": "epoch"}'
_WHOLE = "a pack holds every step of its trajectories"


def _check_length(config: GearOptions, pack: PackConfig) -> None:
    if room(pack) == 0:
        rule = f"must be at least gear.pack.pad.multiple ({pack.pad.multiple})"
        raise ConfigError("gear.pack.tokens", rule, pack.tokens, "raise it, or lower the multiple")
    if pack.too_long == "truncate":
        return
    for name in config.sampled_tables:
        table = config.resolved_tables[name]
        if table.data is None and (table.max_length is None or table.max_length > room(pack)):
            raise ConfigError(
                f"gear.tables.{name}.max_length",
                f"must be at most {room(pack)}, what gear.pack.tokens leaves for a trajectory",
                table.max_length,
                'give it, so that longer ones are refused when they are added, or "too_long": "truncate"',
            )


def _check_others(config: GearOptions) -> None:
    for option, value, default in (
        ("n_step", config.n_step, None),
        ("burn_in", config.burn_in, 0),
        ("hindsight", config.hindsight, None),
        ("pipeline", config.pipeline, None),
        ("prefetch", config.prefetch, 0),
        ("batch_size", config.batch_size, None),
        ("micro_batch_size", config.micro_batch_size, None),
        ("gradient_accumulation_steps", config.gradient_accumulation_steps, 1),
        ("verify_every", config.verify_every, 0),
    ):
        if value != default:
            remedy = "give the size as gear.batch or gear.rollout" if "batch" in option else "leave it out"
            raise ConfigError(f"gear.{option}", "must not be given with gear.pack", value, remedy)
    sampler = config.item_sampler
    if sampler.unit == "step":
        rule = 'must be "trajectory" or "group" with gear.pack'
        raise ConfigError("gear.sampler.unit", rule, sampler.unit, _WHOLE)
    if sampler.anchors != "all":
        raise ConfigError("gear.sampler.anchors", 'must be "all" with gear.pack', sampler.anchors, _WHOLE)
    for name in config.sampled_tables:
        data = config.resolved_tables[name].data
        if data is not None and data.split:
            at = "gear.data.split" if config.data is not None else f"gear.tables.{name}.data.split"
            raise ConfigError(at, "must not be given with gear.pack", data.split, SPLITS)
    if config.on_device:
        at = f"gear.tables.{config.sampled_tables[0]}.placement"
        raise ConfigError(at, 'must be "host" with gear.pack', "device")


def _check_size(config: GearOptions) -> None:
    if (config.batch is None) == (config.rollout is None):
        given = None if config.batch is None else "both"
        remedy = '"batch": {"trajectories": 256}, or "rollout" for several optimizer steps over one batch'
        raise ConfigError(
            "gear.batch", "or gear.rollout, one of them, must be given with gear.pack", given, remedy
        )
    size = config.rollout_size
    assert size is not None
    at = "gear.batch" if config.batch is not None else "gear.rollout"
    wanted = {"group": "groups", "trajectory": "trajectories"}[config.item_sampler.unit]
    if size.unit != wanted:
        rule = f'must be in {wanted} where gear.sampler.unit is "{config.item_sampler.unit}"'
        raise ConfigError(at, rule, f"{size.size} {size.unit}", "change one of them")
    if size.minibatches > size.size:
        rule = f"must be at most the items of the batch ({size.size})"
        raise ConfigError(f"{at}.minibatches", rule, size.minibatches, "a minibatch has one item at least")
    needs_groups = config.loss.normalize == "group" or config.loss.by == "member"
    if needs_groups and config.item_sampler.unit != "group":
        option = "normalize" if config.loss.normalize == "group" else "by"
        rule = 'must be another one where gear.sampler.unit is not "group"'
        raise ConfigError(f"gear.loss.{option}", rule, getattr(config.loss, option), "sample groups")


def check_lengths(config: GearOptions, longest: Mapping[str, int]) -> None:
    """Reject a data set with trajectories that no pack can hold.

    Args:
        config: The config.
        longest: Steps of the longest trajectory of each data set, by table.
    Raises:
        ConfigError: One is longer than a micro batch.
    """
    if config.pack is None or config.pack.too_long == "truncate":
        return
    for name in config.sampled_tables:
        if longest.get(name, 0) > room(config.pack):
            raise ConfigError(
                "gear.pack.tokens",
                f"must hold the longest trajectory of table {name} ({longest[name]} steps)",
                config.pack.tokens,
                'raise it, or set "too_long": "truncate"',
            )


def check_ranks(config: GearOptions, replicas: int, sequence: int, stages: int) -> None:
    """Reject a plan width, a multiple or a grid that packed batches do not suit.

    Args:
        config: The config.
        replicas: Ranks that train on different samples.
        sequence: Ranks that share a sequence.
        stages: Of a pipeline.
    Raises:
        ConfigError: One does not suit them.
    """
    pack = config.pack
    if pack is None:
        return
    if pack.plan_width is not None and pack.plan_width % replicas:
        rule = f"must be a multiple of the replicas ({replicas})"
        raise ConfigError("gear.pack.plan_width", rule, pack.plan_width, "change it, or the number of ranks")
    if pack.pad.multiple % sequence:
        rule = f"must be a multiple of the sequence ranks ({sequence})"
        raise ConfigError(
            "gear.pack.pad.multiple", rule, pack.pad.multiple, "each of them gets an equal slice"
        )
    if stages > 1:
        remedy = "a pipeline's schedule has a fixed number of micro batches of one shape: use windows"
        raise ConfigError("gear.pack", "must not be given where the model is a pipeline", None, remedy)
