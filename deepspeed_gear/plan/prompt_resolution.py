"""Resolution of groups and prompts: conditions, sizes, and whether a prompt is stored once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.column_checks import check_where
from deepspeed_gear.config.sampler_options import WhereConfig
from deepspeed_gear.config.table_options import (
    MOST_REMEMBERED,
    GroupConfig,
)
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.plan.stream_resolution import conditions_of
from deepspeed_gear.sampling.conditions import Condition, admitted_prompts
from deepspeed_gear.sampling.mass_rules import random_key_of
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.group_conditions import STATISTICS, GroupCondition
from deepspeed_gear.store.group_spec import GroupSpec
from deepspeed_gear.store.prompt_spec import PromptSpec
from deepspeed_gear.store.table_spec import Shard, TableSpec


def group_spec_of(
    group: GroupConfig, schema: Schema, read: Iterable[str], num_slots: int = 0
) -> GroupSpec:
    """Return the specification of a table's groups.

    Args:
        group: The section `group` of the table.
        schema: Columns of the table.
        read: Columns that batches and the sampler read.
        num_slots: Slots of the store; 0 for a data set, which no group leaves.
    """
    conditions = []
    for column, condition in group.where.items():
        for statistic in STATISTICS:
            bounds = getattr(condition, statistic)
            if bounds is not None:
                conditions.append(
                    GroupCondition.of(schema[column], statistic, bounds.min, bounds.max)
                )
    needed = set(read)
    remember = group.remember
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


def prompt_spec_of(
    config: GearConfig, name: str, group: GroupSpec, schema: Schema, slots: int, shard: Shard | None
) -> PromptSpec:
    """Return the prompts of a table with `slots` trajectories per store; opens their data set.

    Raises:
        ConfigError: The column of numbers is not int64, or the table is too small.
        DataError: The data set is missing or broken, has a split, or is a part.
    """
    prompts = config.resolved_tables[name].prompts
    size = config.rollout_size
    at = f"gear.tables.{name}"
    assert prompts is not None
    assert size is not None
    groups = round((config.share_of(name) or 0) * size.size)  # config checks ensure a whole number
    from deepspeed_gear.data.ingest import ingested

    dataset = ingested(prompts.data)
    if given := dataset.split or (dataset.part and str(dataset.part)):
        rule = "must be whole and without a split"
        remedy = "ingest held-out prompts into another data set"
        raise DataError(f"{at}.prompts.data: {dataset.path}", rule, given, remedy)
    conditions = _prompt_conditions(f"{at}.prompts.where", prompts.where, dataset)
    if schema[group.column].dtype != "int64":
        rule = f"must have the dtype int64 with {at}.prompts: it holds the numbers of prompts"
        raise ConfigError(
            f"{at}.schema.columns.{group.column}",
            rule,
            schema[group.column].dtype,
            "set its dtype to int64",
        )
    if group.member is not None and np.iinfo(schema[group.member].numpy_dtype).max < group.size - 1:
        rule = f"must hold the places of {group.size} members with {at}.prompts, from 0 on"
        raise ConfigError(
            f"{at}.schema.columns.{group.member}",
            rule,
            schema[group.member].dtype,
            "set its dtype to int32",
        )
    store, count = (0, 1) if shard is None else (shard.index, shard.count)
    # One store may have to hold all groups of a batch: those of the others may all be dropped.
    each = max(-(-(prompts.max_lag + 2) * groups // count), groups)
    least = count * each * group.max_trajectories
    if slots * count < least:
        rule = (
            f"must be at least {least}, the groups of max_lag + 1 batches and of the one in "
            f"training{'' if count == 1 else f', and for each of {count} nodes those of a batch'}"
        )
        remedy = "raise it, or lower max_lag"
        raise ConfigError(f"{at}.capacity_trajectories", rule, slots * count, remedy)
    return PromptSpec(
        data=str(dataset.path.resolve()),
        fingerprint=dataset.fingerprint,
        num_prompts=len(admitted_prompts(dataset, conditions)),
        groups=groups,
        size=group.max_trajectories,
        **prompts.model_dump(exclude={"data", "where", "shared_columns"}),
        shared_columns=tuple(prompts.shared_columns),
        seed=config.seed,
        random_key=random_key_of(name, "prompts"),
        num_stores=count,
        store=store,
        is_kept=config.shared_memory.keep,
        needs=bool(group.late),
        where=tuple((c.column, c.minimum, c.maximum, c.among) for c in conditions),
    )


def _prompt_conditions(
    at: str, where: Mapping[str, WhereConfig], dataset: Dataset
) -> tuple[Condition, ...]:
    """Return the conditions of the option `at` on prompts; ConfigError unless one passes them."""
    for column, bounds in where.items():
        check_where(f"{at}.{column}", column, bounds, dataset.schema)
    conditions = conditions_of(where, dataset.schema)
    if not len(admitted_prompts(dataset, conditions)):
        ranges = []
        for column in where:
            values = as_numbers(dataset.columns[column][:], dataset.schema[column])
            ranges.append(f"{column} is in [{values.min():.6g}, {values.max():.6g}]")
        rule = f"must admit some of the {len(dataset)} prompts of {dataset.path}"
        raise ConfigError(at, rule, None, f"widen the conditions: {', '.join(ranges)}")
    return conditions


def sharing_obstacle(
    schema: Schema, fields: Sequence[ResolvedField], spec: TableSpec
) -> str | None:
    """Return why a table with prompts stores those of a group whole; None: it may do so once.

    It may if no field of the steps before the responses depends on the trajectory.
    """
    late = [column.role for column in schema.late_columns]
    if schema.role("loss_mask") is None:
        return "there is no column of the role loss_mask"
    if "loss_mask" in late or "token" in late:
        return "the column of the role token or loss_mask is late"
    if spec.return_to_go:
        return "returns-to-go are derived"
    if spec.normalized:
        return f"column {spec.normalized[0]} is normalised by added rows"
    for field in fields:
        if field.derived is not None or field.first not in (0, 1):
            return f"field {field.name} is derived, or has an offset other than 0 and 1"
    return None
