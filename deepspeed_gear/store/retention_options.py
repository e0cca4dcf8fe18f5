"""The retention of a table's trajectories, from its config."""

from __future__ import annotations

from dataclasses import replace

from deepspeed_gear.config import GearConfig, TableConfig
from deepspeed_gear.config.table_options import RateLimiterConfig
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.store.eviction_policies import policy_class
from deepspeed_gear.store.rate_limiter import RateLimiter
from deepspeed_gear.store.retention import UNLIMITED, Retention


def retention_of(config: GearConfig, name: str, capacity: tuple[int, int], batch: int) -> Retention:
    """Return the retention of the trajectories of a table with a capacity.

    Args:
        config: The config.
        name: Of the table.
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
