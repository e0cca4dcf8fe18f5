"""Retention: how long trajectories stay: limits of steps, age, lag and draws; policy. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_gear.store.rate_limiter import RateLimiter

UNLIMITED = (1 << 62) - 1


@dataclass(frozen=True)
class Retention:
    """The limits of a store, its eviction policy, and its rate limiter."""

    eviction: str = "none"  # name of the eviction policy, or "module:Class"
    # Per-trajectory column whose lowest values are evicted first, with "keep_best"
    column: str | None = None
    max_steps: int = UNLIMITED  # limits below the capacity
    max_trajectories: int = UNLIMITED
    max_times_sampled: int = 0  # draws after which a trajectory is evicted; 0: never
    rate_limiter: RateLimiter | None = None  # when writers or samplers block; None: never
    max_age: int = 0  # global batches after which a trajectory is evicted; 0: never
    version_column: str | None = None  # column of policy versions
    max_lag: int = 0  # largest lag of a stored policy version
    # Whether a new version waits for open trajectories that would exceed the lag
    waits: bool = False
