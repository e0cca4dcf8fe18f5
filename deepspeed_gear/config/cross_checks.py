"""Cross-checks of options: which ones need or exclude one another, in any schema.

`check_options` runs when a section is parsed; `check_lengths` and `check_ranks` run later, once
data sets and topology are known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import BaseModel

from deepspeed_gear.config.options import FieldConfig, GearOptions, PackConfig
from deepspeed_gear.config.sampler_options import (
    SHARES_TOLERANCE,
    AnchorsConfig,
    MixtureSampler,
    PrioritizedSampler,
)
from deepspeed_gear.config.table_options import GroupConfig, RateLimiterConfig, TableConfig
from deepspeed_gear.config.types import dotted
from deepspeed_gear.errors import ConfigError, known_names

# Names of the parts that every batch has for its samples; fields must not have them.
SAMPLE_NAMES = tuple(
    "is_weight trajectory_id anchor sample_number sample_index probability epoch valid "
    "relabelled goal_step".split()
)
BATCH_NAMES = (*SAMPLE_NAMES, "mask", "handle", "source")
N_STEP_NAMES = ("return_n", "discount", "steps_n")
# Suffixes that a checkpoint adds to the name of a table's folder, and the other file beside it.
_NOT_OF_TABLES = (".partial", ".old", ".older", "position.json")
_ON_HOST = 'give the table "placement": "host"'
_WHOLE = "a pack holds every step of its trajectories"
_WHOLE_TRAJECTORIES = f"leave num_envs out and add whole trajectories, or {_ON_HOST}"
_NO_SPLIT_OF_GROUPS = "for a table of groups", "ingest held-out groups into another data set"
SPLITS = 'evaluate on a data set of its own, with another Replay: "sampler": {"kind": "epoch"}'
GOAL_EXAMPLE = '"goal": {"column": "desired_goal", "hindsight": "achieved_goal"}'


@dataclass(frozen=True)
class Part:
    """A part of the config and its name; each method raises ConfigError unless its rule holds.

    `part.leave_out("align", "without gear.fields.x.length", "drop it")` raises
    "gear.fields.x.align must not be given without gear.fields.x.length, got 'left'; drop it".
    """

    at: str
    options: BaseModel

    def leave_out(self, names: str, when: str, remedy: str = "leave it out") -> None:
        """Require that options have their defaults.

        Args:
            names: The options, separated by spaces.
            when: The condition, as the end of the rule.
        """
        for name in names.split():
            value, default = self._value_and_default(name)
            if value != default:
                self.refuse(name, f"must not be given {when}", remedy)

    def need(self, name: str, when: str, remedy: str) -> None:
        """Require that an option is not null."""
        if self._value_and_default(name)[0] is None:
            self.refuse(name, f"must be given {when}", remedy)

    def admit(self, name: str, values: Sequence[Any], when: str, remedy: str = "") -> None:
        """Require that an option has one of some values, which the rule lists.

        Args:
            remedy: "" is to set the first of the values.
        """
        if self._value_and_default(name)[0] not in values:
            admitted = [json.dumps(value) for value in values]
            remedy = remedy or f"set it to {admitted[0]}"
            self.refuse(name, f"must be {' or '.join(admitted)} {when}", remedy)

    def at_most(
        self, name: str, limit: int | None, rule: str, remedy: str = "choose a smaller number"
    ) -> None:
        """Require that an option is null or at most `limit`.

        Args:
            limit: The limit, which the rule shows; None is no limit.
            rule: What the limit is, after "must be at most".
        """
        value = self._value_and_default(name)[0]
        if value is not None and limit is not None and value > limit:
            self.refuse(name, f"must be at most {rule} ({limit})", remedy)

    def require(self, holds: bool, name: str, rule: str, remedy: str) -> None:
        """Require that a condition on an option holds, which the rule states."""
        if not holds:
            self.refuse(name, rule, remedy)

    def refuse(self, name: str, rule: str, remedy: str) -> NoReturn:
        """Raise ConfigError for an option's value; a value that is itself a part is not shown."""
        value = self._value_and_default(name)[0]
        if isinstance(value, dict) and any(
            isinstance(inner, BaseModel) for inner in value.values()
        ):
            value = [*value]
        shown = None if isinstance(value, BaseModel) else value
        raise ConfigError(f"{self.at}.{name}", rule, shown, remedy)

    def _value_and_default(self, name: str) -> tuple[Any, Any]:
        fields = type(self.options).model_fields
        key = next(key for key, info in fields.items() if (info.alias or key) == name)
        return getattr(self.options, key), fields[key].default


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
        at = dotted("gear", "tables", name)
        _check_table(config, name, table, Part(at, table))
        _check_placement(config, name, table, Part(at, table))
        if table.group is not None:
            _check_group(table.group, table, Part(f"{at}.group", table.group))
        if table.prompts is not None:
            _check_prompts(config, name, table, Part(at, table))
        if table.rate_limiter is not None:
            _check_rate(
                config, table, table.rate_limiter, Part(f"{at}.rate_limiter", table.rate_limiter)
            )
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
    if config.on_device:
        names = "hindsight prefetch verify_every count_draws pipeline transfer"
        part.leave_out(names, "for a table on devices", _ON_HOST)
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


