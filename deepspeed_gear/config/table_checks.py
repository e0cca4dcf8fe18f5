"""Cross-checks of a table's options: data, splits, host memory, groups, prompts, rate limiter."""

from __future__ import annotations

from deepspeed_gear.config.device_checks import check_device_table
from deepspeed_gear.config.option_rules import Part
from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.config.sampler_options import SHARES_TOLERANCE, MixtureSampler
from deepspeed_gear.config.table_options import GroupConfig, RateLimiterConfig, TableConfig
from deepspeed_gear.config.types import dotted
from deepspeed_gear.errors import ConfigError

_NO_SPLIT_OF_GROUPS = "for a table of groups", "ingest held-out groups into another data set"
SPLITS = 'evaluate on a data set of its own, with another Replay: "sampler": {"kind": "epoch"}'


def check_table(config: GearOptions, name: str, table: TableConfig) -> None:
    """Raise ConfigError if options of a table conflict, or do not suit the rest of the section."""
    at = dotted("gear", "tables", name)
    part = Part(at, table)
    _check_data(config, name, table, part)
    if table.placement == "device":
        check_device_table(config, name, table, part)
    else:
        part.leave_out("rows", "for a table in host memory", 'give it "placement": "device"')
        part.leave_out(
            "num_envs", "for a table in host memory", "use replay.vector_writer(num_envs)"
        )
        if config.on_device:
            part.admit("placement", ["device"], "as that of the other tables")
    if table.group is not None:
        _check_group(table.group, table, Part(f"{at}.group", table.group))
    if table.prompts is not None:
        _check_prompts(config, name, table, part)
    if table.rate_limiter is not None:
        _check_rate(
            config, table, table.rate_limiter, Part(f"{at}.rate_limiter", table.rate_limiter)
        )


def _check_data(config: GearOptions, name: str, table: TableConfig, part: Part) -> None:
    """Reject options of a table that its data, its eviction policy or its sampler excludes."""
    sampler = config.sampler_of(name)
    sampled = name in config.sampled_tables
    if table.data is not None:
        part.leave_out(
            "capacity_steps capacity_bytes writers remove keep_best max_times_sampled max_age "
            "version rate_limiter capacity_trajectories max_length num_envs schema media ragged",
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
        (group.after_s is None) == (group.min_size is None) or table.prompts is not None,
        "min_size",
        f"must be given together with {part.at}.after_s, and only then, without prompts",
        "give both, or neither",
    )
    part.at_most("min_size", group.size, f"{part.at}.size")
    held = table.capacity_trajectories
    most = table.most_trajectories
    Part(part.at.removesuffix(".group"), table).require(
        held is None or held >= most,
        "capacity_trajectories",
        f"must be at least the trajectories of a group ({most})",
        f"raise it to {most} or more",
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
    assert table.prompts is not None
    prompts = Part(f"{part.at}.prompts", table.prompts)
    if table.prompts.order == "lease":
        prompts.admit(
            "late",
            ["wait"],
            'with the order "lease"',
            'in the order of leases each batch waits for its groups: set order to "completion"',
        )
    if config.shared_memory.keep:
        prompts.admit(
            "sampler",
            ["epoch"],
            "with gear.shared_memory.keep",
            "the next job may draw other prompts than those of the groups that the store has",
        )
    when = f"with {part.at}.prompts"
    part.admit("max_times_sampled", (1,), when, "each prompt is trained in one rollout batch")
    part.leave_out("data version max_age", when, "prompts.max_lag bounds the age of groups")
    if table.rate_limiter is not None:
        rate = Part(f"{part.at}.rate_limiter", table.rate_limiter)
        rate.leave_out("queue samples_per_insert", when, "prompts.max_lag bounds what waits")
    Part(f"{part.at}.group", table.group).leave_out(
        "after_s", when, "a lease commits whole groups; give min_size alone to commit fewer members"
    )
    if size is not None:
        Part("gear.rollout" if config.batch is None else "gear.batch", size).leave_out(
            "tokens",
            f"{when}: batches of leases have a fixed number of groups",
            "give the size in groups alone",
        )


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


def refuse_split(at: str, split: object) -> None:
    """Raise for a data set of groups with a split, which would divide groups."""
    when, remedy = _NO_SPLIT_OF_GROUPS
    raise ConfigError(f"{at}.data.split", f"must be {{}} {when}", split, remedy)
