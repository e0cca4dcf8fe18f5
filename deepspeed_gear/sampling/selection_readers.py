"""Readers of a stream's selections: the processes of a node, and waits for them."""

from __future__ import annotations

import os
import time

import numpy as np

from deepspeed_gear.errors import PeerError
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.store.records import Peer
from deepspeed_gear.store.stream_records import NOTHING
from deepspeed_gear.store.table import Table

_AWAKE_S = 500e-6


class SelectionReaders:
    """How far each process has consumed a stream. Process safe: each process writes its own word only.

    Args:
        spec: The stream.
        table: Its table, whose memory tracks the living processes.
        reached: A counter of each process, in the store: the selections that it has released, or the global
            batch that it requested. [peers], int64.
        timeout_s: How long the stream waits for them.
    """

    def __init__(self, spec: StreamSpec, table: Table, reached: np.ndarray, timeout_s: float) -> None:
        self._spec, self._table, self._timeout_s = spec, table, timeout_s
        self._reached: memoryview = reached.data

    def late(self, old_key: int) -> list[int]:
        """Return the living peers that still need a selection."""
        return [] if old_key == NOTHING else self.lagging(old_key + 1)

    def lagging(self, key: int) -> list[int]:
        """Return the living peers whose counter has not reached a key."""
        if min(self._reached) >= key:
            return []
        lagging = [peer for peer, reached in enumerate(self._reached) if reached < key]
        attached = [peer for peer in lagging if self._table.peers[peer, Peer.PID] != 0]
        return [peer for peer in attached if self._table.memory.is_alive(peer)]

    def wait_awake(self, key: int) -> None:
        """Spin briefly until the peers reach a key; called without the lock.

        Concurrent ranks are late by microseconds. A sleep takes up to milliseconds on a busy core; then the
        other ranks wait for this one, and so in turn forever.
        """
        until = time.monotonic() + _AWAKE_S
        while time.monotonic() < until and min(self._reached) < key:
            os.sched_yield()

    def error(self, key: int, late: list[int], rule: str, missing: str) -> PeerError:
        """Return the error of a wait for peers that was too long."""
        peers = ", ".join(f"local rank {p} (process {int(self._table.peers[p, Peer.PID])})" for p in late)
        return PeerError(
            f"stream {self._spec.name}: global batch {key}",
            f"must {rule} in gear.timeout_s = {self._timeout_s} s",
            f"{peers} {missing}",
            "check why that rank stopped sampling; every rank must take every batch",
        )