def _check_table(config: GearOptions, name: str, table: TableConfig, part: Part) -> None:
    """Reject options of a table that its data, its eviction policy or its sampler excludes."""
    sampler = config.sampler_of(name)
    sampled = name in config.sampled_tables
    if table.data is not None:
        part.leave_out(
            "capacity_steps capacity_bytes writers remove keep_best max_times_sampled max_age "
            "version rate_limiter capacity_trajectories max_length num_envs schema media",
            f"together with {part.at}.data",
            "drop one",
        )
    remedy = "a trajectory has at least one step, and must fit into the table"
    for option in ("max_length", "capacity_trajectories"):
        part.at_most(option, table.capacity_steps, f"{part.at}.capacity_steps", remedy)
    part.require(
        (table.remove == "keep_best") == (table.keep_best is not None),
        "keep_best",
        'must be given with remove = "keep_best", and only then',
        "name a per-trajectory column",
    )
    part.require(
        table.remove != "lowest_priority" or (sampled and sampler.has_priorities),
        "remove",
        'must not be "lowest_priority" without priorities',
        "use a prioritized sampler, or keep_best",
    )
    if not sampled or sampler.unit == "step":
        part.leave_out("max_times_sampled", "unless trajectories or groups are sampled")
    if getattr(sampler, "stratified", False):
        part.leave_out("max_times_sampled", "together with sampler.stratified", "drop one")
    if not sampled:
        part.leave_out("rate_limiter", "for a table that is not sampled")
    if sampled and sampler.unit == "group":
        part.need("group", 'where sampler.unit is "group"', '"group": {"column": ..., "size": ...}')
        part.admit("placement", ["host"], "for a table of groups")
    else:
        when = 'unless the table is sampled with sampler.unit = "group"'
        part.leave_out("group", when, 'set "unit": "group", or leave it out')
    if table.data is not None:
        data = Part("gear.data" if config.data is not None else f"{part.at}.data", table.data)
        if table.group is not None:
            data.admit("split", [{}], *_NO_SPLIT_OF_GROUPS)
        if sampled and config.pack is not None:
            data.leave_out("split", "with gear.pack", SPLITS)
        if table.placement == "device" and isinstance(config.sampler, MixtureSampler):
            data.leave_out(
                "split",
                "in a mixture of tables on devices",
                "evaluate with a replay of this table alone",
            )


