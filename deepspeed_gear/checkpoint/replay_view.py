"""Interfaces of a replay for saving and loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from deepspeed_gear.checkpoint.position import Position
from deepspeed_gear.distributed.batch_barrier import BatchBarrier
from deepspeed_gear.distributed.replay_plan import ReplayPlan
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.store.table import Table


class ReplayView(Protocol):
    """The stores of a replay, and the streams that sample from them."""

    @property
    def plan(self) -> ReplayPlan:
        """The plan that all ranks have agreed on."""
        ...

    @property
    def tables(self) -> Mapping[str, Table]:
        """The stores, by name of the table."""
        ...

    @property
    def streams(self) -> Mapping[str, Mapping[str, BatchStream]]:
        """The batch streams of each table, by name."""
        ...

    @property
    def train(self) -> Sequence[BatchStream]:
        """The training stream of each sampled table."""
        ...

    @property
    def barrier(self) -> BatchBarrier | None:
        """The batch barrier of ranks that train together; None without one."""
        ...

    def leave_nodes(self) -> None:
        """Announce that this node selects no further batch until one is requested."""

    def leave_inner_stage(self) -> None:
        """Mark this rank as no reader of streams, if it is an inner stage."""


class BatchSource(Protocol):
    """Source of a rank's training batches."""

    @property
    def where(self) -> Position:
        """The position after the last global batch whose micro batches were all used."""
        ...

    def stop(self) -> None:
        """Stop the prefetch thread."""

    def go_on_at(self, at: Position) -> None:
        """Continue at a position to which the streams are already set."""


def all_streams(view: ReplayView) -> list[BatchStream]:
    """Return the streams of all tables."""
    return [stream for streams in view.streams.values() for stream in streams.values()]
