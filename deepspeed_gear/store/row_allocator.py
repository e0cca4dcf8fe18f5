"""Allocation of rows and slots of a store, the order of its trajectories, and the log of changed slots.

Two lists run through the slots, each with a sentinel: extents by address, between which the free rows lie,
and trajectories by age, those that are committed and those that are retired. They lie in shared memory and
follow from the slot table; `rebuild` derives them. C++ changes them (store/store.cpp).

An open trajectory is committed with its first steps and keeps the rows that were reserved for it. Its writer
writes after the published steps, where no process reads, and then publishes the new number (`grow`). It is
never evicted to free rows. Where it is retired all the same (by hand, or by age), its rows are not free
before its writer has detected that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, MUTEX_OFFSET
from deepspeed_gear.store.native_rows import ROWS_CODES, address, form_of
from deepspeed_gear.store.records import Control, SlotLink, SlotRetention
from deepspeed_gear.store.shared_memory import SharedMemory
from deepspeed_gear.store.table_spec import Shard, TableSpec

_TRAIN_POSITION = "stream/train/position"
# Flags of the rows, of the columns of the roles terminated and truncated; None: the table has no such column.
Ends = tuple[np.ndarray | None, np.ndarray | None]


def open_store(
    native: ModuleType,
    spec: TableSpec,
    memory: SharedMemory,
    views: dict[str, np.ndarray],
    columns: Mapping[str, np.ndarray],
    ends: Ends,
) -> Any:
    """Return the native Store of a table with a capacity: addresses in its memory, which must stay mapped."""
    base = address(np.frombuffer(memory.buffer, np.uint8, 1))
    shard, retention = spec.shard or Shard(), spec.retention
    store = native.Store(
        mutex=base + MUTEX_OFFSET,
        holder=base + HOLDER_OFFSET,
        **{name: address(views[name]) for name in ("control", "links", "log", "retention", "slots")},
        num_slots=spec.num_slots,
        num_rows=spec.capacity_rows,
        log_size=len(views["log"]),
        id_index=shard.index,
        id_count=shard.count,
        peer=memory.peer,
        most_trajectories=retention.max_trajectories,
        most_steps=retention.max_steps,
        position=address(views[_TRAIN_POSITION]) if _TRAIN_POSITION in views else 0,
        least_free_rows=spec.least_free_rows,
    )
    store.set_columns(
        [(address(columns[c.name]), ROWS_CODES[c.rows], form_of(native, c)) for c in spec.schema]
    )
    store.set_ends(*(0 if flags is None else address(flags) for flags in ends))
    return store


class OpenHandle(NamedTuple):
    """A slot at the time a process reserved it: a checkpoint may be loaded in the meantime."""

    slot: int
    generation: int
    loads: int


class RowAllocator:
    """The slots and extents of a store. Every method requires the store's lock.

    Args:
        handle: The native Store, see `open_store`.
        views: The store's regions `control`, `slots`, `links`, `log` and `retention`.
        num_rows: Rows of the store.
        memory: Of the store: this process's index, and which others are alive.
        end_flags: The columns of the roles terminated and truncated.
        final_rows: Rows of a trajectory beyond its steps: 1 where a column has T+1.
    """

    def __init__(
        self,
        native: ModuleType,
        handle: Any,
        views: dict[str, np.ndarray],
        num_rows: int,
        memory: SharedMemory,
        end_flags: Ends = (None, None),
        final_rows: int = 0,
    ) -> None:
        self._native, self.handle, self.num_rows, self._memory = native, handle, num_rows, memory
        self.control, self.slots, self.links = views["control"], views["slots"], views["links"]
        self.log, self.retention = views["log"], views["retention"]
        self._open: np.ndarray = self.retention[:, SlotRetention.OPEN]
        self._end_flags, self._final_rows = end_flags, final_rows
        self.ends = len(self.slots)
        self.retired_ends = self.ends + 1

    # ---- changing --------------------------------------------------------------------------------

    def reserve(self, num_rows: int, num_steps: int) -> int:
        """Reserve a slot and a run of rows, searching from the end of the last search.

        Returns:
            The slot, or Refusal.NO_SLOT, Refusal.NO_ROWS or Refusal.SCATTERED.
        """
        return int(self.handle.reserve(num_rows, num_steps))

    def commit(self, slot: int, num_steps: int, num_rows: int, born: int) -> int:
        """Publish a reserved slot; rows after `num_rows` are freed. Returns the new id."""
        return int(self.handle.commit(slot, num_steps, num_rows, born))

    def retire(self, slot: int) -> None:
        """Retire a committed trajectory."""
        self.handle.retire(slot)

    def free(self, slot: int) -> None:
        """Free a reserved or retired slot and its rows."""
        self.handle.free(slot)

    def note(self, slot: int) -> None:
        """Log a changed slot, which the next selection of each stream reads; wake a sampler that waits."""
        self.log[self.control[Control.CHANGED] % len(self.log)] = slot
        self.control[Control.CHANGED] += 1
        if self.control[Control.LISTENING]:
            self.control[Control.LISTENING] = 0
            self._native.bell_ring(address(self.control[Control.EVENT :]))

    # ---- open slots: reserved, or of trajectories that still grow ---------------------------------

    def open(self, slot: int, num_steps: int) -> None:
        """Mark a reserved slot as open, and set the steps that its commit publishes."""
        self.slots[slot, Slot.NUM_STEPS] = num_steps
        self._open[slot] = 1

    def handle_of(self, slot: int) -> OpenHandle:
        """Return the handle of a slot that this process has reserved; valid as long as `is_own`."""
        return OpenHandle(slot, int(self.slots[slot, Slot.GENERATION]), int(self.control[Control.LOADS]))

    def is_own(self, handle: OpenHandle) -> bool:
        """Return whether this process still has to end a slot, even if its trajectory was evicted."""
        record = self.slots[handle.slot]
        is_same = handle == self.handle_of(handle.slot) and record[Slot.OWNER] == self._memory.peer
        return bool(is_same and (self._open[handle.slot] or record[Slot.STATE] == SlotState.RESERVED))

    def stands(self, handle: OpenHandle) -> bool:
        """Return whether a slot is still this process's own and was not evicted."""
        return self.is_own(handle) and bool(self.slots[handle.slot, Slot.STATE] != SlotState.EVICTED)

    def grow(self, slot: int, num_steps: int) -> None:
        """Publish the first `num_steps` steps of an open trajectory, whose rows are written."""
        control, more = self.control, num_steps - int(self.slots[slot, Slot.NUM_STEPS])
        self.slots[slot, Slot.NUM_STEPS] = num_steps  # the commit point
        control[Control.STEPS_COMMITTED] += more
        control[Control.STEPS_INSERTED] += more
        self.note(slot)

    def end(self, slot: int, truncated: bool) -> None:
        """Mark a slot as complete; free the rows after its trajectory, or all if nothing is published.

        Args:
            truncated: Whether to mark its last step as truncated, unless it is terminated.
        """
        record = self.slots[slot]
        if record[Slot.STATE] == SlotState.RESERVED:
            self._open[slot] = 0
            self.free(slot)
            return
        if record[Slot.STATE] == SlotState.COMMITTED:
            at_end, is_cut = self._end_flags
            last = int(record[Slot.FIRST_ROW] + record[Slot.NUM_STEPS]) - 1
            if truncated and is_cut is not None:
                is_cut[last] |= at_end is None or not at_end[last]
            num_rows = int(record[Slot.NUM_STEPS]) + self._final_rows
            fewer = int(record[Slot.NUM_ROWS]) - num_rows
            record[Slot.NUM_ROWS] = num_rows
            self.control[Control.FREE_ROWS] += fewer
            self.control[Control.ROWS_HELD] -= fewer
        self._open[slot] = 0

    def end_all(self) -> None:
        """End all open trajectories: they were loaded from a checkpoint, without their writers."""
        self._end_as_truncated(np.flatnonzero(self._open))

    def give_up(self, peer: int) -> None:
        """Free the slots that a process had reserved; end its open trajectories as truncated."""
        begun = self._begun()
        self._end_as_truncated(begun[self.slots[begun, Slot.OWNER] == peer])

    def end_abandoned(self) -> None:
        """Free slots reserved by dead processes; end their open trajectories as truncated."""
        self._end_as_truncated(self._of_dead(self._begun()))

    def _end_as_truncated(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            self.end(slot, truncated=True)

    def _begun(self) -> np.ndarray:
        return np.flatnonzero((self.slots[:, Slot.STATE] == SlotState.RESERVED) | (self._open != 0))

    def _of_dead(self, slots: np.ndarray) -> np.ndarray:
        """Return those of some slots whose owner is dead. [n] -> [m]."""
        owners = self.slots[slots, Slot.OWNER]
        dead = [owner for owner in set(owners.tolist()) if not self._memory.is_alive(owner)]
        return np.asarray(slots[is_among(owners, dead)])

    # ---- repair ----------------------------------------------------------------------------------

    def recover(self) -> None:
        """Free slots reserved by dead processes, and rows after trajectories whose end was interrupted."""
        slots = self.slots
        reserved = np.flatnonzero(slots[:, Slot.STATE] == SlotState.RESERVED)
        slots[self._of_dead(reserved), Slot.STATE] = SlotState.FREE
        ended = (slots[:, Slot.STATE] == SlotState.COMMITTED) & (self._open == 0)
        slots[ended, Slot.NUM_ROWS] = slots[ended, Slot.NUM_STEPS] + self._final_rows

    def rebuild(self) -> None:
        """Derive the lists and counters from the slot table."""
        control, links, slots = self.control, self.links, self.slots
        state = slots[:, Slot.STATE]
        is_committed, is_reserved = state == SlotState.COMMITTED, state == SlotState.RESERVED
        used, free = np.nonzero(state != SlotState.FREE)[0], np.nonzero(state == SlotState.FREE)[0]
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

    # ---- reading ---------------------------------------------------------------------------------

    def oldest(self) -> int:
        """Return the oldest committed slot whose trajectory is complete, -1 if there is none."""
        return self._first_grown(SlotLink.NEWER)

    def newest(self) -> int:
        """Return the newest committed slot whose trajectory is complete, -1 if there is none."""
        return self._first_grown(SlotLink.OLDER)

    def retired(self) -> np.ndarray:
        """Return the retired slots in the order of their retirement. [n], int64."""
        found, slot = [], int(self.links[self.retired_ends, SlotLink.NEWER])
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

    def _first_grown(self, on: int) -> int:
        slot = int(self.links[self.ends, on])
        while slot != self.ends and self._open[slot]:
            slot = int(self.links[slot, on])
        return -1 if slot == self.ends else slot


# `numpy.unique` and `numpy.isin` import `numpy.ma` when they are first called: 15 to 100 ms, for a writer
# that holds the store's lock. Code that runs there uses these functions.


def distinct(values: np.ndarray) -> np.ndarray:
    """Return each value once, ascending. [n] -> [m]."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def is_among(values: np.ndarray, few: Sequence[int]) -> np.ndarray:
    """Return which values are among a few. [n] -> [n], bool."""
    return np.asarray((values[:, None] == np.asarray(few, values.dtype)).any(-1))
