"""The groups of a table, from its config."""

from __future__ import annotations

from collections.abc import Iterable

from deepspeed_gear.config.table_options import MOST_REMEMBERED, GroupConfig
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.group_spec import STATISTICS, GroupCondition, GroupSpec


def group_spec_of(group: GroupConfig, schema: Schema, read: Iterable[str], num_slots: int = 0) -> GroupSpec:
    """Return the specification of a table's groups.

    Args:
        group: The config.
        num_slots: Trajectories that the store can hold; 0: it is a data set, which no group leaves.
        schema: Of the table.
        read: The columns that batches and the sampler read, or that its options name.
    """
    conditions = []
    for column, condition in group.where.items():
        for statistic in STATISTICS:
            bounds = getattr(condition, statistic)
            if bounds is not None:
                conditions.append(GroupCondition(column, statistic, bounds.min, bounds.max))
    needed, remember = set(read), group.remember
    if remember is None:
        remember = 0 if group.after_s is None else MOST_REMEMBERED
        remember = min(remember, num_slots // group.size)
    return GroupSpec(
        column=group.column,
        size=group.size,
        member=group.member,
        late=tuple(column.name for column in schema.late_columns if column.name in needed),
        after_s=group.after_s,
        min_size=group.min_size or 0,
        where=tuple(conditions),
        max_trajectories=group.max_trajectories or group.size,
        remember=remember,
    )
