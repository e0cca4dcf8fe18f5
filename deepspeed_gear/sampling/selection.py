"""What a stream draws, and what a cut of it holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.sampling.mass_rules import MassRule, PriorityRule
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.stream_records import Head

NOTICE_WORDS = 256
PASS_SHIFT = 32  # a pass over an evaluation split: key = pass << 32 | batch


@dataclass(frozen=True)
class StreamSpec:
    """What a stream draws.

    Args:
        name: "train", or the name of a split.
        kind: "random" (independent draws), "stratified" (draws from equal parts), "epoch" (a keyed order,
            again and again), "pass" (stored order, once), "top" (the highest priorities), "oldest" or
            "newest".
        rule: Masses of the trajectories.
        seed: Of the run.
        key: 32-bit key of table and stream.
        batch: Samples of a global batch.
        depth: Cuts that the ring keeps.
        priorities: How masses follow priorities; None: masses are those of the rule.
        drop: Leave the end of an epoch out that does not fill a global batch.
        count: Samples of a global batch by its number, at most `batch`; None: always `batch`.
        count_draws: Keep how often each item was drawn.
        num_shards: Nodes over which the table is spread.
        together: Whether several nodes make its cuts together.
        offset: By global batch, where its samples begin among those of all tables; None: at 0.
    """

    name: str
    kind: str
    rule: MassRule
    seed: int
    key: int
    batch: int
    depth: int
    priorities: PriorityRule | None = None
    drop: bool = False
    count: Callable[[int], int] | None = None
    count_draws: bool = False
    num_shards: int = 1
    together: bool = False
    offset: Callable[[int], int] | None = None

    @property
    def at(self) -> str:
        """First part of the names of its regions."""
        return f"stream/{self.name}/"

    def describe(self) -> dict[str, Any]:
        """Return what a reader of the store has to know; JSON-able."""
        most_bits = {} if self.priorities is None else {"most_bits": self.priorities.most_bits}
        return {"kind": self.kind, **self.rule.describe(), **most_bits}

    def regions(self, num_peers: int) -> list[Region]:
        """Return what the cuts of the stream keep in the store; its masses have regions of their own."""
        origins = Region(self.at + "origins", "int64", (self.depth, self.batch))
        notice = Region(self.at + "notice", "int64", (NOTICE_WORDS,))
        return [
            *([origins] if self.num_shards > 1 else []),
            *([notice] if self.together else []),
            Region(self.at + "position", "int64", (Head.NUM_WORDS,)),
            Region(self.at + "consumed", "int64", (num_peers,)),
            Region(self.at + "heads", "int64", (self.depth, Head.NUM_WORDS)),
            Region(self.at + "ring", "int64", (self.depth, self.batch, Resolution.NUM_WORDS)),
            Region(self.at + "epochs", "int64", (self.depth, self.batch)),
        ]


class Selection(NamedTuple):
    """One global batch as this process sees it.

    Args:
        key: Number of the global batch (pass << 32 | number in an evaluation pass).
        head: Position after the cut and totals: `Head.NUM_SET` words.
        resolutions: What the draws resolved to, in the store. [batch, 8], int64; valid until `consume`.
        epochs: Epoch (or pass) of each sample, in the store. [batch], int64; likewise.
        origins: Where several nodes hold the table: shard << 32 | slot of each sample's trajectory; its
            resolution says where its rows lie on this node. [batch], int64; likewise.
    """

    key: int
    head: list[int]
    resolutions: torch.Tensor
    epochs: torch.Tensor
    origins: torch.Tensor | None = None
