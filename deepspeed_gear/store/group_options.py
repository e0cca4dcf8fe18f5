"""The groups of a table, from its config."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_gear.config.table_options import GroupConfig
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.group_spec import STATISTICS, GroupCondition, GroupSpec


def group_spec_of(group: GroupConfig, schema: Schema, read: Iterable[str]) -> GroupSpec:
    """Return the specification of a table's groups.

    Args:
        group: The config.
        schema: Of the table.
        read: The columns that batches and the sampler read, or that its options name.
    """
    conditions = []
    for column, condition in group.where.items():
        for statistic in STATISTICS:
            bounds = getattr(condition, statistic)
            if bounds is not None:
                conditions.append(GroupCondition(column, statistic, bounds.min, bounds.max))
    needed = set(read)
    return GroupSpec(
        column=group.column,
        size=group.size,
        member=group.member,
        late=tuple(column.name for column in schema.late_columns if column.name in needed),
        after_s=group.after_s,
        min_size=group.min_size or 0,
        where=tuple(conditions),
        max_trajectories=group.max_trajectories or group.size,
    )
