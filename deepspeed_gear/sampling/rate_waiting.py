"""How a stream waits for its gate: alone, or together with the other nodes that hold its table."""

from __future__ import annotations

import time

from deepspeed_gear.sampling.global_rate_gate import GlobalRateGate
from deepspeed_gear.sampling.rate_gate import EmptyError, GateWait, RateGate
from deepspeed_gear.sampling.selection import StreamSpec
from deepspeed_gear.sampling.staleness import Staleness
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.futex import FutexEvents
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.stream_records import Head, Position
from deepspeed_gear.store.table import Table

IDLE_S, MOST_PAUSE_S = 500e-6, 8e-3
LISTEN_S = 0.02  # after which a wait looks whether it is to end
_LOOK_S = 1.0  # how often a cut looks for writers that have died


class Gated:
    """The part of a stream that waits for its gate, which is made by `Stream`."""

    spec: StreamSpec
    masses: ItemMasses
    gate_wait: GateWait
    joint: GlobalRateGate | None  # where several nodes hold the table
    collects_here: bool  # this process writes too: it must not wait for itself
    table: Table
    _is_online: bool  # the table has a capacity
    _look_again: float
    _staleness: Staleness | None
    _control: memoryview
    _gate: RateGate | None
    _is_limited: bool  # it is closed at times
    _bells: FutexEvents | None
    _pause_s: float
    _words: memoryview

    @property
    def is_gated(self) -> bool:
        """Whether a cut may have to wait for items."""
        return self._is_limited or self.table.spec.num_writers > 0

    def collect(self) -> None:
        """Say that this process writes too."""
        self.collects_here = True
        if self.joint is not None:
            self._words[Position.WRITES] = 1

    def prepare(self, key: int) -> bool:
        """See to what the table must not hold for a global batch; return whether it has been cut.

        What is too old goes, and now and then what writers have left that died. Wants the lock.
        """
        if key < self._words[Head.KEY]:
            return True
        if self._is_online and time.monotonic() > self._look_again:
            self.table.unfinished.end_abandoned()
            self._look_again = time.monotonic() + _LOOK_S
        if self._staleness is not None and not self._control[Control.SELECTING]:
            self.masses.take_changes()
            self._staleness.drop(key)
        return False

    def count_of(self, key: int) -> int:
        """Return the samples of a global batch."""
        return self.spec.batch if self.spec.count is None else self.spec.count(key)

    def _wait_for_gate(self, key: int, heard: int, empty: EmptyError | None = None) -> None:
        """Wait for items that a cut may draw, until a slot changes but not for long.

        Args:
            key: Number of the global batch.
            heard: What `_listen` has returned, before the gate was looked at.
            empty: Why nothing can be drawn although the gate is open; None: the gate is closed.
        Raises:
            NotReadyError: No other process adds items, or none came in time.
            StoreError: Nothing can be drawn, and no process may attach that adds something.
        """
        gate = self._gate
        if empty is not None and (gate is None or not (self.is_gated or self.collects_here)):
            raise empty.error
        assert gate is not None
        waited = self.gate_wait.wait()
        waits_for_itself = self.collects_here or (gate.is_plain and not gate.has_writers)
        if waits_for_itself or waited > self.gate_wait.timeout_s:
            self.gate_wait.end()
            waited = 0.0 if waits_for_itself else waited
            with self.table.lock:
                raise gate.too_late(key, self.count_of(key), waited, is_empty=empty is not None)
        if self._bells is None:
            time.sleep(IDLE_S)
        else:
            self._bells.wait(0, heard, LISTEN_S)

    def _listen(self) -> int:
        """Ask to be woken by the next change of a slot; return what to wait with. Wants the lock."""
        if self._bells is None:
            return 0
        self._control[Control.LISTENING] = 1
        return self._bells.count(0)

    def _wait_together(self) -> None:
        """Wait a moment before all nodes look at their gate again; the others of this node know of it."""
        self._words[Position.LIMITED] = 1
        self.gate_wait.wait()
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, MOST_PAUSE_S)

    def _end_wait(self) -> None:
        self._words[Position.LIMITED] = 0
        self._pause_s = IDLE_S
        self.gate_wait.end()
