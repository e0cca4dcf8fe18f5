"""How a stream waits for its gate: alone, or together with the other nodes that hold its table."""

from __future__ import annotations

import time

from deepspeed_gear.selection.cut import CLOSED, COLLECTS, KEY, StreamSpec
from deepspeed_gear.selection.gate import Gate, Waiting
from deepspeed_gear.selection.joint import JointGate
from deepspeed_gear.selection.masses import Masses
from deepspeed_gear.selection.staleness import Staleness
from deepspeed_gear.store.extents import CUTTING
from deepspeed_gear.store.table import Table

IDLE_S, MOST_PAUSE_S = 500e-6, 8e-3
_LOOK_S = 1.0  # how often a cut looks for writers that have died


class Gated:
    """The part of a stream that waits for its gate, which is made by `Stream`."""

    spec: StreamSpec
    masses: Masses
    gate_wait: Waiting
    joint: JointGate | None  # where several nodes hold the table
    collects_here: bool  # this process writes too: it must not wait for itself
    table: Table
    _is_online: bool  # the table has a capacity
    _look_again: float
    _staleness: Staleness | None
    _control: memoryview
    _gate: Gate | None
    _pause_s: float
    _words: memoryview

    @property
    def is_gated(self) -> bool:
        """Whether a cut may have to wait for items."""
        return self._gate is not None

    def collect(self) -> None:
        """Say that this process writes too."""
        self.collects_here = True
        if self.joint is not None:
            self._words[COLLECTS] = 1

    def prepare(self, key: int) -> bool:
        """See to what the table must not hold for a global batch; return whether it has been cut.

        What is too old goes, and now and then what writers have left that died. Wants the lock.
        """
        if key < self._words[KEY]:
            return True
        if self._is_online and time.monotonic() > self._look_again:
            self.table.unfinished.end_abandoned()
            self._look_again = time.monotonic() + _LOOK_S
        if self._staleness is not None and not self._control[CUTTING]:
            self.masses.take_changes()
            self._staleness.drop(key)
        return False

    def count_of(self, key: int) -> int:
        """Return the samples of a global batch."""
        return self.spec.batch if self.spec.count is None else self.spec.count(key)

    def _wait_for_gate(self, key: int) -> None:
        """Wait a moment for items that a cut may draw; not if they must come from this very process."""
        gate = self._gate
        assert gate is not None
        waited = self.gate_wait.wait()
        if self.collects_here or waited > self.gate_wait.timeout_s:
            self.gate_wait.end()
            raise gate.too_late(key, self.count_of(key), 0.0 if self.collects_here else waited)
        time.sleep(IDLE_S)

    def _wait_together(self) -> None:
        """Wait a moment before all nodes look at their gate again; the others of this node know of it."""
        self._words[CLOSED] = 1
        self.gate_wait.wait()
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)

    def _end_wait(self) -> None:
        self._words[CLOSED] = 0
        self._pause_s = IDLE_S
        self.gate_wait.end()
