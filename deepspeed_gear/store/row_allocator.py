"""Allocation of rows and slots of a store, the order of its trajectories, and the log of changed slots.

Two lists run through the slots, each with a sentinel: extents by address, between which the free rows lie,
and trajectories by age, those that are committed and those that are retired. They lie in shared memory and
follow from the slot table; `rebuild` derives them. `NativeRowAllocator` is the same in C++ (store/store.cpp).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.records import Control, Refusal, SlotLink, SlotRetention
from deepspeed_gear.store.slot_sets import distinct


class RowAllocator:
    """The lists of a store. Every method requires the store's lock.

    Args:
        control: Control words. [32], int64.
        slots: The slot table. [slots, 8], int64.
        links: [slots + 2, 4], int64; the last two rows are the sentinels.
        log: Ring of slots that have changed. [size], int64.
        retention: How often each trajectory was drawn and so on; 0 at first. [slots, 4], int64.
        num_rows: Rows of the store.
        ids: Index and number of the shard: its ids are counter * number + index.
        peer: Index of this process.
    """

    def __init__(
        self,
        control: np.ndarray,
        slots: np.ndarray,
        links: np.ndarray,
        log: np.ndarray,
        retention: np.ndarray,
        num_rows: int,
        ids: tuple[int, int],
        peer: int,
    ) -> None:
        self.control, self.slots, self.links, self.log = control, slots, links, log
        self.retention = retention
        self.num_rows, self.ids, self.peer = num_rows, ids, peer
        self.ends = self.retired_ends = len(slots)
        self.retired_ends += 1

    # ---- changing --------------------------------------------------------------------------------

    def reserve(self, num_rows: int, num_steps: int) -> int:
        """Reserve a slot and a run of rows, searching from the end of the last search.

        Returns:
            The slot, or Refusal.NO_SLOT, Refusal.NO_ROWS or Refusal.SCATTERED.
        """
        control, links = self.control, self.links
        slot = int(control[Control.FREE_SLOT])
        if slot < 0:
            return Refusal.NO_SLOT
        if num_rows > control[Control.FREE_ROWS]:
            return Refusal.NO_ROWS
        after = self._gap(num_rows)
        if after is None:
            return Refusal.SCATTERED
        control[Control.FREE_SLOT] = links[slot, SlotLink.AFTER]
        record = self.slots[slot]
        record[Slot.GENERATION] += 1
        record[Slot.FIRST_ROW] = self._end_of(after)
        record[Slot.NUM_STEPS], record[Slot.NUM_ROWS], record[Slot.OWNER] = num_steps, num_rows, self.peer
        record[Slot.STATE] = SlotState.RESERVED
        self._insert(after, slot, SlotLink.BEFORE, SlotLink.AFTER)
        control[Control.ROVER] = slot
        control[Control.FREE_ROWS] -= num_rows
        self.retention[slot, SlotRetention.OPEN] = 0
        control[Control.ROWS_HELD] += num_rows
        control[[Control.PENDING, Control.STEPS_PENDING]] += (1, num_steps)
        return slot

    def commit(self, slot: int, num_steps: int, num_rows: int, born: int) -> int:
        """Publish a reserved slot; rows after `num_rows` are freed. Returns the new id."""
        control, record = self.control, self.slots[slot]
        control[[Control.PENDING, Control.STEPS_PENDING]] -= (1, int(record[Slot.NUM_STEPS]))
        self._trim(record, num_rows)
        record[Slot.NUM_STEPS], record[Slot.BORN] = num_steps, born
        index, count = self.ids
        record[Slot.ID] = control[Control.NEXT_ID] * count + index  # unique over the nodes
        control[Control.NEXT_ID] += 1
        self.retention[slot, : SlotRetention.OPEN] = 0
        record[Slot.STATE] = SlotState.COMMITTED  # the commit point
        self._insert(int(self.links[self.ends, SlotLink.OLDER]), slot, SlotLink.OLDER, SlotLink.NEWER)
        for word, more in ((Control.NUM_COMMITTED, 1), (Control.STEPS_COMMITTED, num_steps)):
            control[word] += more
        for word, more in ((Control.INSERTED, 1), (Control.STEPS_INSERTED, num_steps)):
            control[word] += more
        self.note(slot)
        return int(record[Slot.ID])

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
            self._trim(record, num_rows)
        self.retention[slot, SlotRetention.OPEN] = 0

    def _trim(self, record: np.ndarray, num_rows: int) -> None:
        fewer = int(record[Slot.NUM_ROWS]) - num_rows
        record[Slot.NUM_ROWS] = num_rows
        self.control[Control.FREE_ROWS] += fewer
        self.control[Control.ROWS_HELD] -= fewer

    def retire(self, slot: int) -> None:
        """Retire a committed trajectory."""
        self.slots[slot, Slot.STATE] = SlotState.EVICTED
        self._take_out(slot, SlotLink.OLDER, SlotLink.NEWER)
        self._insert(int(self.links[self.retired_ends, SlotLink.OLDER]), slot, SlotLink.OLDER, SlotLink.NEWER)
        self.control[Control.NUM_COMMITTED] -= 1
        self.control[Control.STEPS_COMMITTED] -= self.slots[slot, Slot.NUM_STEPS]
        self.control[Control.ROWS_HELD] -= self.slots[slot, Slot.NUM_ROWS]
        self.note(slot)

    def free(self, slot: int) -> None:
        """Free a reserved or retired slot and its rows."""
        control, links, record = self.control, self.links, self.slots[slot]
        if record[Slot.STATE] == SlotState.EVICTED:
            self._take_out(slot, SlotLink.OLDER, SlotLink.NEWER)
        if record[Slot.STATE] == SlotState.RESERVED:
            control[Control.ROWS_HELD] -= record[Slot.NUM_ROWS]
            control[[Control.PENDING, Control.STEPS_PENDING]] -= (1, int(record[Slot.NUM_STEPS]))
        for rover in (Control.ROVER, Control.SHORT_ROVER):
            if control[rover] == slot:
                control[rover] = links[slot, SlotLink.BEFORE]
        self._take_out(slot, SlotLink.BEFORE, SlotLink.AFTER)
        links[slot, SlotLink.AFTER] = control[Control.FREE_SLOT]
        control[Control.FREE_SLOT] = slot
        control[Control.FREE_ROWS] += record[Slot.NUM_ROWS]
        record[Slot.STATE] = SlotState.FREE

    def note(self, slot: int) -> None:
        """Log a changed slot, which the next selection of each stream reads."""
        self.log[self.control[Control.CHANGED] % len(self.log)] = slot
        self.control[Control.CHANGED] += 1

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

    def _end_of(self, slot: int) -> int:
        """Return the row after an extent; 0 for the sentinel."""
        return (
            0
            if slot == self.ends
            else int(self.slots[slot, Slot.FIRST_ROW] + self.slots[slot, Slot.NUM_ROWS])
        )

    def _gap(self, num_rows: int) -> int | None:
        """Return the extent followed by `num_rows` free rows; None: there is none."""
        start = at = int(self.control[Control.ROVER])
        while True:
            following = int(self.links[at, SlotLink.AFTER])
            end = self.num_rows if following == self.ends else int(self.slots[following, Slot.FIRST_ROW])
            if end - self._end_of(at) >= num_rows:
                return at
            at = following
            if at == start:
                return None

    def _insert(self, where: int, slot: int, back: int, on: int) -> None:
        following = int(self.links[where, on])
        self.links[slot, back], self.links[slot, on] = where, following
        self.links[where, on] = self.links[following, back] = slot

    def _take_out(self, slot: int, back: int, on: int) -> None:
        before, after = int(self.links[slot, back]), int(self.links[slot, on])
        self.links[before, on], self.links[after, back] = after, before

    def _chain(self, members: np.ndarray, sentinel: int, back: int, on: int) -> None:
        ring = np.concatenate([[sentinel], members, [sentinel]])
        self.links[ring[:-1], on] = ring[1:]
        self.links[ring[1:], back] = ring[:-1]


class NativeRowAllocator(RowAllocator):
    """The same lists, changed by C++.

    Args:
        native: The native module.
        store: The native Store.
        *arguments: As `RowAllocator`.
    """

    def __init__(self, native: ModuleType, store: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._native, self._store = native, store

    def reserve(self, num_rows: int, num_steps: int) -> int:
        return int(self._store.reserve(num_rows, num_steps))

    def commit(self, slot: int, num_steps: int, num_rows: int, born: int) -> int:
        return int(self._store.commit(slot, num_steps, num_rows, born))

    def retire(self, slot: int) -> None:
        self._store.retire(slot)

    def note(self, slot: int) -> None:
        super().note(slot)
        if self.control[Control.LISTENING]:
            self.control[Control.LISTENING] = 0
            self._native.bell_ring(int(self.control[Control.EVENT :].ctypes.data))

    def free(self, slot: int) -> None:
        self._store.free(slot)
