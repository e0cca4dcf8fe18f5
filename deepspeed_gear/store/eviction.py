"""Eviction and waiting for free rows: policies of groups, users' policies, waits of writers.

The native store does it all (store/reserve_rows.cpp), alike for every writer of a node. Python
chooses what it cannot: a group, or by a class of the user's. And it finds who has died: what a dead
process has reserved or reads is released before a writer waits, and once a second before one
evicts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from deepspeed_gear.config.schedules import imported
from deepspeed_gear.data.media_digests import MediaItem
from deepspeed_gear.errors import ConfigError, NotReadyError, StoreError, StoreFullError
from deepspeed_gear.ops.philox import below, philox
from deepspeed_gear.ops.records import RandomPurpose, Slot, SlotState
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import Control, Refusal, SlotLink, SlotRetention
from deepspeed_gear.store.retention import Retention
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import Context

_POLL_S = 200e-6
_ROUND_S = 0.25
NO_LATEST = (-1, 0)  # slot and generation: a writer has no latest trajectory


class Evictor:
    """Reserves rows for this process's trajectories: evicts, or waits until rows are free.

    Methods require the lock where documented; `wait` takes none. If the process `samples` too, it
    must not wait for itself.
    """

    def __init__(self, table: Table, context: Context, samples: bool = False) -> None:
        self.table = table
        self.readers = SelectionPins(table)
        self.timeout_s = context.timeout_s
        self._check = context.check
        self._samples = samples
        self._store = table.extents.handle
        self._limits = table.spec.retention.rate_limiter is not None
        self._evicts = table.spec.retention.eviction != "none"
        self._policy = python_policy(table)
        self.waited_s = 0.0  # of this process
        self._is_shared = table.spec.own_shard.count > 1

    def may_insert(self, num_steps: int) -> bool:
        """Return whether the rate limiter admits steps of a trajectory. Requires the lock."""
        if self._limits and self.table.groups is not None:
            self.table.groups.update()
        return bool(self._store.may_insert(num_steps))

    def reserve(
        self,
        num_steps: int,
        inserts: int | None = None,
        latest: tuple[int, int] = NO_LATEST,
    ) -> int:
        """Reserve a slot with rows; evict as the retention defines. Requires the lock.

        Args:
            num_steps: Steps of the rows.
            inserts: Those that are inserted now; None: all.
            latest: Slot and generation of what the writer has published last, near which rows may
                be free.
        Returns:
            The slot, or a Refusal.
        """
        table = self.table
        if self._limits and table.groups is not None:
            table.groups.update()
        num_rows = table.rows_for(num_steps)
        inserted = num_steps if inserts is None else inserts
        selects = not table.control[Control.SELECTING] or table.is_selecting
        has_victim = True
        has_released = False
        while True:
            slot: int = self._store.reserve_with_removal(
                num_rows,
                num_steps,
                inserted,
                latest,
                self._samples,
                selects,
                has_victim,
                has_released,
            )
            if slot >= 0 or slot == Refusal.RATE_LIMITED:
                return slot
            latest = NO_LATEST
            if not has_released:  # rows of the dead come before those of the living
                self._release_dead()
                has_released = True
                continue
            if slot != Refusal.NEEDS_VICTIM:
                return slot
            victim = self._victim()
            has_victim = victim >= 0
            if has_victim:
                table.evict(np.array([victim]))

    def _victim(self) -> int:
        """Return the trajectory, or one of the group, that is evicted next; -1: there is none."""
        if self._policy is None:
            return int(self._store.victim())
        return self._policy.victim(self.table, self.readers)

    def _release_dead(self) -> None:
        """Free what dead processes have reserved, end what they wrote, release what they read."""
        self.table.extents.end_abandoned()
        self.readers.release_dead()

    def free_retired(self) -> int:
        """Free unpinned retired slots, and those of dead processes; return how many retired ones.

        Requires the lock.

        Of a store that is kept only the oldest ones. Open ones are freed by their writers, which
        have not detected the eviction yet.
        """
        self._release_dead()
        return int(self._store.free_retired())

    def release(self, may_evict: bool = True) -> bool:
        """Free retired slots, or else evict one; return whether it did. Requires the lock."""
        if self.free_retired():
            return True
        may_evict &= self._evicts and not self.table.control[Control.SELECTING]
        victim = self._victim() if may_evict else -1
        if victim < 0:
            return False
        self.table.evict(np.array([victim]))
        self._store.free_retired()
        return True

    def pinned(self) -> np.ndarray:
        """Return which slots a selection pins. [slots], bool. Requires the lock."""
        found = np.zeros(len(self.table.slots), bool)
        used = np.nonzero(self.table.slots[:, Slot.STATE] >= SlotState.COMMITTED)[0]
        found[used[self.readers.pinned(used)]] = True
        return found

    def add_items(self, items: Mapping[int, MediaItem], named: np.ndarray) -> None:
        """Add items that the store lacks to its pages; wait for free ones. Takes the lock.

        Args:
            items: Items by number.
            named: Numbers that are needed. [n], int64.
        Raises:
            DataError, StoreFullError, NotReadyError: As `MediaPages.add`.
        """
        media = self.table.media
        assert media is not None
        until = time.monotonic() + self.timeout_s
        while True:
            try:
                media.add(items, named, self.table.lock, self.release, self.pinned)
                return
            except StoreFullError:
                # Pages that selections read become free once these end; else none will.
                with self.table.lock:
                    is_read = self.pinned().any()
                if self._samples or not is_read:
                    raise
            self.wait(Refusal.PINNED, 0, until, "pages of items")

    def wait(self, refusal: int, num_steps: int, until: float, what: str = "rows") -> None:
        """Wait once, briefly, for the cause of a refusal to change.

        Raises:
            NotReadyError: It has not changed in time.
            StoreFullError: Too few rows are free, and nothing may be evicted.
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
                f"table {table.spec.name}",
                f"must have no {what} within {timeout_s} s",
                None,
                "look where that process hangs (py-spy dump), or raise gear.timeout_s",
            )
        time.sleep(_POLL_S)


