"""Rows and slots of a store: the slot table, lists derived from it, and repair after deaths.

Two lists run through the slots, each with a sentinel: extents by address, between which the free
rows lie, and trajectories by age, those that are committed and those that are retired. They lie in
shared memory and follow from the slot table; `rebuild` derives them. C++ changes them
(store/slots.cpp).

An open trajectory is committed with its first steps and keeps the rows that were reserved for it.
Its writer writes after the published steps, where no process reads, and then publishes the new
number (`grow`). It is never evicted to free rows. Where it is retired all the same (by hand, or by
age), its rows are not free before its writer has detected that.

The native store of this process owns all that writers do to rows (`handle`, see store/store.h): it
reserves, evicts, frees and moves them. Python repairs the rows of dead processes, as it checks
which processes live.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.records import Control, Growing, MomentHead, SlotLink, SlotRetention
from deepspeed_gear.store.shared_memory import SharedMemory
from deepspeed_gear.store.table_spec import TableSpec


class RowAllocator:
    """The slots and extents of a store with a capacity, mapped. Every method requires the lock.

    Args:
        handle: The native store of this process, as `native_store.native_store`.
        spec: The specification of the table.
        memory: The memory of the store; its locks show which processes live.
        views: The regions of the memory.
    """

    def __init__(
        self, handle: Any, spec: TableSpec, memory: SharedMemory, views: Mapping[str, np.ndarray]
    ) -> None:
        self._memory = memory
        self.control = views["control"]
        self.slots = views["slots"]
        self.links = views["links"]
        self.log = views["log"]
        self.retention = views["retention"]
        self._open: np.ndarray = self.retention[:, SlotRetention.OPEN]
        self.num_rows = spec.capacity_rows
        self._final_rows = int(spec.schema.has_final_row)  # rows of a trajectory beyond its steps
        self._shard = spec.own_shard
        self.ends = len(self.slots)
        self.retired_ends = self.ends + 1
        self._counts = bool(spec.normalized)
        if self._counts:
            self._moments_head = views["moments_head"]
            self._moments = views["moments"]
        self.handle = handle
        #: Reserve a slot and a run of rows for so many rows and steps, searching from the end of
        #: the last search. Returns the slot, or Refusal.NO_SLOT, NO_ROWS or SCATTERED.
        self.reserve: Callable[[int, int], int] = self.handle.reserve
        #: Publish the steps of a reserved slot and free what follows its rows: slot, steps, rows,
        #: number of the global batch that is selected next, bits of its late columns. Returns the
        #: new id.
        self.commit: Callable[[int, int, int, int, int], int] = self.handle.commit
        #: Publish the first steps of an open trajectory, whose rows are written.
        self.grow: Callable[[int, int], None] = self.handle.grow
        #: Retire a committed trajectory.
        self.retire: Callable[[int], None] = self.handle.retire
        #: Free a reserved or retired slot and its rows.
        self.free: Callable[[int], None] = self.handle.free
        #: Log a changed slot, which the next selection of each stream reads; wake a sampler.
        self.note: Callable[[int], None] = self.handle.note
        #: Return the oldest (SlotLink.NEWER) or newest (OLDER) complete committed slot; -1: none.
        self.first_complete: Callable[[int], int] = self.handle.first_complete

    def open(self, slot: int, num_steps: int) -> None:
        """Mark a reserved slot as open, and set the steps that its commit publishes."""
        self.slots[slot, Slot.NUM_STEPS] = num_steps
        self._open[slot] = 1

    def handle_of(self, slot: int) -> list[int]:
        """Return the handle of a slot that this process has reserved: slot, generation, loads.

        A load of a checkpoint in the meantime makes it another one.
        """
        return [slot, int(self.slots[slot, Slot.GENERATION]), int(self.control[Control.LOADS])]

    def is_own(self, words: np.ndarray) -> bool:
        """Return whether this process still has to end a slot, even if its trajectory was evicted.

        `words`: of a trajectory that has a slot; the first are its handle. `Growing` [6], int64.
        """
        slot, *_ = handle = words[: Growing.FIRST].tolist()
        is_same = (
            handle == self.handle_of(slot) and self.slots[slot, Slot.OWNER] == self._memory.peer
        )
        return bool(
            is_same and (self._open[slot] or self.slots[slot, Slot.STATE] == SlotState.RESERVED)
        )

    def stands(self, words: np.ndarray) -> bool:
        """Return whether a slot is this process's own and was not evicted; `words` as `is_own`."""
        return self.is_own(words) and bool(self.slots[words[0], Slot.STATE] != SlotState.EVICTED)

    def end(self, slot: int, truncated: bool, returns: bool = False) -> None:
        """Mark a slot as complete, and free the rows after its steps, or all if none is published.

        `truncated`: its last step is marked as truncated unless terminated. `returns`: its writer,
        in this process, comes back for these rows.
        """
        self.handle.end(slot, truncated, returns)

    def end_all(self) -> None:
        """End all open trajectories: they were loaded from a checkpoint, without their writers."""
        for slot in np.flatnonzero(self._open).tolist():
            self.end(slot, truncated=True)

    def end_abandoned(self, peer: int | None = None) -> None:
        """Free dead processes' slots, or only `peer`'s earlier ones; truncate open trajectories."""
        begun = np.flatnonzero(
            (self.slots[:, Slot.STATE] == SlotState.RESERVED) | (self._open != 0)
        )
        left = (
            self._of_dead(begun) if peer is None else begun[self.slots[begun, Slot.OWNER] == peer]
        )
        for slot in left.tolist():
            self.end(slot, truncated=True)

    def _of_dead(self, slots: np.ndarray) -> np.ndarray:
        """Return those of some slots whose owner is dead. [n] -> [m]."""
        owners = self.slots[slots, Slot.OWNER]
        return np.asarray(slots[have_ended(owners, self._memory)])

    def recover(self) -> None:
        """Repair what dead processes left: a move, reservations, ends, commits; then `rebuild`."""
        self.handle.finish_move()  # first: its extent's rows are at neither place until then
        slots = self.slots
        control = self.control
        if self._counts and self._moments_head[MomentHead.STAGED]:
            head = self._moments_head
            record = slots[head[MomentHead.SLOT]]
            words = record[[Slot.STATE, Slot.GENERATION, Slot.NUM_STEPS]].tolist()
            if words == [
                SlotState.COMMITTED,
                *head[[MomentHead.GENERATION, MomentHead.STEPS]].tolist(),
            ]:
                head[MomentHead.CURRENT] = head[MomentHead.STAGED] - 1
            head[MomentHead.STAGED] = 0
        reserved = np.flatnonzero(slots[:, Slot.STATE] == SlotState.RESERVED)
        slots[self._of_dead(reserved), Slot.STATE] = SlotState.FREE
        committed = slots[:, Slot.STATE] == SlotState.COMMITTED
        ended = committed & (self._open == 0)
        slots[ended, Slot.NUM_ROWS] = slots[ended, Slot.NUM_STEPS] + self._final_rows
        after = int(slots[committed, Slot.ID].max(initial=-1)) // self._shard.count + 1
        control[Control.NEXT_ID] = max(int(control[Control.NEXT_ID]), after)
        self.rebuild()

    def rebuild(self) -> None:
        """Derive the lists and counters from the slot table."""
        control = self.control
        links = self.links
        slots = self.slots
        state = slots[:, Slot.STATE]
        is_committed = state == SlotState.COMMITTED
        is_reserved = state == SlotState.RESERVED
        used = np.nonzero(state != SlotState.FREE)[0]
        free = np.nonzero(state == SlotState.FREE)[0]
        self._chain(used, Slot.FIRST_ROW, self.ends, SlotLink.BEFORE, SlotLink.AFTER)
        self._chain(np.nonzero(is_committed)[0], Slot.ID, self.ends, SlotLink.OLDER, SlotLink.NEWER)
        retired = np.nonzero(state == SlotState.EVICTED)[0]
        self._chain(retired, Slot.ID, self.retired_ends, SlotLink.OLDER, SlotLink.NEWER)
        links[free, SlotLink.AFTER] = np.append(free[1:], -1) if len(free) else free
        control[Control.FREE_SLOT] = free[0] if len(free) else -1
        control[Control.FREE_ROWS] = self.num_rows - int(slots[used, Slot.NUM_ROWS].sum())
        control[[Control.ROVER, Control.SHORT_ROVER]] = self.ends
        control[Control.NUM_COMMITTED] = np.count_nonzero(is_committed)
        control[Control.STEPS_COMMITTED] = slots[is_committed, Slot.NUM_STEPS].sum()
        control[Control.PENDING] = np.count_nonzero(is_reserved)
        control[Control.STEPS_PENDING] = slots[is_reserved, Slot.NUM_STEPS].sum()
        control[Control.ROWS_HELD] = slots[is_committed | is_reserved, Slot.NUM_ROWS].sum()

    def _chain(self, members: np.ndarray, key: int, sentinel: int, back: int, on: int) -> None:
        """Link slots in the order of a word of theirs."""
        members = members[np.argsort(self.slots[members, key], kind="stable")]
        ring = np.concatenate([[sentinel], members, [sentinel]])
        self.links[ring[:-1], on] = ring[1:]
        self.links[ring[1:], back] = ring[:-1]

    @property
    def moments(self) -> np.ndarray:
        """The running moments of the normalised columns, a view. [6, elements], float64."""
        return np.asarray(self._moments[self._moments_head[MomentHead.CURRENT]])

    def retired(self) -> np.ndarray:
        """Return the retired slots in the order of their retirement. [n], int64."""
        found = []
        slot = int(self.links[self.retired_ends, SlotLink.NEWER])
        while slot != self.retired_ends:
            found.append(slot)
            slot = int(self.links[slot, SlotLink.NEWER])
        return np.array(found, np.int64)

    @property
    def longest_run(self) -> int:
        """Rows of the longest free run. Cost: one pass over the extents."""
        used = self.slots[self.slots[:, Slot.STATE] != SlotState.FREE]
        order = np.argsort(used[:, Slot.FIRST_ROW], kind="stable")
        begins = np.append(0, used[order, Slot.FIRST_ROW] + used[order, Slot.NUM_ROWS])
        return int((np.append(used[order, Slot.FIRST_ROW], self.num_rows) - begins).max())

    def changed_since(self, seen: int) -> np.ndarray | None:
        """Return the slots that have changed, each once; None if the log has dropped some."""
        changed = int(self.control[Control.CHANGED])
        if changed - seen > len(self.log):
            return None
        return distinct(self.log[np.arange(seen, changed) % len(self.log)])


