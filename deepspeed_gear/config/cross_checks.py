"""Cross-checks of options that need or exclude one another: samplers, fields, packs, burn-in.

`check_options` runs when a section is parsed; `check_lengths` and `check_ranks` run later, once
data sets and topology are known.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed_gear.config.device_checks import check_device_batches
from deepspeed_gear.config.field_names import check_field_names
from deepspeed_gear.config.option_rules import Part
from deepspeed_gear.config.options import FieldConfig, GearOptions, PackConfig
from deepspeed_gear.config.sampler_options import AnchorsConfig, MixtureSampler
from deepspeed_gear.config.table_checks import check_table
from deepspeed_gear.config.types import dotted
from deepspeed_gear.errors import ConfigError, known_names

# Suffixes that a checkpoint adds to the name of a table's folder, and the other file beside it.
_NOT_OF_TABLES = (".partial", ".old", ".older", "position.json")
_WHOLE = "a pack holds every step of its trajectories"
GOAL_EXAMPLE = '"goal": {"column": "desired_goal", "hindsight": "achieved_goal"}'


def check_options(config: GearOptions) -> None:
    """Raise ConfigError if two options conflict, or one lacks another that it needs."""
    part = Part("gear", config)
    if config.tables:
        part.leave_out(
            "data",
            "together with gear.tables",
            'write the data set as an entry of gear.tables: {"main": {"data": ...}}',
        )
    elif config.data is None:
        part.refuse(
            "data", "or gear.tables must be given", "name the folder that `gear ingest` wrote"
        )
    _check_names(config)
    for name, table in config.resolved_tables.items():
        check_table(config, name, table)
    if config.shared_memory.keep and all(
        one.prompts is None for one in config.resolved_tables.values()
    ):
        Part("gear.shared_memory", config.shared_memory).refuse(
            "keep", "must not be true without a table with prompts", "give tables.<name>.prompts"
        )
    media = [
        one
        for name in config.sampled_tables
        if (one := config.resolved_tables[name].media) is not None
    ]
    part.require(
        all(one.columns == media[0].columns for one in media),
        "tables",
        "must have equal media.columns in all tables of a mixture",
        "an item may have no rows of a column: give all tables the columns of all",
    )
    _check_sampler(config)
    if config.on_device:
        check_device_batches(config)
    for name, field in config.fields.items():
        _check_field(config, name, field, Part(dotted("gear", "fields", name), field))
    part.require(
        config.hindsight is None
        or any(one.hindsight is not None for one in config.fields.values()),
        "hindsight",
        "must have a field with the option hindsight",
        GOAL_EXAMPLE,
    )
    if config.n_step is not None:
        part.leave_out(
            "hindsight",
            "together with gear.n_step",
            "n-step returns are sums of the rewards for the goal that was pursued",
        )
    if config.exchange == "device":
        part.admit(
            "prefetch",
            [0],
            'where gear.exchange is "device"',
            "collectives of a device belong to the main thread, at one place among those of "
            "training",
        )
    micro = config.micro_batch_size or 1
    steps = config.gradient_accumulation_steps
    part.require(
        config.batch_size is None or config.batch_size % (micro * steps) == 0,
        "batch_size",
        f"must be a multiple of micro_batch_size * gradient_accumulation_steps ({micro} * {steps})",
        "it is their product times the number of ranks",
    )
    if config.burn_in:
        _check_burn_in(config, part)
    if config.pack is None:
        part.leave_out(
            "batch rollout loss",
            "without gear.pack",
            'give "pack": {"tokens": ...}, or leave it out',
        )
    else:
        _check_pack(config, config.pack, part)


def _check_sampler(config: GearOptions) -> None:
    """Reject a sampler that its unit or its anchors exclude."""
    sampler = config.item_sampler
    mixture = isinstance(config.sampler, MixtureSampler)
    part = Part("gear.sampler.of" if mixture else "gear.sampler", sampler)
    if mixture:
        part.leave_out("table", "in a mixture, whose shares name the tables")
    anchors = sampler.anchors
    bounds_padding = isinstance(anchors, AnchorsConfig) and anchors.bounds_padding
    what = "bound padding" if bounds_padding else 'be "fits"'
    part.require(
        not (bounds_padding or anchors == "fits")
        or any(f.length is not None or f.offset for f in config.fields.values()),
        "anchors",
        f"must not {what} where no field has a length or an offset",
        'every step fits: use "all", or give a field a length',
    )
    if config.has_group_items:
        part.admit("anchors", ["all"], 'where sampler.unit is "group"', "a group has all steps")
        Part("gear", config).need(
            "pack",
            'where gear.sampler.unit is "group"',
            'give "pack": {"tokens": ...} and "batch": {"groups": ...}',
        )


def _check_field(config: GearOptions, name: str, field: FieldConfig, part: Part) -> None:
    """Reject options of a field that exclude one another, or that the rest of the section does."""
    if field.column is not None:
        part.leave_out("derived", f"together with {part.at}.column ({field.column!r})", "drop one")
    if name in ("return_to_go", "timestep", "position", "advantage", "value_target"):
        part.admit("derived", (name, None), "in a field of that name", "rename the field")
    if field.derived is not None:
        part.leave_out("normalize", "for a derived field", "there are no statistics; use scale")
    if field.length is None:
        part.leave_out("align", f"without {part.at}.length", "drop it or give a length")
    follows = field.offset == "n_step"
    part.require(
        not follows or config.n_step is not None,
        "offset",
        'must not be "n_step" without gear.n_step',
        "give gear.n_step or a number",
    )
    part.require(
        not (follows and field.length is not None and config.burn_in),
        "offset",
        "must be a number in a window where there is gear.burn_in",
        "give the offset in steps",
    )
    if field.normalize is not None and config.normalizes_online:
        for is_so, what in (
            (field.normalize == "quantile", "a quantile of a table"),
            (config.on_device, "a table on devices"),
            (len(config.sampled_tables) > 1, "a mixture of tables without a data set"),
            (config.pack is not None, "packed batches"),
        ):
            part.require(
                not is_so,
                "normalize",
                f"must not be given for {what} to which rows are added: there are no statistics",
                "use scale, or normalise in the model",
            )
    part.require(
        field.scale != 0, "scale", "must not be 0", "the field would hold zeros; leave it out"
    )
    if config.hindsight is None:
        part.leave_out("hindsight", "without gear.hindsight", 'give "hindsight": {}')
    if field.hindsight is not None:
        part.leave_out(
            "length", "for a goal", "a sample has one goal: expand it over the steps in the model"
        )
        part.leave_out("derived", "for a goal", "drop one")
    if config.pack is None or len(config.sampled_tables) == 1:
        part.leave_out("absent", "unless gear.pack has batches of several tables")
    if field.derived is not None:
        part.leave_out("absent", "for a derived field")
    if config.pack is not None:
        part.leave_out("length align hindsight", "with gear.pack", _WHOLE)
        for option, value in (("offset", "n_step"), ("pad", "edge"), ("derived", "position")):
            is_other = getattr(field, option) != value
            part.require(is_other, option, "must have another value with gear.pack", _WHOLE)


def _check_pack(config: GearOptions, pack: PackConfig, part: Part) -> None:
    """Reject options of windows in packed batches, and sizes that no pack can have."""
    when = "with gear.pack"
    sizes = "batch_size micro_batch_size gradient_accumulation_steps"
    part.leave_out("n_step burn_in hindsight pipeline prefetch verify_every", when, "leave it out")
    part.leave_out("advantage", when, 'call rollout.advantages("gae", value=...)')
    part.leave_out(sizes, when, "give the size as gear.batch or gear.rollout")
    pack_part = Part("gear.pack", pack)
    pack_part.require(
        pack.room > 0,
        "tokens",
        f"must be at least gear.pack.pad.multiple ({pack.pad.multiple})",
        "raise it, or lower the multiple",
    )
    unit = "group" if config.has_group_items else "trajectory"
    sampler = Part("gear.sampler", config.item_sampler)
    sampler.admit("unit", ("trajectory", "group"), when, _WHOLE)
    sampler.admit("anchors", ["all"], when, _WHOLE)
    if pack.prefix == "share":
        when = 'with "prefix": "share" of gear.pack'
        if unit != "group":
            sampler.admit("unit", ["group"], when, "trajectories of a group share prefixes")
        pack_part.leave_out("max_trajectories", when, "bound micro batches by tokens")
    for name in config.sampled_tables:
        table = config.resolved_tables[name]
        table_part = Part(dotted("gear", "tables", name), table)
        table_part.admit("placement", ["host"], when)
        table_part.require(
            pack.too_long == "truncate"
            or table.data is not None
            or (table.max_length is not None and table.max_length <= pack.room),
            "max_length",
            f"must be at most {pack.room}, what gear.pack.tokens leaves for a trajectory",
            "give it, so that longer ones are refused when they are added, or "
            '"too_long": "truncate"',
        )
    if (config.batch is None) == (config.rollout is None):
        given = None if config.batch is None else "both"
        raise ConfigError(
            "gear.batch",
            "or gear.rollout, one of them, must be given with gear.pack",
            given,
            '"batch": {"trajectories": 256}, or "rollout" for several optimizer steps over one '
            "batch",
        )
    size = config.rollout_size
    assert size is not None
    at = "gear.batch" if config.batch is not None else "gear.rollout"
    wanted = "groups" if unit == "group" else "trajectories"
    if size.unit != wanted:
        raise ConfigError(
            at,
            f'must be in {wanted} where gear.sampler.unit is "{unit}"',
            f"{size.size} {size.unit}",
            "change one of them",
        )
    Part(at, size).at_most(
        "minibatches", size.size, "the items of the batch", "a minibatch has one item at least"
    )
    if config.loss.by_table:
        _check_loss_by_table(config)
    if unit != "group":
        rule = 'must have another value where gear.sampler.unit is not "group"'
        for option, value in (("normalize", "group"), ("by", "member")):
            is_other = getattr(config.loss, option) != value
            Part("gear.loss", config.loss).require(is_other, option, rule, "sample groups")


def _check_loss_by_table(config: GearOptions) -> None:
    """Reject means by table that do not name the tables of a mixture, each once."""
    loss = config.loss
    if set(loss.by_table) != set(config.sampled_tables) or len(loss.by_table) < 2:
        raise ConfigError(
            "gear.loss.by_table",
            f"must name all tables of a mixture ({', '.join(config.sampled_tables)}), and no other",
            ", ".join(loss.by_table),
            "give each of them a weight; leave it out for one mean over all",
        )
    for name, part in loss.by_table.items():
        if part.normalize == "group" and not config.has_group_items:
            at = dotted("gear", "loss", "by_table", name, "normalize")
            rule = 'must have another value where no sampler.unit is "group"'
            raise ConfigError(at, rule, part.normalize, "sample groups")


def _check_names(config: GearOptions) -> None:
    """Reject names of tables and fields that have another meaning, or that no table has."""
    tables = config.resolved_tables
    sampler = config.sampler
    for name in tables:
        # The table's folder in a checkpoint would have the name of another table's earlier save.
        if name.endswith(_NOT_OF_TABLES):
            raise ConfigError(
                "gear.tables",
                f"must not have a table whose name ends with {', '.join(_NOT_OF_TABLES)}",
                name,
                "give the table another name",
            )
    if isinstance(sampler, MixtureSampler):
        for name in sampler.shares:
            if name not in tables:
                at = dotted("gear", "sampler", "shares", name)
                raise ConfigError(at, "must name a table", None, known_names(name, tables))
    elif sampler.table is None and len(tables) > 1:
        raise ConfigError(
            "gear.sampler.table",
            "must be given where there are several tables",
            None,
            f"one of {', '.join(tables)}",
        )
    elif sampler.table is not None and sampler.table not in tables:
        raise ConfigError(
            "gear.sampler.table",
            "must be a table",
            sampler.table,
            known_names(sampler.table, tables),
        )
    check_field_names(list(config.fields), n_step=config.n_step is not None)


def _check_burn_in(config: GearOptions, part: Part) -> None:
    """Reject a burn-in that may leave a sample without a step that learns."""
    windows = {name: field for name, field in config.fields.items() if field.length is not None}
    if not windows:
        part.leave_out("burn_in", "where no field has a length", "give fields a length")
    # Steps count from the first step of the earliest window: with windows [-4, 4) and [0, 8), the
    # second one ends at step 12.
    first = min(int(field.offset or 0) for field in windows.values())
    for name, field in windows.items():
        assert field.length is not None
        steps = int(field.offset or 0) + field.length - first
        part.require(
            config.burn_in < steps,
            "burn_in",
            f"must be less than the steps up to the end of field {name} ({steps})",
            "lengthen the field",
        )
    # An anchor at the last step leaves only the steps up to it; the anchor's own step must learn.
    if config.item_sampler.anchors != "fits":
        part.at_most(
            "burn_in",
            max(0, -first),
            "the steps of the windows in front of the anchor",
            "else a sample may have no step that learns: lower the offsets, or use "
            '"anchors": "fits"',
        )


def check_lengths(config: GearOptions, longest: Mapping[str, int]) -> None:
    """Reject data sets with trajectories that no pack can hold.

    Args:
        longest: Steps of the longest trajectory, by table.
    """
    if config.pack is None or config.pack.too_long == "truncate":
        return
    for name in config.sampled_tables:
        steps = longest.get(name, 0)
        Part("gear.pack", config.pack).require(
            steps <= config.pack.room,
            "tokens",
            f"must hold the longest trajectory of table {name} ({steps} steps)",
            'raise it, or set "too_long": "truncate"',
        )


def check_ranks(config: GearOptions, replicas: int, sequence: int, stages: int) -> None:
    """Reject a plan width, a padding multiple or a pipeline that does not suit packed batches."""
    pack = config.pack
    if pack is None:
        return
    part = Part("gear.pack", pack)
    part.require(
        pack.plan_width is None or pack.plan_width % replicas == 0,
        "plan_width",
        f"must be a multiple of the replicas ({replicas})",
        "change it, or the number of ranks",
    )
    Part("gear.pack.pad", pack.pad).require(
        pack.pad.multiple % sequence == 0,
        "multiple",
        f"must be a multiple of the sequence ranks ({sequence})",
        "each of them gets an equal slice",
    )
    part.require(
        pack.prefix == "own" or sequence == 1,
        "prefix",
        'must be "own" with sequence ranks',
        "leave it out",
    )
    if stages > 1:
        raise ConfigError(
            "gear.pack",
            "must not be given where the model is a pipeline",
            None,
            "a pipeline's schedule has a fixed number of micro batches of one shape: use windows",
        )
