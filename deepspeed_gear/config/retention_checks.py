"""Checks of options of tables that are written while they are read: eviction and rate limiter."""

from __future__ import annotations

from deepspeed_gear.config.options import GearOptions
from deepspeed_gear.config.table_options import RateLimiterConfig, TableConfig
from deepspeed_gear.errors import ConfigError


def check_retention(config: GearOptions, table: TableConfig, at: str, name: str) -> None:
    """Reject options of a table with a capacity that contradict one another.

    Raises:
        ConfigError: Two options conflict, or one needs another.
    """
    if (table.remove == "keep_best") != (table.keep_best is not None):
        rule = 'must be given with remove = "keep_best", and only then'
        raise ConfigError(f"{at}.keep_best", rule, table.keep_best, "name a per-trajectory column")
    sampled = name in config.sampled_tables
    if table.remove == "lowest_priority" and not (sampled and config.item_sampler.has_priorities):
        rule = 'must not be "lowest_priority" without priorities'
        raise ConfigError(f"{at}.remove", rule, None, "use a prioritized sampler, or keep_best")
    if table.max_times_sampled and (not sampled or config.item_sampler.unit == "step"):
        rule = 'needs sampler.unit = "trajectory" or "group"'
        raise ConfigError(f"{at}.max_times_sampled", rule, table.max_times_sampled, "sample trajectories")
    if table.max_times_sampled and getattr(config.item_sampler, "stratified", False):
        rule = "must not be given together with sampler.stratified"
        raise ConfigError(f"{at}.max_times_sampled", rule, table.max_times_sampled, "drop one")
    if table.rate_limiter is not None:
        _check_rate(config, table, table.rate_limiter, at, sampled)


def _check_rate(
    config: GearOptions, table: TableConfig, rate: RateLimiterConfig, at: str, sampled: bool
) -> None:
    if not sampled:
        raise ConfigError(f"{at}.rate_limiter", "must not be given for a table that is not sampled", None)
    if rate.queue is not None:
        others = {"min_size", "samples_per_insert", "error_buffer"} & rate.model_fields_set
        if others:
            rule = f"must not be given together with {at}.rate_limiter.queue"
            raise ConfigError(f"{at}.rate_limiter.{min(others)}", rule, None, "drop one")
        if config.item_sampler.kind != "fifo" or config.item_sampler.unit == "step":
            rule = 'needs sampler.kind = "fifo" and sampler.unit = "trajectory" or "group"'
            raise ConfigError(f"{at}.rate_limiter.queue", rule, rate.queue)
        if table.max_times_sampled > 1:
            rule = "must be 1 in a queue, or left out"
            raise ConfigError(f"{at}.max_times_sampled", rule, table.max_times_sampled)
    if rate.error_buffer is not None and rate.samples_per_insert is None:
        rule = f"must not be given without {at}.rate_limiter.samples_per_insert"
        raise ConfigError(f"{at}.rate_limiter.error_buffer", rule, rate.error_buffer)
    if rate.samples_per_insert is not None and config.item_sampler.unit == "step" and not table.max_length:
        rule = f"must be given with {at}.rate_limiter.samples_per_insert where items are steps"
        remedy = "the longest trajectory bounds the items of an addition"
        raise ConfigError(f"{at}.max_length", rule, None, remedy)
    held = table.capacity_steps if config.item_sampler.unit == "step" else table.capacity_trajectories
    if held is not None and table.group is not None:
        held //= table.group.size
    if held is not None and rate.min_size > held:
        raise ConfigError(
            f"{at}.rate_limiter.min_size", f"must be at most what the table holds ({held})", rate.min_size
        )