def _check_placement(config: GearOptions, name: str, table: TableConfig, part: Part) -> None:
    """Reject options of host tables in a table on devices, and the reverse."""
    if table.placement == "host":
        part.leave_out("rows", "for a table in host memory", 'give it "placement": "device"')
        part.leave_out(
            "num_envs", "for a table in host memory", "use replay.vector_writer(num_envs)"
        )
        if config.on_device:
            part.admit("placement", ["device"], "as that of the other tables")
        return
    if name not in config.sampled_tables:
        part.admit(
            "placement",
            ["host"],
            "for a table that is not sampled",
            'leave the table out, or give it a share of a "kind": "mixture"',
        )
    if table.data is not None:
        return
    part.need("max_length", "for a table on devices", _ON_HOST)
    when = "for a table on devices: it is a ring that evicts the oldest trajectories"
    part.admit("remove", ["fifo"], when, 'write "remove": "fifo"')
    part.leave_out("writers max_age version rate_limiter media", "for a table on devices", _ON_HOST)
    n = 1 if config.n_step is None else config.n_step.n
    part.require(
        table.max_length != 1 or n == 1,
        "max_length",
        f"must be at least 2 with gear.n_step.n {n}: a return ends with its trajectory",
        f"set it to {n} or more and add pieces of that many steps, or single steps of "
        "environments (num_envs, add_steps_); or set gear.n_step.n to 1",
    )
    if table.num_envs is None:
        return
    when = "where steps are added one by one: an open trajectory would leave the table"
    part.leave_out("max_times_sampled", when, _WHOLE_TRAJECTORIES)
    # A step of an environment must not evict the environment's own open trajectory.
    longest = table.max_length or 1
    least = 2 * table.num_envs * longest
    part.require(
        table.capacity_steps is None or table.capacity_steps >= least,
        "capacity_steps",
        f"must be at least {least}: two trajectories of {part.at}.max_length per environment",
        "raise it, or lower max_length",
    )
    least = table.num_envs * (longest + 1)
    part.require(
        table.capacity_trajectories is None or table.capacity_trajectories >= least,
        "capacity_trajectories",
        f"must be at least {least}: other environments may begin as many while one trajectory is "
        "open",
        "leave it out",
    )


def _check_group(group: GroupConfig, table: TableConfig, part: Part) -> None:
    """Reject sizes of groups that contradict one another, or the capacity of the table."""
    part.require(
        (group.member is None) == (group.max_trajectories is None),
        "max_trajectories",
        f"must be given together with {part.at}.member, and only then",
        "give both, or neither",
    )
    part.require(
        group.member != group.column,
        "member",
        "must be another column than that of the group",
        "name the member's column",
    )
    part.require(
        group.max_trajectories is None or group.max_trajectories >= group.size,
        "max_trajectories",
        f"must be at least {part.at}.size ({group.size})",
        "a member has at least one trajectory",
    )
    part.require(
        (group.after_s is None) == (group.min_size is None),
        "min_size",
        f"must be given together with {part.at}.after_s, and only then",
        "give both, or neither",
    )
    part.at_most("min_size", group.size, f"{part.at}.size")
    held = table.capacity_trajectories
    if held is not None and table.most_trajectories > held:
        raise ConfigError(
            f"{part.at.removesuffix('.group')}.capacity_trajectories",
            f"must be at least the trajectories of a group ({table.most_trajectories})",
            held,
            f"raise it to {table.most_trajectories} or more",
        )
    for option in ("needs", "after_s", "remember"):
        is_given = bool(getattr(group, option))
        part.require(
            table.data is None or not is_given,
            option,
            "must not be given for a data set",
            "leave it out",
        )


