"""The processes of a node that read a stream's cuts, and waiting for them."""

from __future__ import annotations

import os
import time

import numpy as np

from deepspeed_gear.errors import PeerError
from deepspeed_gear.selection.cut import NOTHING, StreamSpec
from deepspeed_gear.store.table import PEER_PID, Table

_AWAKE_S = 500e-6


class Peers:
    """Who has consumed what of a stream. Process safe: each process writes its own word only.

    Args:
        spec: The stream.
        table: Its table, whose memory knows who is alive.
        consumed: Cuts that each process has done with, in the store. [peers], int64.
        timeout_s: How long the stream waits for them.
    """

    def __init__(self, spec: StreamSpec, table: Table, consumed: np.ndarray, timeout_s: float) -> None:
        self._spec, self._table, self._consumed, self._timeout_s = spec, table, consumed, timeout_s

    def late(self, old_key: int) -> list[int]:
        """Return the living peers that still need a cut."""
        if old_key == NOTHING:
            return []
        behind = [peer for peer, consumed in enumerate(self._consumed.tolist()) if consumed <= old_key]
        attached = [peer for peer in behind if self._table.peers[peer, PEER_PID] != 0]
        return [peer for peer in attached if self._table.memory.is_alive(peer)]

    def wait_awake(self, old_key: int) -> None:
        """Wait for the peers to consume a cut, without sleeping and without the lock, but not for long.

        Ranks that run side by side are late by microseconds. A sleep takes up to milliseconds on a busy
        core; by then it is the others who wait, and so in turn for ever.
        """
        until = time.monotonic() + _AWAKE_S
        while time.monotonic() < until and min(self._consumed.tolist()) <= old_key:
            os.sched_yield()

    def error(self, key: int, late: list[int]) -> PeerError:
        """Return the error of a wait for peers that was too long."""
        peers = ", ".join(f"local rank {p} (process {int(self._table.peers[p, PEER_PID])})" for p in late)
        return PeerError(
            f"stream {self._spec.name}: global batch {key}",
            f"must find room in the ring of {self._spec.depth} cuts in gear.timeout_s = {self._timeout_s} s",
            f"{peers} still needs an older one",
            "look why that rank stopped sampling; every rank must take every batch",
        )
