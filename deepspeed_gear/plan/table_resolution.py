"""Resolution of a table's store: retention, rate limits, media, options that writers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.table_options import (
    DEFAULTS,
    RateLimiterConfig,
    TableConfig,
)
from deepspeed_gear.config.types import defaults_of
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.media import MediaSpec
from deepspeed_gear.data.ragged import item_columns
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.plan.prompt_resolution import group_spec_of, prompt_spec_of, sharing_obstacle
from deepspeed_gear.plan.stream_resolution import read_columns
from deepspeed_gear.plan.table_sizes import capacity_of
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.eviction import user_policy
from deepspeed_gear.store.rate_limiter import RateLimiter
from deepspeed_gear.store.retention import UNLIMITED, Retention
from deepspeed_gear.store.table_spec import Shard, TableSpec, spare_rows_for
from deepspeed_gear.store.writer_options import options_of, with_schema


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