def _check_prompts(config: GearOptions, name: str, table: TableConfig, part: Part) -> None:
    """Reject prompts unless batches are a fixed number of whole groups, in the order of leases."""
    size = config.rollout_size
    share = config.share_of(name)
    groups = 0.0 if size is None or share is None else share * size.size
    if config.pack is None or table.group is None or config.sampler_of(name).kind != "fifo":
        part.refuse(
            "prompts",
            'must not be given unless its sampler is {"kind": "fifo", "unit": "group"} with '
            "gear.pack",
            "prompts are trained in the order of their leases, in packed batches",
        )
    if size is not None and (round(groups) < 1 or abs(groups - round(groups)) > SHARES_TOLERANCE):
        raise ConfigError(
            dotted("gear", "sampler", "shares", name),
            f"must be a number that makes whole groups of the {size.size} of a batch",
            share,
            "prompts are leased for batches with a fixed number of groups",
        )
    if table.prompts is not None and table.prompts.order == "lease":
        Part(f"{part.at}.prompts", table.prompts).admit(
            "late",
            ["wait"],
            'with the order "lease"',
            'in the order of leases each batch waits for its groups: set order to "completion"',
        )
    when = f"with {part.at}.prompts"
    part.admit("max_times_sampled", (1,), when, "each prompt is trained in one rollout batch")
    part.leave_out("data version max_age", when, "prompts.max_lag bounds the age of groups")
    if table.rate_limiter is not None:
        rate = Part(f"{part.at}.rate_limiter", table.rate_limiter)
        rate.leave_out("queue samples_per_insert", when, "prompts.max_lag bounds what waits")
    Part(f"{part.at}.group", table.group).leave_out(
        "after_s member", when, "a lease commits whole groups, of `size` trajectories"
    )
    if size is not None and size.tokens is not None:
        rule = f"must not be given {when}: batches of leases have a fixed number of groups"
        at = "gear.batch" if config.batch is not None else "gear.rollout"
        raise ConfigError(f"{at}.tokens", rule, size.tokens, "give the size in groups alone")


def _check_rate(
    config: GearOptions, table: TableConfig, rate: RateLimiterConfig, part: Part
) -> None:
    """Reject options of a rate limiter that its kind excludes, or that the table cannot hold."""
    at_table = part.at.removesuffix(".rate_limiter")
    sampler = config.sampler_of(at_table.removeprefix("gear.tables."))
    if rate.queue is not None:
        others = "error_buffer min_size samples_per_insert"
        part.leave_out(others, f"together with {part.at}.queue", "drop one")
        part.require(
            sampler.kind == "fifo" and sampler.unit != "step",
            "queue",
            'needs sampler.kind = "fifo" and sampler.unit = "trajectory" or "group"',
            "change the sampler, or leave queue out",
        )
        Part(at_table, table).admit("max_times_sampled", (0, 1), "in a queue")
    if rate.samples_per_insert is None:
        part.leave_out("error_buffer", f"without {part.at}.samples_per_insert")
    elif sampler.unit == "step":
        when = f"with {part.at}.samples_per_insert where items are steps"
        Part(at_table, table).need(
            "max_length", when, "the longest trajectory bounds the items of an addition"
        )
    held = table.capacity_steps if sampler.unit == "step" else table.capacity_trajectories
    if held is not None and table.group is not None:
        held //= table.group.size
    part.at_most("min_size", held, "what the table holds", "lower it, or raise the capacity")


