"""Allocation of rows and slots of a store, the order of its trajectories, and the log of changed slots.

Two lists run through the slots, each with a sentinel: extents by address, between which the free rows lie,
and trajectories by age, those that are committed and those that are retired. They lie in shared memory and
follow from the slot table; `rebuild` derives them. C++ changes them (store/store.cpp).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.column_arrays import ColumnArrays
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, MUTEX_OFFSET
from deepspeed_gear.store.native_rows import ROWS_CODES, address, form_of
from deepspeed_gear.store.records import Control, SlotLink, SlotRetention
from deepspeed_gear.store.shared_memory import SharedMemory
from deepspeed_gear.store.slot_sets import distinct
from deepspeed_gear.store.table_spec import Shard, TableSpec

_TRAIN_POSITION = "stream/train/position"


def open_store(
    native: ModuleType,
    spec: TableSpec,
    memory: SharedMemory,
    views: dict[str, np.ndarray],
    columns: ColumnArrays,
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
        [
            (address(columns.by_name[column.name]), ROWS_CODES[column.rows], form_of(native, column))
            for column in spec.schema
        ]
    )
    roles = [spec.schema.role(role) for role in ("terminated", "truncated")]
    store.set_ends(*(0 if column is None else address(columns.by_name[column.name]) for column in roles))
    return store


class RowAllocator:
    """The lists of a store. Every method requires the store's lock.

    Args:
        views: The store's regions `control`, `slots`, `links`, `log` and `retention`.
        num_rows: Rows of the store.
    """

    def __init__(self, native: ModuleType, handle: Any, views: dict[str, np.ndarray], num_rows: int) -> None:
        self._native, self.handle, self.num_rows = native, handle, num_rows
        self.control, self.slots, self.links = views["control"], views["slots"], views["links"]
        self.log, self.retention = views["log"], views["retention"]
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

    def grow(self, slot: int, num_steps: int) -> None:
        """Publish more steps of a committed trajectory, within its extent."""
        control, more = self.control, num_steps - int(self.slots[slot, Slot.NUM_STEPS])
        self.slots[slot, Slot.NUM_STEPS] = num_steps  # the commit point
        control[Control.STEPS_COMMITTED] += more
        control[Control.STEPS_INSERTED] += more
        self.note(slot)

    def end_growth(self, slot: int, num_rows: int) -> None:
        """Mark a trajectory, committed or retired, as complete; free its rows after `num_rows`."""
        record = self.slots[slot]
        if record[Slot.STATE] == SlotState.COMMITTED:
            fewer = int(record[Slot.NUM_ROWS]) - num_rows
            record[Slot.NUM_ROWS] = num_rows
            self.control[Control.FREE_ROWS] += fewer
            self.control[Control.ROWS_HELD] -= fewer
        self.retention[slot, SlotRetention.OPEN] = 0

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

    def rebuild(self) -> None:
        """Derive the lists and counters from the slot table."""
        control, links, slots = self.control, self.links, self.slots
        used = np.nonzero(slots[:, Slot.STATE] != SlotState.FREE)[0]
        self._chain(
            used[np.argsort(slots[used, Slot.FIRST_ROW], kind="stable")],
            self.ends,
            SlotLink.BEFORE,
            SlotLink.AFTER,
        )
        for state, sentinel in ((SlotState.COMMITTED, self.ends), (SlotState.EVICTED, self.retired_ends)):
            found = np.nonzero(slots[:, Slot.STATE] == state)[0]
            self._chain(
                found[np.argsort(slots[found, Slot.ID], kind="stable")],
                sentinel,
                SlotLink.OLDER,
                SlotLink.NEWER,
            )
        free = np.nonzero(slots[:, Slot.STATE] == SlotState.FREE)[0]
        links[free, SlotLink.AFTER] = np.append(free[1:], -1) if len(free) else free
        control[Control.FREE_SLOT] = free[0] if len(free) else -1
        control[Control.FREE_ROWS] = self.num_rows - int(slots[used, Slot.NUM_ROWS].sum())
        control[[Control.ROVER, Control.SHORT_ROVER]] = self.ends
        committed = slots[:, Slot.STATE] == SlotState.COMMITTED
        control[Control.NUM_COMMITTED] = int(committed.sum())
        control[Control.STEPS_COMMITTED] = int(slots[committed, Slot.NUM_STEPS].sum())
        reserved = slots[:, Slot.STATE] == SlotState.RESERVED
        control[[Control.PENDING, Control.STEPS_PENDING]] = (
            int(reserved.sum()),
            int(slots[reserved, Slot.NUM_STEPS].sum()),
        )
        control[Control.ROWS_HELD] = int(slots[committed | reserved, Slot.NUM_ROWS].sum())

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

    # ---- lists -----------------------------------------------------------------------------------

    def _first_grown(self, on: int) -> int:
        slot = int(self.links[self.ends, on])
        while slot != self.ends and self.retention[slot, SlotRetention.OPEN]:
            slot = int(self.links[slot, on])
        return -1 if slot == self.ends else slot

    def _chain(self, members: np.ndarray, sentinel: int, back: int, on: int) -> None:
        ring = np.concatenate([[sentinel], members, [sentinel]])
        self.links[ring[:-1], on] = ring[1:]
        self.links[ring[1:], back] = ring[:-1]
