"""Checks of the options of groups: against the other options, and against the columns of their table."""

from __future__ import annotations

from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.config.table_options import GroupConditionConfig, GroupConfig, TableConfig
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.schema import Schema

STATISTICS = tuple(GroupConditionConfig.model_fields)


def check_groups(config: GearOptions) -> None:
    """Reject groups that are not sampled, and options of groups that contradict one another.

    Raises:
        ConfigError: Two options conflict, or one needs another that is missing.
    """
    sampler = config.item_sampler
    by_group = sampler.unit == "group"
    for name, table in config.resolved_tables.items():
        at = f"gear.tables.{name}"
        is_sampled = by_group and name in config.sampled_tables
        if is_sampled and table.group is None:
            rule, remedy = (
                'must be given where sampler.unit is "group"',
                '"group": {"column": ..., "size": ...}',
            )
            raise ConfigError(f"{at}.group", rule, None, remedy)
        if table.group is None:
            continue
        if not is_sampled:
            rule = 'must not be given unless the table is sampled with sampler.unit = "group"'
            raise ConfigError(f"{at}.group", rule, None, 'set "unit": "group", or leave it out')
        _check_table(table, at)
        _check_group(table.group, table, f"{at}.group")
    if by_group and sampler.anchors != "all":
        rule = 'must be "all" where sampler.unit is "group"'
        raise ConfigError("gear.sampler.anchors", rule, sampler.anchors, "a group has all steps")


def _check_table(table: TableConfig, at: str) -> None:
    if table.placement == "device":
        rule = 'must be "host" for a table of groups'
        raise ConfigError(f"{at}.placement", rule, table.placement)
    if table.data is not None and table.data.split:
        refuse_split(at, table.data.split)


def refuse_split(at: str, split: object) -> None:
    """Raise for a data set of groups with a split, which would divide groups.

    Raises:
        ConfigError: Always.
    """
    rule, remedy = "must be empty for a table of groups", "ingest held-out groups into another data set"
    raise ConfigError(f"{at}.data.split", rule, split, remedy)


def _check_group(group: GroupConfig, table: TableConfig, at: str) -> None:
    if (group.member is None) != (group.max_trajectories is None):
        rule = f"must be given together with {at}.member, and only then"
        raise ConfigError(f"{at}.max_trajectories", rule, group.max_trajectories)
    if group.member == group.column:
        raise ConfigError(f"{at}.member", "must be another column than that of the group", group.member)
    most = group.max_trajectories or group.size
    if most < group.size:
        rule = f"must be at least {at}.size ({group.size})"
        raise ConfigError(f"{at}.max_trajectories", rule, most, "a member has at least one trajectory")
    if (group.after_s is None) != (group.min_size is None):
        rule = f"must be given together with {at}.after_s, and only then"
        raise ConfigError(f"{at}.min_size", rule, group.min_size)
    if group.min_size is not None and group.min_size > group.size:
        raise ConfigError(f"{at}.min_size", f"must be at most {at}.size ({group.size})", group.min_size)
    held = table.capacity_trajectories
    if held is not None and most > held:
        rule = f"must be at least the trajectories of a group ({most})"
        raise ConfigError(f"{at.removesuffix('.group')}.capacity_trajectories", rule, held)
    if table.data is not None and (group.needs or group.after_s is not None or group.remember):
        option = "needs" if group.needs else "after_s" if group.after_s is not None else "remember"
        raise ConfigError(f"{at}.{option}", "must not be given for a data set", getattr(group, option))
    for column, condition in group.where.items():
        _check_condition(condition, f"{at}.where.{column}")


def _check_condition(condition: GroupConditionConfig, at: str) -> None:
    given = {name: getattr(condition, name) for name in STATISTICS}
    if all(bounds is None for bounds in given.values()):
        raise ConfigError(at, f"must have one of {', '.join(STATISTICS)}", None)
    for name, bounds in given.items():
        if bounds is None:
            continue
        if bounds.min is None and bounds.max is None:
            raise ConfigError(f"{at}.{name}", "must have min or max", None, "an empty condition admits all")
        if bounds.min is not None and bounds.max is not None and bounds.min > bounds.max:
            rule = f"must be at most {at}.{name}.max ({bounds.max})"
            raise ConfigError(f"{at}.{name}.min", rule, bounds.min, "swap them")


def check_group_columns(group: GroupConfig, at: str, schema: Schema) -> None:
    """Reject columns of a group that its table lacks, or that do not suit.

    Args:
        group: The groups of a table.
        at: Name of the option, for errors.
        schema: Of the table.
    Raises:
        ConfigError: One does not suit.
    """
    numbers = [c for c in schema.trajectory_columns if not c.shape and c.dtype != "bool"]
    integers = [c.name for c in numbers if not c.is_floating and not c.late]
    for option, name in (("column", group.column), ("member", group.member)):
        if name is not None and name not in integers:
            rule = "must name a column with one integer per trajectory, which is not late"
            raise ConfigError(f"{at}.{option}", rule, name, f"there are: {', '.join(integers) or 'none'}")
    late = [column.name for column in schema.late_columns]
    for name in group.needs:
        if name not in late:
            rule, remedy = "must name late columns", f"there are: {', '.join(late) or 'none'}"
            raise ConfigError(f"{at}.needs", rule, name, remedy)
    known = [c.name for c in schema.trajectory_columns if not c.shape]
    for name in group.where:
        if name not in known:
            rule = "must name a column with one number per trajectory"
            raise ConfigError(f"{at}.where.{name}", rule, None, f"there are: {', '.join(known) or 'none'}")
