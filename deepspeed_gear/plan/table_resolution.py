"""Resolution of a table's store: retention, rate limits, groups, prompts, media, arrivals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np

from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.field_checks import check_where
from deepspeed_gear.config.sampler_options import WhereConfig
from deepspeed_gear.config.table_options import (
    DEFAULTS,
    MOST_REMEMBERED,
    GroupConfig,
    RateLimiterConfig,
    TableConfig,
)
from deepspeed_gear.config.types import defaults_of
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.media import MediaSpec
from deepspeed_gear.data.ragged import item_columns
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.plan.stream_resolution import conditions_of, read_columns
from deepspeed_gear.plan.table_sizes import capacity_of
from deepspeed_gear.row_exchange.exchange_plan import ExchangePlan
from deepspeed_gear.row_exchange.row_messages import most_rows
from deepspeed_gear.sampling.conditions import Condition, admitted_prompts
from deepspeed_gear.sampling.mass_rules import random_key_of
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.eviction import user_policy
from deepspeed_gear.store.group_conditions import STATISTICS, GroupCondition
from deepspeed_gear.store.group_spec import GroupSpec
from deepspeed_gear.store.prompt_spec import PromptSpec
from deepspeed_gear.store.rate_limiter import RateLimiter
from deepspeed_gear.store.retention import UNLIMITED, Retention
from deepspeed_gear.store.table_spec import Shard, TableSpec, spare_rows_for
from deepspeed_gear.store.writer_options import options_of, with_schema

EDGE = 2  # rows on both sides of the arrivals, which belong to no trajectory


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


def media_spec_of(config: GearConfig, name: str, schema: Schema) -> MediaSpec | None:
    """Return the media and ragged columns of a table, or None.

    Raises:
        ConfigError: The table has only one of `media` and a column of the role media, or of
            `ragged` and ragged columns.
    """
    table = config.resolved_tables[name]
    media = table.media
    column = schema.role("media")
    at = f"gear.tables.{name}"
    if (media is None) != (column is None):
        rule = "must be given with a column of the role media, and only then"
        remedy = "the column has the number of an item at each step, media what an item consists of"
        raise ConfigError(f"{at}.media", rule, None if column is None else column.name, remedy)
    ragged = schema.ragged_columns
    if (table.ragged is None) != (not ragged):
        rule = "must be given with columns that have max_values, and only then"
        given = ", ".join(one.name for one in ragged) or None
        remedy = 'give the memory for their values: "ragged": {"capacity_bytes": 1073741824}'
        raise ConfigError(f"{at}.ragged", rule, given, remedy)
    sections = [one for one in (("media", media), ("ragged", table.ragged)) if one[1] is not None]
    if not sections:
        return None
    option, first = sections[0]
    assert first is not None
    size = -(-first.page_bytes // 8) * 8
    capacity = sum(section.capacity_bytes for _, section in sections if section is not None)
    if first.capacity_bytes < size:
        rule = f"must be at least one page of {size} bytes"
        remedy = f"lower {option}.page_bytes"
        raise ConfigError(f"{at}.{option}.capacity_bytes", rule, first.capacity_bytes, remedy)
    known: tuple[Column, ...] = ()
    if media is not None:
        columns = {one: of.model_dump() for one, of in media.columns.items()}
        known = Schema.from_json({"columns": columns}).columns
    both = Schema((*known, *item_columns(ragged))).columns  # SchemaError: two have one name
    media_column = None if column is None else column.name
    return MediaSpec(media_column, both, capacity // size, size, ragged)


def retention_of(config: GearConfig, name: str, capacity: tuple[int, int], batch: int) -> Retention:
    """Return the retention of a table, with (steps, trajectories) as its stores' capacity."""
    table = config.resolved_tables[name]
    at = f"gear.tables.{name}"
    if ":" in table.remove:
        user_policy(table.remove, f"{at}.remove")
    queue = table.rate_limiter is not None and table.rate_limiter.queue is not None
    times = table.max_times_sampled or int(queue)
    steps, trajectories = capacity if table.remove != "none" else (UNLIMITED, UNLIMITED)
    rate = None
    if table.rate_limiter is not None:
        unit = config.sampler_of(name).unit
        rate = _rate(unit, table, table.rate_limiter, batch, at)
    retention = Retention(
        table.remove, table.keep_best, steps, trajectories, times, rate, table.max_age
    )
    if table.version is None:
        return retention
    version = table.version
    waits = version.on_stale == "wait"
    return replace(retention, version_column=version.column, max_lag=version.max_lag, waits=waits)


