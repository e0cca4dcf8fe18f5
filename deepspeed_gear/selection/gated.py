"""How a stream waits for its gate: alone, or together with the other nodes that hold its table."""

from __future__ import annotations

import time

from deepspeed_gear.selection.cut import CLOSED, COLLECTS, StreamSpec
from deepspeed_gear.selection.gate import Gate, Waiting
from deepspeed_gear.selection.joint import JointGate
from deepspeed_gear.selection.masses import Masses

IDLE_S, MOST_PAUSE_S = 500e-6, 8e-3


class Gated:
    """The part of a stream that waits for its gate, which is made by `Stream`."""

    spec: StreamSpec
    masses: Masses
    gate_wait: Waiting
    joint: JointGate | None  # where several nodes hold the table
    collects_here: bool  # this process writes too: it must not wait for itself
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

    def may_cut(self, key: int) -> bool:
        """Return whether a global batch has been cut, or could be cut now from this store. Wants the lock."""
        if self.prepare(key):
            return True
        gate = self._gate
        if gate is not None:
            return gate.is_open(self.count_of(key))
        return self.masses.will_have_mass()

    def prepare(self, key: int) -> bool:
        """Drop what is too old for a global batch; return whether it has been cut. Wants the lock."""
        raise NotImplementedError

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