def _check_sampler(config: GearOptions) -> None:
    """Reject a sampler that its unit, its anchors or tables on devices exclude."""
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
    if sampler.unit == "group":
        part.admit("anchors", ["all"], 'where sampler.unit is "group"', "a group has all steps")
        Part("gear", config).need(
            "pack",
            'where gear.sampler.unit is "group"',
            'give "pack": {"tokens": ...} and "batch": {"groups": ...}',
        )
    if not config.on_device:
        return
    if isinstance(config.sampler, MixtureSampler):
        Part("gear.sampler", config.sampler).leave_out(
            "by_table", "for tables on devices", _ON_HOST
        )
        for name, share in config.sampler.shares.items():
            if not isinstance(share, (int, float)):
                raise ConfigError(
                    f"gear.sampler.shares.{name}",
                    "must be a number for tables on devices: a captured step has fixed numbers "
                    "of samples",
                    share,
                    _ON_HOST,
                )
    part.require(
        sampler.on_device,
        "kind",
        "must be one of uniform, length, prioritized, top_k for a table on devices",
        _ON_HOST,
    )
    if any(config.resolved_tables[name].num_envs is not None for name in config.sampled_tables):
        when = "where steps are added one by one: an episode's values may come later"
        part.leave_out("where", when, "leave environments out with mask")
        if sampler.kind == "top_k":
            when = (
                "where steps are added one by one: rows are not in the order of ids, by which equal"
            )
            part.admit(
                "unit", ["trajectory"], f"{when} priorities are selected", _WHOLE_TRAJECTORIES
            )
    if isinstance(sampler, PrioritizedSampler):
        part.leave_out("decay", "for a table on devices", _ON_HOST)
        part.require(
            isinstance(sampler.alpha, (int, float)),
            "alpha",
            "must be a number for a table on devices: all masses follow from it",
            _ON_HOST,
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
    if pack.room == 0:
        raise ConfigError(
            "gear.pack.tokens",
            f"must be at least gear.pack.pad.multiple ({pack.pad.multiple})",
            pack.tokens,
            "raise it, or lower the multiple",
        )
    unit = config.item_sampler.unit
    sampler = Part("gear.sampler", config.item_sampler)
    sampler.admit("unit", ("trajectory", "group"), when, _WHOLE)
    sampler.admit("anchors", ["all"], when, _WHOLE)
    if pack.prefix == "share":
        when = 'with "prefix": "share" of gear.pack'
        sampler.admit("unit", ["group"], when, "the members of a group share its prompt")
        Part("gear.pack", pack).leave_out("max_trajectories", when, "bound micro batches by tokens")
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
    if unit != "group":
        rule = 'must have another value where gear.sampler.unit is not "group"'
        for option, value in (("normalize", "group"), ("by", "member")):
            is_other = getattr(config.loss, option) != value
            Part("gear.loss", config.loss).require(is_other, option, rule, "sample groups")


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


def check_field_names(names: list[str], n_step: bool) -> None:
    """Reject field names that have another meaning in a batch.

    Also those that have no nested form: `a` beside `a.b`.
    """
    for name in names:
        at = dotted("gear", "fields", name)
        remedy = f'give it another name: {{"my_{name}": {{"column": "{name}"}}}}'
        if name in BATCH_NAMES:
            raise ConfigError(at, "must not be named like a part of every batch", name, remedy)
        if n_step and name in N_STEP_NAMES:
            raise ConfigError(
                at, "must not be named like what gear.n_step adds to the batch", name, remedy
            )
        inner = next((other for other in names if other.startswith(f"{name}.")), None)
        if inner is not None:
            raise ConfigError(
                at, f"must not be a field and a group (of {inner})", None, "rename one"
            )


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


def refuse_split(at: str, split: object) -> None:
    """Raise for a data set of groups with a split, which would divide groups."""
    when, remedy = _NO_SPLIT_OF_GROUPS
    raise ConfigError(f"{at}.data.split", f"must be {{}} {when}", split, remedy)


def check_lengths(config: GearOptions, longest: Mapping[str, int]) -> None:
    """Reject data sets with trajectories that no pack can hold.

    Args:
        longest: Steps of the longest trajectory, by table.
    """
    if config.pack is None or config.pack.too_long == "truncate":
        return
    for name in config.sampled_tables:
        if longest.get(name, 0) > config.pack.room:
            raise ConfigError(
                "gear.pack.tokens",
                f"must hold the longest trajectory of table {name} ({longest[name]} steps)",
                config.pack.tokens,
                'raise it, or set "too_long": "truncate"',
            )


def check_ranks(config: GearOptions, replicas: int, sequence: int, stages: int) -> None:
    """Reject a plan width, a padding multiple or a pipeline that does not suit packed batches."""
    pack = config.pack
    if pack is None:
        return
    if pack.plan_width is not None and pack.plan_width % replicas:
        raise ConfigError(
            "gear.pack.plan_width",
            f"must be a multiple of the replicas ({replicas})",
            pack.plan_width,
            "change it, or the number of ranks",
        )
    if pack.pad.multiple % sequence:
        raise ConfigError(
            "gear.pack.pad.multiple",
            f"must be a multiple of the sequence ranks ({sequence})",
            pack.pad.multiple,
            "each of them gets an equal slice",
        )
    Part("gear.pack", pack).require(
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