def _rate(
    unit: Literal["trajectory", "step", "group"],
    table: TableConfig,
    rate: RateLimiterConfig,
    batch: int,
    at: str,
) -> RateLimiter:
    """Return the rate limiter of a table; ConfigError if both sides would wait for each other."""
    if rate.queue is not None:
        if rate.queue < batch:
            rule = f"must be at least a global batch ({batch})"
            raise ConfigError(
                f"{at}.rate_limiter.queue", rule, rate.queue, f"raise it to {batch} or more"
            )
        return RateLimiter.queue(unit, rate.queue)
    if rate.samples_per_insert is None:
        return RateLimiter.least_size(unit, rate.min_size)
    longest = (table.max_length or 1) if unit == "step" else 1
    # The longest addition must be admitted while a batch waits, and, at the start, while one item
    # is missing for the first batch.
    least = (batch + rate.samples_per_insert * longest) / 2
    least = max(least, rate.samples_per_insert * (longest - 1))
    buffer = rate.error_buffer
    if buffer is None:
        buffer = max(least, rate.samples_per_insert * rate.min_size)
    if buffer < least:
        remedy = (
            f"half of a global batch ({batch}) and of what the longest addition brings, and what "
            "it brings without one item, or both sides wait"
        )
        rule = f"must be at least {least:g}"
        raise ConfigError(f"{at}.rate_limiter.error_buffer", rule, buffer, remedy)
    return RateLimiter.ratio(unit, rate.min_size, rate.samples_per_insert, buffer)


def store_of(
    config: GearConfig,
    name: str,
    schema: Schema,
    dataset: Dataset | None,
    fields: Sequence[ResolvedField],
    num_peers: int,
    shard: Shard | None = None,
    batch: int = 0,
) -> TableSpec:
    """Return the sizes of this node's store of a table, without rows for arrivals.

    Args:
        shard: The node's shard; None: the whole table.
        batch: Most samples of the table in a global batch.
    Raises:
        DataError: The node's part of the data set does not contain the shard.
    """
    table = config.resolved_tables[name]
    of_batches = fields if name in config.sampled_tables else ()
    read = read_columns(config.sampler_of(name), fields, table.group)
    spec = partial(
        TableSpec,
        name,
        schema,
        return_to_go=any(field.derived == "return_to_go" for field in of_batches),
        num_peers=num_peers,
        shard=shard,
    )
    if dataset is not None:
        assert table.data is not None
        first_id = dataset.first_id
        first = 0 if shard is None else shard.first
        end = dataset.num_trajectories_of_whole if shard is None else shard.end
        if not first_id <= first <= end <= first_id + len(dataset):
            rule = f"must hold the trajectories {first} to {end - 1}"
            given = str(dataset.part or f"{len(dataset)} trajectories")
            remedy = (
                "give this node the whole data set, or its own part and every other node another "
                "one"
            )
            raise DataError(f"table {name}: {dataset.path}", rule, given, remedy)
        return spec(
            num_slots=end - first,
            num_rows=dataset.row_of(end - first_id) - dataset.row_of(first - first_id),
            dataset=dataset,
            in_memory=table.data.load == "memory",
            group=None if table.group is None else group_spec_of(table.group, schema, read),
        )
    steps, slots = capacity_of(name, table, schema, 1 if shard is None else shard.count)
    # A trajectory of T steps has T + 1 rows where a column has T+1 of them.
    final = int(schema.has_final_row)
    rows = steps + slots * final
    longest = None if table.max_length is None else table.max_length + final
    retention = retention_of(config, name, (steps, slots), batch)
    spare = spare_rows_for(retention, rows, longest)
    group = None
    prompts = None
    if table.group is not None:
        group = group_spec_of(table.group, schema, read, slots)
        if table.prompts is not None:
            prompts = prompt_spec_of(config, name, group, schema, slots, shard)
    normalized = [
        field.column.name
        for field in of_batches
        if config.normalizes_online and field.normalize is not None and field.column is not None
    ]
    store = spec(
        num_slots=slots,
        num_rows=rows + spare,
        dataset=None,
        in_memory=True,
        num_writers=table.writers,
        retention=retention,
        spare_rows=spare,
        group=group,
        prompts=prompts,
        whole_fields=tuple(field.name for field in of_batches if field.needs_episode),
        normalized=tuple(dict.fromkeys(normalized)),
        media=media_spec_of(config, name, schema),
    )
    if prompts is None:
        return store
    obstacle = sharing_obstacle(schema, fields, store)
    if obstacle is not None and prompts.shared_columns:
        rule = f"must not be given where prompts are stored whole: {obstacle}"
        columns = list(prompts.shared_columns)
        raise ConfigError(
            f"gear.tables.{name}.prompts.shared_columns", rule, columns, "leave it out"
        )
    return replace(store, shares_prompts=obstacle is None)


