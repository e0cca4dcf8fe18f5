"""Options of tables that are written while they are read: who goes, who waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le
from pydantic import Field

from deepspeed_gear.config.types import Count, Float, GearModel, Int, Name, Positive, Timeout
from deepspeed_gear.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_gear.config.model import GearConfig
    from deepspeed_gear.config.table_options import TableConfig

Writers = Annotated[Int, Ge(0), Le(1024)]
RemoveKind = Literal["none", "fifo", "lifo", "uniform", "lowest_priority", "keep_best"]


class RateLimiterConfig(GearModel):
    """How far who adds and who samples may be ahead of each other: whoever is too far ahead waits.

    Items are what the sampler's `unit` says. With I items ever added and S samples ever drawn,
    I * samples_per_insert - S stays within `error_buffer` of what it is at `min_size` items. The items of all
    nodes count.

    Source: Cassirer et al., "Reverb: A Framework For Experience Replay", 2021, section 3.3.
    """

    min_size: Count = Field(
        default=1,
        description="Nothing is sampled while fewer items are held; so many may be added at any time.",
    )
    samples_per_insert: Positive | None = Field(
        default=None, description="Samples drawn for each item added. null: as many as come."
    )
    error_buffer: Annotated[Float, Ge(0)] | None = Field(
        default=None,
        description=(
            "How far the samples may be ahead or behind. At least half of a global batch and of what the "
            "longest trajectory adds, and what this adds without one item. null: `min_size` times "
            "`samples_per_insert`, or that if it is more."
        ),
    )
    queue: Count | None = Field(
        default=None,
        description=(
            "Each trajectory is drawn once, in the order in which they came, and so many may wait. With the "
            'sampler "fifo"; without the other options of the rate limiter.'
        ),
    )
    timeout_s: Timeout = Field(
        default=600.0,
        description="Seconds after which a wait of who samples or adds is an error; at most 7 days.",
    )


class VersionConfig(GearModel):
    """How far the policy that made a trajectory may be behind the learner's (`Replay.set_version`).

    A trajectory is as old as the oldest policy in it.
    """

    column: Name = Field(description="The integer column that holds the policy's version of each step.")
    max_lag: Annotated[Int, Ge(0)] = Field(description="Versions that it may be behind.")
    on_stale: Literal["drop", "wait"] = Field(
        default="drop",
        description=(
            'What happens to those that fall behind. "drop": they go, and are counted by length. "wait": a '
            "new version waits until no actor's open trajectory would; what is complete goes as ever."
        ),
    )


def check_life(config: GearConfig, table: TableConfig, at: str, name: str) -> None:
    """Refuse options of a table with a capacity that contradict one another.

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
    if table.max_times_sampled and (not sampled or config.item_sampler.unit != "trajectory"):
        rule = 'needs sampler.unit = "trajectory"'
        raise ConfigError(f"{at}.max_times_sampled", rule, table.max_times_sampled, "sample trajectories")
    if table.max_times_sampled and getattr(config.item_sampler, "stratified", False):
        rule = "must not be given together with sampler.stratified"
        raise ConfigError(f"{at}.max_times_sampled", rule, table.max_times_sampled, "drop one")
    if table.rate_limiter is not None:
        _check_rate(config, table, table.rate_limiter, at, sampled)


def _check_rate(
    config: GearConfig, table: TableConfig, rate: RateLimiterConfig, at: str, sampled: bool
) -> None:
    if not sampled:
        raise ConfigError(f"{at}.rate_limiter", "must not be given for a table that is not sampled", None)
    if rate.queue is not None:
        others = {"min_size", "samples_per_insert", "error_buffer"} & rate.model_fields_set
        if others:
            rule = f"must not be given together with {at}.rate_limiter.queue"
            raise ConfigError(f"{at}.rate_limiter.{min(others)}", rule, None, "drop one")
        if config.item_sampler.kind != "fifo" or config.item_sampler.unit != "trajectory":
            rule = 'needs sampler.kind = "fifo" and sampler.unit = "trajectory"'
            raise ConfigError(f"{at}.rate_limiter.queue", rule, rate.queue)
        if table.max_times_sampled > 1:
            rule = "must be 1 in a queue, or left out"
            raise ConfigError(f"{at}.max_times_sampled", rule, table.max_times_sampled)
    if rate.error_buffer is not None and rate.samples_per_insert is None:
        rule = f"must not be given without {at}.rate_limiter.samples_per_insert"
        raise ConfigError(f"{at}.rate_limiter.error_buffer", rule, rate.error_buffer)
    if rate.samples_per_insert is not None and config.item_sampler.unit == "step" and not table.max_length:
        rule = f"must be given with {at}.rate_limiter.samples_per_insert where items are steps"
        remedy = "the longest trajectory says how far an addition goes"
        raise ConfigError(f"{at}.max_length", rule, None, remedy)
    held = table.capacity_steps if config.item_sampler.unit == "step" else table.capacity_trajectories
    if held is not None and rate.min_size > held:
        raise ConfigError(
            f"{at}.rate_limiter.min_size", f"must be at most what the table holds ({held})", rate.min_size
        )
