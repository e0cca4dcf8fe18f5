"""What saving and loading need of a replay."""

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
        """What all ranks have agreed on."""
        ...

    @property
    def tables(self) -> Mapping[str, Table]:
        """The stores, by name of the table."""
        ...

    @property
    def streams(self) -> Mapping[str, Mapping[str, BatchStream]]:
        """Of each table, by name."""
        ...

    @property
    def train(self) -> Sequence[BatchStream]:
        """The training stream of each sampled table."""
        ...

    @property
    def barrier(self) -> BatchBarrier | None:
        """Of ranks that train together; None where none waits for another."""
        ...

    def leave_nodes(self) -> None:
        """Announce that this node prepares no further batch until it is asked for one."""

    def leave_inner_stage(self) -> None:
        """Let no process wait for this rank's reading where it reads nothing."""


class BatchSource(Protocol):
    """What hands out the training batches of a rank."""

    @property
    def where(self) -> Position:
        """The position after the last global batch of which every micro batch was used."""
        ...

    def stop(self) -> None:
        """End the thread that prepares batches."""

    def go_on_at(self, at: Position) -> None:
        """Continue at a position, at which the streams are already."""


def all_streams(view: ReplayView) -> list[BatchStream]:
    """Return the streams of all tables."""
    return [stream for streams in view.streams.values() for stream in streams.values()]