def rows_of(records: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, step and index of its record, of all rows of [n, 8] slot records. [m], int64."""
    count = records[:, Slot.NUM_ROWS]
    owner = np.repeat(np.arange(len(records)), count)
    steps = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    return records[owner, Slot.FIRST_ROW] + steps, steps, owner


# `numpy.unique` and `numpy.isin` import `numpy.ma` when they are first called: 15 to 100 ms, for a
# writer that holds the store's lock. Code that runs there uses these functions.


def distinct(values: np.ndarray) -> np.ndarray:
    """Return each value once, ascending. [n] -> [m]."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def look_up(known: np.ndarray, wanted: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return values of numbers by their place in ascending known ones; -1: missing. [n], int64."""
    if not len(known):
        return np.full(len(wanted), -1, np.int64)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[at] == wanted, values[at], -1)


def committed_at(slots: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return where ids are committed in [m, 8] slot records; -1: nowhere. [n] -> [n], int64."""
    committed = np.nonzero(slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
    committed = committed[np.argsort(slots[committed, Slot.ID])]
    return look_up(slots[committed, Slot.ID], ids, committed)


def have_ended(owners: np.ndarray, memory: SharedMemory) -> np.ndarray:
    """Return which owners, by the index of their process, have ended. [n] -> [n], bool.

    Cost: a system call for each process.
    """
    dead = [owner for owner in set(owners.tolist()) if not memory.is_alive(owner)]
    return is_among(owners, dead)


def is_among(values: np.ndarray, few: Sequence[int]) -> np.ndarray:
    """Return which values are among a few. [n] -> [n], bool."""
    return np.asarray((values[:, None] == np.asarray(few, values.dtype)).any(-1))