@dataclass(frozen=True)
class ArrivalRoom:
    """Rows and slots of a store that receive other nodes' rows, for one selection of a stream."""

    first_row: int
    num_rows: int
    first_slot: int
    num_slots: int


def with_arrivals(
    config: GearConfig, store: TableSpec, exchange_plan: ExchangePlan, streams: Sequence[StreamSpec]
) -> tuple[TableSpec, dict[str, ArrivalRoom]]:
    """Return a store with rows and slots for arrivals, and the room of each stream.

    Raises:
        ConfigError: Trajectories may have any length, and goals are drawn from all of their steps.
    """
    dataset = store.dataset
    table = config.resolved_tables[store.name]
    longest = table.max_length if dataset is None else dataset.longest
    if config.pack is not None:
        # All streams share the room: it is for one rollout batch, of whole trajectories.
        most_steps = config.pack.room
        slots = max(spec.most_resolutions for spec in streams)
        most = min(longest or most_steps, most_steps) + exchange_plan.final_row
        if dataset is not None:  # a mapped one copies its own rows, too
            slots = min(slots, dataset.num_trajectories_of_whole)
            rows = slots * most
        else:
            others = exchange_plan.num_nodes - 1
            slots = min(slots, others * store.num_slots)
            rows = min(slots * most, others * store.num_rows)
        rooms = {spec.name: ArrivalRoom(EDGE, rows, 0, slots) for spec in streams}
        return replace(store, arrival_rows=rows + 2 * EDGE, arrival_slots=slots), rooms
    if longest is None:
        if exchange_plan.draws_goals:
            rule = "must be given where goals are relabelled on several nodes"
            raise ConfigError(
                f"gear.tables.{store.name}.max_length",
                rule,
                None,
                "set it to the length of the longest trajectory",
            )
        longest = table.capacity_steps or 0
    most = most_rows(exchange_plan.needs, longest, 0 if config.n_step is None else config.n_step.n)
    # For depth 2 and 3 samples of at most 5 rows, a stream has 30 rows and 6 slots.
    rooms = {}
    row = most + EDGE
    slot = 0
    for spec in streams:
        wanted = exchange_plan.most_wanted(spec.batch)
        rooms[spec.name] = ArrivalRoom(row, wanted * most, slot, wanted)
        row += spec.depth * wanted * most
        slot += spec.depth * wanted
    return replace(store, arrival_rows=row + most + EDGE, arrival_slots=slot), rooms


def writing_of(config: GearConfig, spec: TableSpec) -> dict[str, Any]:
    """Return the options that processes which only write need; empty for a data set."""
    if spec.dataset is not None:
        return {}
    table = config.resolved_tables[spec.name]
    given = with_schema(table.model_dump(mode="json", by_alias=True), spec.schema)
    return {
        "max_length": table.max_length,
        "weight": config.sampler_of(spec.name).columns.get("weight"),
        "timeout_s": config.items_timeout_s(spec.name),
        "options": options_of(config.seed, spec.name, given),
        "defaults": {"seed": defaults_of(GearConfig)["seed"], **DEFAULTS},
    }
