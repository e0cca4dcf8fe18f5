"""Reserves rows for new trajectories: evicts, compacts or blocks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from deepspeed_gear.context import Context
from deepspeed_gear.errors import NotReadyError, StoreError
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.store.compaction import Compactor
from deepspeed_gear.store.eviction_policies import policy_of
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import Control, Refusal, SlotRetention
from deepspeed_gear.store.stream_records import Head
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import wait_until

_POLL_S, _AGREE_S = 200e-6, 0.25


class Evictor:
    """Reserves rows for the trajectories that this process adds, where the native module cannot.

    Thread and process safety: methods require the table's lock where documented; `wait` takes no lock.

    Args:
        table: With a capacity.
        readers: Of its store.
        context: Longest wait, and the check while it waits.
        samples: Whether this process samples too: it must not wait for itself.
    """

    def __init__(
        self,
        table: Table,
        readers: SelectionPins,
        context: Context,
        samples: bool = False,
    ) -> None:
        self.table, self.readers, self.timeout_s, self._check = (
            table,
            readers,
            context.timeout_s,
            context.check,
        )
        self._samples = samples
        self.retention = table.spec.retention
        self.policy = policy_of(self.retention)
        self.mover = Compactor(table, readers)
        self.waited_s = 0.0  # of this process
        self._position = table.views.get("stream/train/position")
        self._is_shared = table.spec.shard is not None and table.spec.shard.count > 1

    # ---- rates -----------------------------------------------------------------------------------

    def may_insert(self, num_steps: int) -> bool:
        """Return whether the rate admits a trajectory now."""
        rate, control = self.retention.rate_limiter, self.table.control
        if rate is None:
            return True
        size, inserted, pending = self.table.counted(rate)
        count = num_steps if rate.unit == "step" else 1
        if self._is_shared and rate.holds_back:
            if inserted + pending + count <= control[Control.QUOTA]:
                return True
            control[Control.WANTED] = max(int(control[Control.WANTED]), count)
            return False
        sampled = 0 if self._position is None else int(self._position[Head.SAMPLES])
        return rate.may_insert(size + pending, inserted + pending, sampled, count)

    # ---- reserving -------------------------------------------------------------------------------

    def reserve(self, num_steps: int, inserts: int | None = None) -> int:
        """Reserve a slot for a trajectory; evict others as the table's retention defines. Requires the lock.

        Args:
            num_steps: Steps that rows are reserved for.
            inserts: Steps that are inserted now; None: all.
        Returns:
            The slot, or a Refusal.
        """
        inserted = num_steps if inserts is None else inserts
        if not self.may_insert(inserted):
            return Refusal.RATE_LIMITED
        extents = self.table.extents
        assert extents is not None
        num_rows, is_clear = self.table.rows_for(num_steps), False
        while True:
            found = Refusal.NO_ROWS if self._is_over(num_steps) else extents.reserve(num_rows, inserted)
            if found >= 0:
                return found
            if not is_clear:
                self.free_retired()
                is_clear = True
                continue
            if found == Refusal.SCATTERED and self.mover.pays(num_rows) and self.mover.make_run(num_rows):
                continue
            if not self.policy.evicts:
                return self._unless_waiting(found)
            if self.table.control[Control.SELECTING] or self._will_fit(num_rows, num_steps):
                return Refusal.PINNED
            victim = self.policy.victim(self.table, self.readers)
            if victim < 0:
                return self._unless_waiting(found)
            self.table.evict(np.array([victim]))
            self.free_retired()

    def _is_over(self, num_steps: int) -> bool:
        control, retention = self.table.control, self.retention
        held = control[Control.NUM_COMMITTED] + control[Control.PENDING]
        steps = control[Control.ROWS_HELD] - held * self.table.rows_for(0)
        return bool(held + 1 > retention.max_trajectories or steps + num_steps > retention.max_steps)

    def _unless_waiting(self, refusal: int) -> int:
        """Return Refusal.PINNED if rows become free once readers or writers finish, else `refusal`."""
        is_written = self.policy.evicts and self.table.control[Control.PENDING] > 0
        is_read = len(self._being_read()) > 0 and not self._samples
        return Refusal.PINNED if is_written or is_read else refusal

    def _will_fit(self, num_rows: int, num_steps: int) -> bool:
        waiting = self._being_read()
        if self._is_over(num_steps) or not len(waiting):
            return False
        rows = int(self.table.slots[waiting, Slot.NUM_ROWS].sum())
        return int(self.table.control[Control.FREE_ROWS]) + rows >= num_rows

    def _being_read(self) -> np.ndarray:
        """Return the retired slots that are free as soon as no selection pins them. [n], int64."""
        slots = self.table.retired()
        return np.asarray(slots[self.table.views["retention"][slots, SlotRetention.OPEN] == 0])

    def free_retired(self) -> None:
        """Free retired slots that no selection pins, and those of dead processes. Requires the lock."""
        self.table.unfinished.end_abandoned()
        slots = self.table.retired()
        if not len(slots):
            return
        # Open ones are freed by their writers, which have not detected the eviction yet.
        is_open = self.table.views["retention"][slots, SlotRetention.OPEN] != 0
        unread = slots[~(self.readers.pinned(slots) | is_open)]
        for slot in unread.tolist():
            self.readers.forget(slot)
        self.table.free(unread)

    # ---- waiting ---------------------------------------------------------------------------------

    def wait(self, refusal: int, num_steps: int, until: float) -> None:
        """Wait once, briefly, for the cause of a refusal to change.

        Raises:
            NotReadyError: Nothing has changed in time.
            StoreFullError: Nothing may be evicted, and too few rows are free.
        """
        if refusal in (Refusal.NO_SLOT, Refusal.NO_ROWS, Refusal.SCATTERED):
            raise self.table.full(refusal, num_steps)
        self._check()
        now = time.monotonic()
        waits_for_itself = self._samples and (refusal == Refusal.RATE_LIMITED or self.readers.are_frozen)
        if refusal == Refusal.RATE_LIMITED and self._is_shared:  # nodes may agree on quotas just now
            waits_for_itself &= now > until - self.timeout_s + _AGREE_S
        if waits_for_itself or now > until:
            raise self.too_late(refusal, 0.0 if waits_for_itself else self.timeout_s)
        time.sleep(_POLL_S)
        self.waited_s += _POLL_S

    def too_late(self, refusal: int, waited_s: float) -> NotReadyError:
        """Return the error of a wait that was too long."""
        waited = "first" if waited_s == 0 else f"within {waited_s:g} s"
        if refusal == Refusal.RATE_LIMITED:
            rule, remedy = (
                f"must be sampled from {waited}, as its rate limiter requires",
                "raise rate_limiter.error_buffer",
            )
        else:
            rule, remedy = f"must have rows that no selection reads {waited}", "raise the capacity"
        return NotReadyError(f"table {self.table.spec.name}", rule, None, f"sample, or {remedy}")


@contextmanager
def quiet(table: Table, timeout_s: float) -> Iterator[None]:
    """Hold the lock while no selection over several nodes is under way: those draw from the current contents.

    Raises:
        StoreError: A selection is under way for too long.
    """
    with ExitStack() as held:
        if not wait_until(lambda: _locked_if(held, table, Control.SELECTING), timeout_s, _POLL_S):
            rule = f"must have no selection under way within {timeout_s} s"
            raise StoreError(f"table {table.spec.name}", rule, None)
        yield


@contextmanager
def unwritten(table: Table, timeout_s: float) -> Iterator[None]:
    """Hold the lock while no process writes rows: replaced rows then belong to no writer.

    Raises:
        StoreError: A process writes for too long.
    """
    with ExitStack() as held:
        if not wait_until(lambda: _locked_if(held, table, Control.PENDING), timeout_s, _POLL_S):
            rule = f"must have no open write within {timeout_s} s"
            raise StoreError(f"table {table.spec.name}", rule, None)
        yield


def _locked_if(held: ExitStack, table: Table, word: int) -> bool:
    """Take the lock if a control word is 0 then; else release it and return False."""
    with ExitStack() as taken:
        taken.enter_context(table.lock)
        if word == Control.PENDING and table.extents is not None:
            table.unfinished.end_abandoned()
        if table.control[word]:
            return False
        held.enter_context(taken.pop_all())
    return True
