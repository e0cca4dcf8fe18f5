"""A selection: the samples of one global batch in the store, its readers, and the record of a
failed one.
"""

from __future__ import annotations

import os
import time
from typing import Final, NamedTuple

import numpy as np
import torch

from deepspeed_gear.errors import PeerError
from deepspeed_gear.outcome import Outcome
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.store.records import Peer
from deepspeed_gear.store.table import Table

PASS_SHIFT: Final = (
    32  # the number of a global batch in an evaluation pass: pass << PASS_SHIFT | batch
)


class Selection(NamedTuple):
    """Samples of the selection of one global batch: all, as views of the store that are valid until
    `release`, or those of one micro batch, as copies.
    """

    head: list[int]  # position after the selection, and totals: the words of `Head`
    resolutions: torch.Tensor  # the resolution of each sample. [B, 8], int64.
    weights: torch.Tensor | None = (
        None  # PER weights, of a micro batch with priorities. [B], float32.
    )
    epochs: torch.Tensor | None = (
        None  # epoch (or pass) of each sample; None: there are none. [B], int64.
    )
    # Where several nodes hold the table: shard << 32 | slot of each sample's trajectory; its
    # resolution holds the place of its rows on this node. [B], int64.
    origins: torch.Tensor | None = None


_AWAKE_S = 500e-6


class SelectionReaders:
    """How far each process has consumed a stream: selections released, or the batch requested.
    [peers], int64. Each process writes its own word only.
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
