"""A selection: its samples, the ranks that have yet to release it, the record of a failed one."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch

from deepspeed_gear.errors import PeerError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.outcome import Outcome
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.store.records import Peer
from deepspeed_gear.store.table import Table

# The number of a global batch in an evaluation pass: pass << PASS_SHIFT | batch.
PASS_SHIFT: Final = 32


class Selection(NamedTuple):
    """Samples of the selection of one global batch: all, as views of the store that are valid until
    `release`, or those of one micro batch, as copies.
    """

    head: list[int]  # position after the selection, and totals: the words of `Head`
    resolutions: torch.Tensor  # the resolution of each sample. [B, 8], int64.
    # PER weights, of a micro batch with priorities. [B], float32.
    weights: torch.Tensor | None = None
    # Epoch (or pass) of each sample; None: there are none. [B], int64.
    epochs: torch.Tensor | None = None
    # Where several nodes hold the table: shard << 32 | slot of each sample's trajectory; its
    # resolution holds the place of its rows on this node. [B], int64.
    origins: torch.Tensor | None = None
    is_gathered: bool = False  # whether its native call has gathered it, too


class ShardDraws(NamedTuple):
    """Which node holds each of some draws, and the resolutions of those that this one holds."""

    owner: np.ndarray  # index of the node of each draw. [n], int64
    indices: np.ndarray  # of this node's draws, ascending. [m], int64
    resolutions: torch.Tensor  # their resolutions. [m, 8], int64

    @property
    def slots(self) -> np.ndarray:
        """The slots of this node's draws. [m], int64."""
        return np.asarray(self.resolutions[:, Resolution.SLOT].numpy())

    def before(self, count: int) -> ShardDraws:
        """Return the first `count` draws."""
        num_own = int(np.searchsorted(self.indices, count))
        return ShardDraws(self.owner[:count], self.indices[:num_own], self.resolutions[:num_own])


NO_DRAWS: Final = ShardDraws(
    np.empty(0, np.int64),
    np.empty(0, np.int64),
    torch.empty(0, Resolution.NUM_WORDS, dtype=torch.int64),
)


@dataclass
class NodeDraws:
    """The draws of a selection over nodes, as one node has them until it exchanges them with the
    others.

    Every node has the node of each sample, and the resolutions of its own samples only.
    """

    number: int  # global batch
    entry: int  # of the ring
    count: int  # samples of all nodes; of a checkpoint, resolutions
    # Whether it is a checkpoint's selection, in which groups have all members.
    is_saved: bool = False
    first: int = 0  # sample number of the first one
    parts: list[ShardDraws] = field(default_factory=list)  # one after the other

    def add(self, done: int, first: int, draws: ShardDraws) -> None:
        """Add draws after the `done` ones in the selection, from sample number `first` on."""
        self.first = first - done
        self.parts.append(draws._replace(indices=draws.indices + done) if done else draws)

    def joined(self) -> ShardDraws:
        """Return all draws as one."""
        if len(self.parts) == 1:
            return self.parts[0]
        parts = [NO_DRAWS, *self.parts]
        return ShardDraws(
            np.concatenate([part.owner for part in parts]),
            np.concatenate([part.indices for part in parts]),
            torch.cat([part.resolutions for part in parts]),
        )


_AWAKE_S = 500e-6


class PeerProgress:
    """How far each process of the node is in a stream: the selections that it has released, or the
    batch that it has requested. [peers], int64. Each process writes its own word only.
    """

    def __init__(self, spec: StreamSpec, table: Table, reached: np.ndarray) -> None:
        self._spec = spec
        self._table = table
        self._reached: memoryview = reached.data

    def lagging(self, number: int) -> list[int]:
        """Return the living peers whose counter has not reached a number."""
        if min(self._reached) >= number:
            return []
        lagging = [peer for peer, reached in enumerate(self._reached) if reached < number]
        attached = [peer for peer in lagging if self._table.peers[peer, Peer.PID] != 0]
        return [peer for peer in attached if self._table.memory.is_alive(peer)]

    def wait_awake(self, number: int) -> None:
        """Spin briefly until the peers reach a number; without the lock. They are late by
        microseconds; after a sleep, of milliseconds on a busy core, they would wait for this rank,
        and so in turn forever.
        """
        until = time.monotonic() + _AWAKE_S
        while time.monotonic() < until and min(self._reached) < number:
            os.sched_yield()

    def error(self, number: int, late: list[int], rule: str, missing: str) -> PeerError:
        """Return the error of a wait for peers that was too long."""
        peers = ", ".join(
            f"local rank {p} (process {int(self._table.peers[p, Peer.PID])})" for p in late
        )
        rule = f"must {rule} in gear.timeout_s = {self._table.lock.timeout_s} s"
        remedy = "check why that rank stopped sampling; every rank must take every batch"
        return PeerError(
            f"stream {self._spec.name}: global batch {number}", rule, f"{peers} {missing}", remedy
        )


# words of a failure: how many there were, its global batch, and its outcome
_COUNT = 0
_NUMBER = 1
_OUTCOME = 2


class SelectionFailure:
    """The latest failure of a stream on this node. Process safe: takes the table's lock itself."""

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        self._lock = table.lock
        self._words = table.views[spec.at + "notice"]
        self._outcome: np.ndarray = self._words[_OUTCOME:]
        self._seen = 0  # failures up to the latest one that this process has raised, or written

    def write(self, number: int, error: Exception) -> None:
        """Record the failure of a global batch's selection."""
        with self._lock:
            self._outcome[:] = Outcome.of(error).words(len(self._outcome))
            self._words[_NUMBER] = number
            self._words[_COUNT] += 1
            self._seen = int(self._words[_COUNT])

    def forget(self) -> None:
        """Discard the failures recorded until now: their selections are tried again."""
        self._seen = int(self._words[_COUNT])

    def check(self, number: int) -> None:
        """Raise a batch's recorded failure, once: StoreError (until contents or priorities change),
        NotReadyError (rate limiter) or PeerError.
        """
        if self._words[_COUNT] == self._seen:
            return
        with self._lock:
            count = int(self._words[_COUNT])
            failed = int(self._words[_NUMBER])
            outcome = Outcome.read(self._outcome)
        self._seen = count
        if failed == number:
            raise outcome.error("the first rank of this node", is_own=True)
