"""Options of tables as values of the store: retention and groups, from the config."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from deepspeed_gear.config import GearConfig, TableConfig
from deepspeed_gear.config.table_options import MOST_REMEMBERED, GroupConfig, RateLimiterConfig
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.eviction import policy_class
from deepspeed_gear.store.group_spec import STATISTICS, GroupCondition, GroupSpec
from deepspeed_gear.store.retention import UNLIMITED, RateLimiter, Retention


def group_spec_of(group: GroupConfig, schema: Schema, read: Iterable[str], num_slots: int = 0) -> GroupSpec:
    """Return the specification of a table's groups.

    Args:
        num_slots: Trajectories that the store can hold; 0: it is a data set, which no group leaves.
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


def retention_of(config: GearConfig, name: str, capacity: tuple[int, int], batch: int) -> Retention:
    """Return the retention of the trajectories of a table with a capacity.

    Args:
        capacity: Steps and trajectories that a store holds.
        batch: Samples of a global batch that come from the table.
    Raises:
        ConfigError: The rate limiter never admits a batch, or there is no such eviction policy.
    """
    table, at = config.resolved_tables[name], f"gear.tables.{name}"
    policy_class(table.remove, f"{at}.remove")
    queue = table.rate_limiter is not None and table.rate_limiter.queue is not None
    times = table.max_times_sampled or int(queue)
    steps, trajectories = capacity if table.remove != "none" else (UNLIMITED, UNLIMITED)
    rate = None if table.rate_limiter is None else _rate(config, table, table.rate_limiter, batch, at)
    retention = Retention(table.remove, table.keep_best, steps, trajectories, times, rate, table.max_age)
    if table.version is None:
        return retention
    version = table.version
    waits = version.on_stale == "wait"
    return replace(retention, version_column=version.column, max_lag=version.max_lag, waits=waits)


def _rate(
    config: GearConfig, table: TableConfig, rate: RateLimiterConfig, batch: int, at: str
) -> RateLimiter:
    unit = config.item_sampler.unit
    if rate.queue is not None:
        if rate.queue < batch:
            rule = f"must be at least a global batch ({batch})"
            raise ConfigError(f"{at}.rate_limiter.queue", rule, rate.queue)
        return RateLimiter.queue(unit, rate.queue)
    if rate.samples_per_insert is None:
        return RateLimiter.least_size(unit, rate.min_size)
    longest = (table.max_length or 1) if unit == "step" else 1
    # The longest addition must be admitted while a batch waits, and while one item is missing at first.
    least = (batch + rate.samples_per_insert * longest) / 2
    least = max(least, rate.samples_per_insert * (longest - 1))
    buffer = rate.error_buffer
    if buffer is None:
        buffer = max(least, rate.samples_per_insert * rate.min_size)
    if buffer < least:
        raise ConfigError(
            f"{at}.rate_limiter.error_buffer",
            f"must be at least {least:g}",
            buffer,
            f"half of a global batch ({batch}) and of what the longest addition brings, and what it brings "
            "without one item, or both sides wait",
        )
    return RateLimiter.ratio(unit, rate.min_size, rate.samples_per_insert, buffer)