class EvictionPolicy(ABC):
    """Chooses what is evicted when rows or slots are too few: a trajectory, of groups its group."""

    def __init__(self, retention: Retention) -> None:
        self.retention = retention

    @abstractmethod
    def victim(self, table: Table, pins: SelectionPins) -> int:
        """Return the committed slot to evict next, -1 if there is none. Requires the lock."""


def _complete(table: Table) -> np.ndarray:
    """Return the committed slots whose trajectories do not grow any more. [n], int64."""
    slots = np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
    return np.asarray(slots[table.views["retention"][slots, SlotRetention.OPEN] == 0])


class EvictLowest(EvictionPolicy):
    """Base of policies that evict the lowest value (of a group its highest), then the lowest id."""

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


class OldestGroup(EvictionPolicy):
    """First in, first out: the group of the oldest trajectory."""

    def victim(self, table: Table, pins: SelectionPins) -> int:
        return table.extents.first_complete(SlotLink.NEWER)


class NewestGroup(EvictionPolicy):
    """Last in, first out: the newest complete group, as the newest may still be added to."""

    def victim(self, table: Table, pins: SelectionPins) -> int:
        assert table.groups is not None
        held = np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        leaders = held[table.groups.is_leader(held)]
        if len(leaders):
            return int(leaders[table.slots[leaders, Slot.ID].argmax()])
        return table.extents.first_complete(SlotLink.OLDER)


class AnyGroup(EvictionPolicy):
    """Each group with the same probability, keyed by the next id: runs are reproducible."""

    def victim(self, table: Table, pins: SelectionPins) -> int:
        assert table.groups is not None
        slots = _complete(table)
        if not len(slots):
            return -1
        ids = table.slots[slots, Slot.ID]
        slots = slots[table.groups.highest(slots, ids) == ids]  # the newest trajectory of each
        number = np.array([table.control[Control.NEXT_ID]], np.uint64)
        words = philox(0, number, 0, np.array([[RandomPurpose.EVICTION]], np.uint64))
        return int(slots[below(tuple(quarter[0] for quarter in words), np.array([len(slots)]))[0]])


class LowestPriorityGroup(EvictLowest):
    """The group whose highest priority is the lowest; incomplete groups, which have none, last."""

    def values(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> np.ndarray:
        assert table.groups is not None
        found = pins.highest_priorities(slots)
        found[~table.groups.is_complete(slots)] = np.inf
        return found


class LowestValueGroup(EvictLowest):
    """The group whose highest value of a column is the lowest; NaN is lower than all numbers."""

    def values(self, table: Table, pins: SelectionPins, slots: np.ndarray) -> np.ndarray:
        assert self.retention.column is not None
        values = np.asarray(table.values(self.retention.column, slots), np.float64)
        return np.where(np.isnan(values), -np.inf, values)


#: Eviction policies of tables of groups, by name; the native store has no groups.
GROUP_POLICIES: dict[str, type[EvictionPolicy]] = {
    "fifo": OldestGroup,
    "lifo": NewestGroup,
    "uniform": AnyGroup,
    "lowest_priority": LowestPriorityGroup,
    "keep_best": LowestValueGroup,
}


def python_policy(table: Table) -> EvictionPolicy | None:
    """Return the policy of a table that chooses in Python; None: the native store chooses."""
    retention = table.spec.retention
    if ":" in retention.eviction:
        return user_policy(retention.eviction)(retention)
    if table.groups is None or retention.eviction == "none":
        return None
    return GROUP_POLICIES[retention.eviction](retention)


def user_policy(name: str, option: str = "remove") -> type[EvictionPolicy]:
    """Return the class of a "module:Class"; `option` names it in ConfigErrors."""
    found = imported(name, option)
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ConfigError(
            option,
            "must name a subclass of EvictionPolicy",
            name,
            "derive the class from deepspeed_gear.store.eviction.EvictionPolicy",
        )
    return found
