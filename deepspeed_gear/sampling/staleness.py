"""Staleness: evicts trajectories that are too old, by policy version or age in global batches."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.records import Control, Peer, SlotRetention
from deepspeed_gear.store.table import Table


class Staleness:
    """Evicts the stale trajectories of a table with such limits. Every method requires the table's
    lock.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self.retention = table.spec.retention
        self._versions: np.ndarray = table.views["retention"][:, SlotRetention.POLICY_VERSION]
        self._num_stale, self._stale_steps = table.views["stale"]  # by length
        self._control: memoryview = table.control.data
        self._dropped = (-1, -1, -1)  # batch, policy version and changes at the last call

    def note_versions(self, slots: np.ndarray) -> None:
        """Record the oldest policy version of each new trajectory. [n]."""
        name = self.retention.version_column
        if name is None:
            return
        column = self._table.columns[name]
        records = self._table.slots
        for slot in slots.tolist():
            first = records[slot, Slot.FIRST_ROW]
            steps = records[slot, Slot.NUM_STEPS]
            self._versions[slot] = column[first : first + steps].min()

    def drop(self, number: int) -> None:
        """Evict the trajectories that are too old for a global batch, and count them by length."""
        now = number, self._control[Control.POLICY_VERSION], self._control[Control.CHANGED]
        if now == self._dropped:
            return
        records = self._table.slots
        ledger = self._table.ledger
        committed = np.nonzero(records[:, Slot.STATE] == SlotState.COMMITTED)[0]
        old = np.zeros(len(committed), bool)
        if self.retention.version_column is not None:
            newest = self._table.control[Control.POLICY_VERSION]
            old |= self._versions[committed] < newest - self.retention.max_lag
        if self.retention.max_age:
            old |= number - records[committed, Slot.BORN] > self.retention.max_age
        if ledger is not None:
            old |= ledger.too_old(committed, number)
        for slot in self._table.evict(committed[old]).tolist():
            num_steps = int(self._table.num_steps_of(np.array([slot]))[0])
            length = num_steps.bit_length() - 1
            self._num_stale[length] += 1
            self._stale_steps[length] += num_steps
        self._dropped = (
            number,
            self._control[Control.POLICY_VERSION],
            self._control[Control.CHANGED],
        )

    def open_lagging(self, version: int) -> list[int]:
        """Return the living processes whose open trajectories would exceed the lag at a version."""
        oldest = self._table.peers[:, Peer.OLDEST_OPEN] - 1
        lagging = np.nonzero((oldest >= 0) & (oldest < version - self.retention.max_lag))[
            0
        ].tolist()
        attached = [peer for peer in lagging if self._table.peers[peer, Peer.PID] != 0]
        return [peer for peer in attached if self._table.memory.is_alive(peer)]


def dropped(table: Table) -> dict[str, Any]:
    """Return the counts of stale trajectories: trajectories, steps, and trajectories by length."""
    numbers, steps = table.views.get("stale", np.zeros((2, 1), np.int64))  # none of a data set
    by_length = {
        f"{1 << n}-{(2 << n) - 1}": int(numbers[n]) for n in np.nonzero(numbers)[0].tolist()
    }
    return {"trajectories": int(numbers.sum()), "steps": int(steps.sum()), "by_length": by_length}
