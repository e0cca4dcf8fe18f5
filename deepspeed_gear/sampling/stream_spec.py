"""Specification of a batch stream, from which its memory is laid out; equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed_gear.sampling.mass_rules import MassRule, PriorityRule
from deepspeed_gear.sampling.samplers.base import Sampler, SamplerSpec
from deepspeed_gear.timeouts import DEFAULT_TIMEOUT_S

FAILURE_WORDS = 256  # of the record of a failed selection, with its text


@dataclass(frozen=True)
class StreamSpec:
    """A batch stream: the global batches of one purpose, sampled from one table."""

    name: str  # "train", or the name of a split
    sampler: Sampler
    sampling: SamplerSpec  # masses and draw of the sampler
    seed: int
    random_key: int  # 32 bits of table and stream, a part of the counter of every random word
    batch: int  # samples of a global batch, which are items
    depth: int  # selections that the ring keeps
    # Samples of a global batch by its number, at most `batch`; None: always `batch`.
    count: Callable[[int], int] | None = None
    # A batch has no samples of the table while its limits do not admit them.
    is_optional: bool = False
    count_draws: bool = False  # count how often each item was drawn
    num_shards: int = 1  # nodes over which the table is spread
    together: bool = False  # whether several nodes make its selections together
    # By global batch, index of its first sample among those of all tables; None: 0.
    offset: Callable[[int], int] | None = None
    rate_timeout_s: float = DEFAULT_TIMEOUT_S  # longest wait for the rate limiter
    most_trajectories: int = 1  # of an item: more than 1 where items are groups

    @property
    def rule(self) -> MassRule:
        return self.sampling.rule

    @property
    def priorities(self) -> PriorityRule | None:
        """How masses follow priorities; None: masses are those of the rule."""
        return self.sampling.priorities

    @property
    def by_age(self) -> bool:
        return self.sampling.by_age or self.rule.window is not None

    @property
    def by_group(self) -> bool:
        return self.rule.unit == "group"

    @property
    def most_resolutions(self) -> int:
        """Trajectories that a selection holds at most."""
        return self.batch * self.most_trajectories

    @property
    def at(self) -> str:
        """Prefix of the names of its regions."""
        return f"stream/{self.name}/"

    def num_samples(self, number: int) -> int:
        return self.batch if self.count is None else self.count(number)

    def describe(self) -> dict[str, Any]:
        """Return the description of the stream for readers of the store; JSON-able."""
        kind = self.sampler.kind if self.count is None else f"mixture of {self.sampler.kind}"
        return {"kind": kind, "walks": self.sampler.walks, **self.rule.describe()}
