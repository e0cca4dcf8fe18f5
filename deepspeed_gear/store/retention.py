"""Retention: how long trajectories stay in a table, by eviction, draw limits and age. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_gear.store.rate_limiter import RateLimiter

UNLIMITED = (1 << 62) - 1


@dataclass(frozen=True)
class Retention:
    """Retention of a table's trajectories.

    Args:
        eviction: Name of the eviction policy, or "module:Class".
        column: Per-trajectory column whose lowest values are evicted first, with "keep_best".
        max_steps, max_trajectories: Limits below the capacity.
        max_times_sampled: Draws after which a trajectory is evicted; 0: never.
        rate_limiter: When writers or samplers block; None: never.
        max_age: Global batches after which a trajectory is evicted; 0: never.
        version_column, max_lag: Column of policy versions, and the largest lag of a stored one.
        waits: Whether a new version waits for open trajectories that would exceed the lag.
    """

    eviction: str = "none"
    column: str | None = None
    max_steps: int = UNLIMITED
    max_trajectories: int = UNLIMITED
    max_times_sampled: int = 0
    rate_limiter: RateLimiter | None = None
    max_age: int = 0
    version_column: str | None = None
    max_lag: int = 0
    waits: bool = False

    @property
    def rate_words(self) -> tuple[Any, ...]:
        """Return the rate limiter as the native `Store.set_retention` takes it."""
        rate = self.rate_limiter
        if rate is None:
            return ()
        return rate.unit == "step", rate.min_size, rate.samples_per_insert, rate.most

    def to_json(self) -> dict[str, Any]:
        """Return the retention as JSON-able values."""
        values = asdict(self)
        if self.rate_limiter is not None:  # JSON has no infinity
            values["rate_limiter"].update(
                least=repr(self.rate_limiter.least), most=repr(self.rate_limiter.most)
            )
        return values

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Retention:
        """Return the retention that `to_json` was called on."""
        rate = values["rate_limiter"]
        if rate is not None:
            rate = RateLimiter(**{**rate, "least": float(rate["least"]), "most": float(rate["most"])})
        return cls(**{**values, "rate_limiter": rate})
