"""Pins: which trajectories are still read by selections, and releases of those of dead processes.

A writer, which has no batch streams, computes them from the streams' regions in the store
(store/eviction.cpp).
"""

from __future__ import annotations

import numpy as np

from deepspeed_gear.store.native_rows import address
from deepspeed_gear.store.records import NEVER_LATE, Peer
from deepspeed_gear.store.table import Table


class SelectionPins:
    """The pins of a store's streams. Every method requires the store's lock."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._store = table.extents.handle
        names = [name for name in table.views if name.endswith("/last_drawn")]
        self._last_drawn = [table.views[name] for name in names]
        # The newest global batch that each process has released, plus 1. [peers], int64.
        self._consumed = [table.views[name.replace("/last_drawn", "/consumed")] for name in names]

    @property
    def are_frozen(self) -> bool:
        """Whether a pass is under way in any stream, whose items stay until its end."""
        return bool(self._store.are_frozen())

    def pinned(self, slots: np.ndarray) -> np.ndarray:
        """Return which retired slots are still read or may be drawn. [n] -> [n], bool."""
        self.release_dead()
        found = np.zeros(len(slots), bool)
        slots = np.ascontiguousarray(slots, np.int64)
        self._store.find_held(address(slots), len(slots), address(found))
        return found

    def release_dead(self) -> None:
        """Release what dead processes have not released: they read no selection any more."""
        table = self._table
        for last_drawn, consumed in zip(self._last_drawn, self._consumed, strict=True):
            attached = table.peers[: len(consumed), Peer.PID] != 0
            for peer in np.nonzero((consumed <= last_drawn.max()) & attached)[0].tolist():
                if not table.memory.is_alive(peer):
                    consumed[peer] = NEVER_LATE

    def highest_priorities(self, slots: np.ndarray) -> np.ndarray:
        """Return each slot's highest priority; inf: newer than the latest selection. [n] -> [n]."""
        found = np.empty(len(slots), np.float32)
        slots = np.ascontiguousarray(slots, np.int64)
        self._store.find_priorities(address(slots), len(slots), address(found))
        return found
