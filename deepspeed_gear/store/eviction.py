"""Reserves rows for new trajectories: evicts, compacts or blocks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from deepspeed_gear.config.schedules import imported
from deepspeed_gear.context import Context
from deepspeed_gear.errors import ConfigError, NotReadyError, StoreError
from deepspeed_gear.ops.philox import below, philox
from deepspeed_gear.ops.records import RandomPurpose, Slot, SlotState
from deepspeed_gear.store.compaction import make_run
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import (
    Control,
    EvictionCode,
    Head,
    Refusal,
    SlotLink,
    SlotRetention,
)
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.store.table import Table

_POLL_S = 200e-6
_ROUND_S = 0.25
_PARTS = 4  # of a store that is kept one of so many parts of the retired slots is freed at once


class Evictor:
    """Reserves rows for this process's trajectories where the native module cannot. Methods require
    the lock where documented; `wait` takes none. If it `samples` too, it must not wait for itself.
    """

    def __init__(self, table: Table, context: Context, samples: bool = False) -> None:
        self.table = table
        self.readers = SelectionPins(table)
        self.timeout_s = context.timeout_s
        self._check = context.check
        self._samples = samples
        self.retention = table.spec.retention
        self.policy = policy_class(self.retention.eviction)(self.retention)
        self.waited_s = 0.0  # of this process
        self._position = table.views.get("stream/train/position")
        self._is_shared = table.spec.own_shard.count > 1

    def may_insert(self, num_steps: int) -> bool:
        rate = self.retention.rate_limiter
        control = self.table.control
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

    def reserve(self, num_steps: int, inserts: int | None = None) -> int:
        """Reserve a slot with rows for `num_steps`, `inserts` of them inserted now (None: all);
        evict as the retention defines. Returns the slot, or a Refusal. Requires the lock.
        """
        inserted = num_steps if inserts is None else inserts
        if not self.may_insert(inserted):
            return Refusal.RATE_LIMITED
        extents = self.table.extents
        num_rows = self.table.rows_for(num_steps)
        is_clear = False
        while True:
            found = (
                Refusal.NO_ROWS if self._is_over(num_steps) else extents.reserve(num_rows, inserted)
            )
            if found >= 0:
                return found
            if not is_clear:
                is_clear = self.free_retired()
                continue
            if found == Refusal.SCATTERED and make_run(self.table, self.readers, num_rows):
                continue
            waiting = self.being_read()
            if self.policy.evicts:
                control = self.table.control
                freed = self.table.slots[waiting, Slot.NUM_ROWS].sum()
                has_rows = len(waiting) > 0 and control[Control.FREE_ROWS] + freed >= num_rows
                if self.table.is_selecting or (has_rows and not self._is_over(num_steps)):
                    return Refusal.PINNED
                victim = self.policy.victim(self.table, self.readers)
                if victim >= 0:
                    self.table.evict(np.array([victim]))
                    self.free_retired()
                    continue
            # Rows may become free once writers or readers finish.
            is_written = self.policy.evicts and self.table.control[Control.PENDING] > 0
            is_read = len(waiting) > 0 and not self._samples
            return Refusal.PINNED if is_written or is_read else found

    def _is_over(self, num_steps: int) -> bool:
        control = self.table.control
        retention = self.retention
        held = control[Control.NUM_COMMITTED] + control[Control.PENDING]
        steps = control[Control.ROWS_HELD] - held * self.table.rows_for(0)
        return bool(
            held + 1 > retention.max_trajectories or steps + num_steps > retention.max_steps
        )

    def being_read(self) -> np.ndarray:
        """Return the retired slots that are free as soon as no selection pins them, by age. [n],
        int64.
        """
        slots = self.table.extents.retired()
        return np.asarray(slots[self.table.views["retention"][slots, SlotRetention.OPEN] == 0])

    def free_retired(self) -> bool:
        """Free retired slots that no selection pins, and those of dead processes. Requires the
        lock.

        Of a store that is kept only the oldest ones. Returns whether all are free.
        """
        self.table.extents.end_abandoned()
        # Open ones are freed by their writers, which have not detected the eviction yet.
        slots = self.being_read()
        prompts = self.table.spec.prompts
        free = slots[~self.readers.pinned(slots)].tolist() if len(slots) else []
        count = -(-len(free) // _PARTS) if prompts is not None and prompts.members else len(free)
        for slot in free[:count]:
            self.readers.forget(slot)
            self.table.extents.free(slot)
        return count == len(free)

    def release(self, may_evict: bool = True) -> bool:
        """Free retired slots, or else evict one; return whether it has done either. Requires the
        lock.
        """
        waiting = len(self.being_read())
        self.free_retired()
        if len(self.being_read()) < waiting:
            return True
        may_evict &= self.policy.evicts and not self.table.control[Control.SELECTING]
        victim = self.policy.victim(self.table, self.readers) if may_evict else -1
        if victim < 0:
            return False
        self.table.evict(np.array([victim]))
        self.free_retired()
        return True

    def pinned(self) -> np.ndarray:
        """Return which slots a selection pins. [slots], bool. Requires the lock."""
        found = np.zeros(len(self.table.slots), bool)
        used = np.nonzero(self.table.slots[:, Slot.STATE] >= SlotState.COMMITTED)[0]
        found[used[self.readers.pinned(used)]] = True
        return found

    def wait(self, refusal: int, num_steps: int, until: float, what: str = "rows") -> None:
        """Wait once, briefly, for a refusal's cause to change. NotReadyError: not in time;
        StoreFullError: too few rows are free, and nothing may be evicted.
        """
        if refusal in (Refusal.NO_SLOT, Refusal.NO_ROWS, Refusal.SCATTERED):
            raise self.table.full(refusal, num_steps)
        self._check()
        now = time.monotonic()
        waits_for_itself = self._samples and (
            refusal == Refusal.RATE_LIMITED or self.readers.are_frozen
        )
        if refusal == Refusal.RATE_LIMITED and self._is_shared:  # nodes may divide quotas just now
            waits_for_itself &= now > until - self.timeout_s + _ROUND_S
        if waits_for_itself or now > until:
            waited = (
                "first"
                if waits_for_itself or self.timeout_s == 0
                else f"within {self.timeout_s:g} s"
            )
            rule = f"must have {what} that no selection reads {waited}"
            remedy = "raise the capacity"
            if refusal == Refusal.RATE_LIMITED:
                rule = f"must be sampled from {waited}, as its rate limiter requires"
                remedy = "raise rate_limiter.error_buffer"
            raise NotReadyError(f"table {self.table.spec.name}", rule, None, f"sample, or {remedy}")
        time.sleep(_POLL_S)
        self.waited_s += _POLL_S


@contextmanager
def quiet(table: Table, timeout_s: float, word: int = Control.SELECTING) -> Iterator[None]:
    """Hold the lock while a control word is 0; StoreError if it does not become so in `timeout_s`.

    SELECTING: no selection over several nodes is under way, which draws from the current contents.
    PENDING: no process writes rows, so replaced rows belong to no writer.
    """
    until = time.monotonic() + timeout_s
    while True:
        with table.lock:
            if word == Control.PENDING and table.spec.dataset is None:
                table.extents.end_abandoned()
            if not (table.is_selecting if word == Control.SELECTING else table.control[word]):
                yield
                return
        if time.monotonic() > until:
            what = "selection under way" if word == Control.SELECTING else "open write"
            raise StoreError(
                f"table {table.spec.name}", f"must have no {what} within {timeout_s} s", None
            )
        time.sleep(_POLL_S)


class EvictionPolicy(ABC):
    """Chooses the trajectory (its group, in a table of groups) to evict when rows or slots are too
    few.
    """

    evicts: ClassVar[bool] = True
    code: ClassVar[int] = (
        EvictionCode.BY_CALLER
    )  # what the native module does without calling `victim`

    def __init__(self, retention: Retention) -> None:
        self.retention = retention

    @abstractmethod
    def victim(self, table: Table, pins: SelectionPins) -> int:
        """Return the committed slot to evict next, -1 if there is none. Called with the
        lock held.
        """


class NoEviction(EvictionPolicy):
    """Adding to a full table is an error."""

    evicts = False
    code = EvictionCode.NONE

    def victim(self, table: Table, pins: SelectionPins) -> int:
        return -1


class EvictOldest(EvictionPolicy):
    """First in, first out."""

    code = EvictionCode.OLDEST

    def victim(self, table: Table, pins: SelectionPins) -> int:
        return table.extents.first_complete(SlotLink.NEWER)


class EvictNewest(EvictionPolicy):
    """Last in, first out; of groups the newest complete one, as the newest may still be
    added to.
    """

    code = EvictionCode.NEWEST

    def victim(self, table: Table, pins: SelectionPins) -> int:
        if table.groups is not None:
            held = np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
            leaders = held[table.groups.is_leader(held)]
            if len(leaders):
                return int(leaders[table.slots[leaders, Slot.ID].argmax()])
        return table.extents.first_complete(SlotLink.OLDER)


def _complete(table: Table) -> np.ndarray:
    """Return the committed slots whose trajectories do not grow any more. [n], int64."""
    slots = np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
    return np.asarray(slots[table.views["retention"][slots, SlotRetention.OPEN] == 0])


class EvictUniform(EvictionPolicy):
    """Each trajectory or group with the same probability, keyed by the next id: runs are
    reproducible.
    """

    def victim(self, table: Table, pins: SelectionPins) -> int:
        slots = _complete(table)
        if not len(slots):
            return -1
        if table.groups is not None:  # the newest trajectory of each group
            ids = table.slots[slots, Slot.ID]
            slots = slots[table.groups.highest(slots, ids) == ids]
        number = np.array([table.control[Control.NEXT_ID]], np.uint64)
        words = philox(0, number, 0, np.array([[RandomPurpose.EVICTION]], np.uint64))
        return int(slots[below(tuple(quarter[0] for quarter in words), np.array([len(slots)]))[0]])


class EvictLowest(EvictionPolicy):
    """Base of policies that evict the lowest value (of groups the highest one's), then the lowest
    id.
    """

    def victim(self, table: Table, pins: SelectionPins) -> int:
        slots = _complete(table)
        if not len(slots):
            return -1
        values = self.values(table, pins, slots)
        if table.groups is not None:
            values = table.groups.highest(slots, values)
        return int(slots[np.lexsort((table.slots[slots, Slot.ID], values))[0]])

    @abstractmethod
    def values(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> np.ndarray:
        """Return the value of each trajectory. [n] -> [n], float64."""


class EvictLowestPriority(EvictLowest):
    """The trajectory whose highest priority is the lowest; incomplete groups, which have none,
    last.
    """

    def values(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> np.ndarray:
        found = pins.highest_priorities(slots)
        if table.groups is not None:
            found[~table.groups.is_complete(slots)] = np.inf
        return found


class KeepBest(EvictLowest):
    """The lowest value of a per-trajectory column; NaN is lower than all."""

    def values(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> np.ndarray:
        assert self.retention.column is not None
        values = np.asarray(table.values(self.retention.column, slots), np.float64)
        return np.where(np.isnan(values), -np.inf, values)


POLICIES: dict[str, type[EvictionPolicy]] = {
    "none": NoEviction,
    "fifo": EvictOldest,
    "lifo": EvictNewest,
    "uniform": EvictUniform,
    "lowest_priority": EvictLowestPriority,
    "keep_best": KeepBest,
}


def policy_class(name: str, option: str = "remove") -> type[EvictionPolicy]:
    """Return the class of a key of `POLICIES` or of a "module:Class"; `option` names it in
    ConfigErrors.
    """
    if ":" not in name:
        return POLICIES[name]
    found = imported(name, option)
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(option, "must name a subclass of EvictionPolicy", name)
    return found
