"""Interfaces of a replay for saving and loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from deepspeed_gear.checkpoint.position import LoaderPosition
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

    def stop_prefetching(self) -> None:
        """Stop the prefetch thread; the next batch starts another."""

    def leave_nodes(self) -> None:
        """Announce that this node selects no further batch until one is requested."""

    def leave_inner_stage(self) -> None:
        """Mark this rank as no reader of streams, if it is an inner stage."""


class Loader(Protocol):
    """Source of a rank's training batches, which its `next` returns: windows, or packs of rollout batches."""

    @property
    def position(self) -> LoaderPosition:
        """How far its batches are."""
        ...

    def check(self, rollout: Mapping[str, Any] | None) -> None:
        """Raise unless a rollout batch whose training is under way can be continued here.

        Raises:
            CheckpointError: It cannot.
        """

    def seek(self, position: LoaderPosition) -> None:
        """Continue at a position to which the streams are already set."""


def all_streams(view: ReplayView) -> list[BatchStream]:
    """Return the streams of all tables."""
    return [stream for streams in view.streams.values() for stream in streams.values()]
