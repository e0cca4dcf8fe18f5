"""Which rows and slots of a store are free, in which order trajectories came, and what has changed.

Two lists run through the slots, each with a sentinel: extents by address, between which the free rows lie,
and trajectories by age, those that are committed and those that are retired. They lie in shared memory and
follow from the slot table; `rebuild` derives them. `NativeRowAllocator` is the same in C++ (cpu/store.cpp).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from deepspeed_gear.store.slot_sets import distinct

FREE, RESERVED, COMMITTED, RETIRED = range(4)
# words of a slot; common/slot.h
STATE, GENERATION, ID, FIRST_ROW, NUM_STEPS, NUM_ROWS, OWNER, BORN = range(8)
# control words; cpu/store.h
CHANGED, NEXT_ID, NUM_COMMITTED, STEPS_COMMITTED, ROVER, FREE_SLOT, FREE_ROWS = range(7)
INSERTED, STEPS_INSERTED, RECOVERIES, CUTTING, POLICY, ROWS_HELD, LOADS = range(7, 14)
# of rates: what is reserved and not committed; over several nodes, how many items its writers may ever
# add, by what all nodes have agreed on last; the most that one has wanted to add since then, and could not
PENDING, STEPS_PENDING, REACH, WANTED = range(16, 20)
# whether a sampler waits for a change; the bell that is rung then, once
LISTENING, BELL = 20, 21
OPEN = 3  # word of a slot's life: its trajectory still grows
BEFORE, AFTER, OLDER, NEWER = range(4)
LINK_WORDS = 4
NO_SLOT, NO_ROWS, SCATTERED, PINNED, AHEAD, LOCK_TIMEOUT, LOCK_BROKEN, MUST_RECOVER = range(-1, -9, -1)
NOT_FINITE = -9  # of an addition: a column holds NaN or an infinity and must not
KEEP, OLDEST, NEWEST, BY_CALLER = range(4)  # who goes when the store is full


class RowAllocator:
    """The lists of a store. Every method wants the store's lock.

    Args:
        control: Control words. [32], int64.
        slots: The slot table. [slots, 8], int64.
        links: [slots + 2, 4], int64; the last two rows are the sentinels.
        log: Ring of slots that have changed. [size], int64.
        life: How often each trajectory was drawn and so on; 0 at first. [slots, 4], int64.
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
        life: np.ndarray,
        num_rows: int,
        ids: tuple[int, int],
        peer: int,
    ) -> None:
        self.control, self.slots, self.links, self.log = control, slots, links, log
        self.life = life
        self.num_rows, self.ids, self.peer = num_rows, ids, peer
        self.ends = self.retired_ends = len(slots)
        self.retired_ends += 1

    # ---- changing --------------------------------------------------------------------------------

    def reserve(self, num_rows: int, num_steps: int) -> int:
        """Take a slot and a run of rows, searching on from where the last one was found.

        Returns:
            The slot, or NO_SLOT, NO_ROWS or SCATTERED.
        """
        control, links = self.control, self.links
        slot = int(control[FREE_SLOT])
        if slot < 0:
            return NO_SLOT
        if num_rows > control[FREE_ROWS]:
            return NO_ROWS
        behind = self._gap(num_rows)
        if behind is None:
            return SCATTERED
        control[FREE_SLOT] = links[slot, AFTER]
        record = self.slots[slot]
        record[GENERATION] += 1
        record[FIRST_ROW] = self._end_of(behind)
        record[NUM_STEPS], record[NUM_ROWS], record[OWNER] = num_steps, num_rows, self.peer
        record[STATE] = RESERVED
        self._insert(behind, slot, BEFORE, AFTER)
        control[ROVER] = slot
        control[FREE_ROWS] -= num_rows
        self.life[slot, OPEN] = 0
        control[ROWS_HELD] += num_rows
        control[[PENDING, STEPS_PENDING]] += (1, num_steps)
        return slot

    def commit(self, slot: int, num_steps: int, num_rows: int, born: int) -> int:
        """Publish a reserved slot; rows behind `num_rows` are given back. Returns the new id."""
        control, record = self.control, self.slots[slot]
        control[[PENDING, STEPS_PENDING]] -= (1, int(record[NUM_STEPS]))
        self._trim(record, num_rows)
        record[NUM_STEPS], record[BORN] = num_steps, born
        index, count = self.ids
        record[ID] = control[NEXT_ID] * count + index  # unique over the nodes
        control[NEXT_ID] += 1
        self.life[slot, :OPEN] = 0
        record[STATE] = COMMITTED  # the commit point
        self._insert(int(self.links[self.ends, OLDER]), slot, OLDER, NEWER)
        for word, more in ((NUM_COMMITTED, 1), (STEPS_COMMITTED, num_steps)):
            control[word] += more
        for word, more in ((INSERTED, 1), (STEPS_INSERTED, num_steps)):
            control[word] += more
        self.note(slot)
        return int(record[ID])

    def grow(self, slot: int, num_steps: int) -> None:
        """Publish more steps of a committed trajectory whose extent has room for them."""
        control, more = self.control, num_steps - int(self.slots[slot, NUM_STEPS])
        self.slots[slot, NUM_STEPS] = num_steps  # the commit point
        control[STEPS_COMMITTED] += more
        control[STEPS_INSERTED] += more
        self.note(slot)

    def end_growth(self, slot: int, num_rows: int) -> None:
        """Say that a trajectory, perhaps retired already, grows no more; rows behind `num_rows` are free."""
        record = self.slots[slot]
        if record[STATE] == COMMITTED:
            self._trim(record, num_rows)
        self.life[slot, OPEN] = 0

    def _trim(self, record: np.ndarray, num_rows: int) -> None:
        fewer = int(record[NUM_ROWS]) - num_rows
        record[NUM_ROWS] = num_rows
        self.control[FREE_ROWS] += fewer
        self.control[ROWS_HELD] -= fewer

    def retire(self, slot: int) -> None:
        """End a committed trajectory."""
        self.slots[slot, STATE] = RETIRED
        self._take_out(slot, OLDER, NEWER)
        self._insert(int(self.links[self.retired_ends, OLDER]), slot, OLDER, NEWER)
        self.control[NUM_COMMITTED] -= 1
        self.control[STEPS_COMMITTED] -= self.slots[slot, NUM_STEPS]
        self.control[ROWS_HELD] -= self.slots[slot, NUM_ROWS]
        self.note(slot)

    def free(self, slot: int) -> None:
        """Give a reserved or retired slot and its rows back."""
        control, links, record = self.control, self.links, self.slots[slot]
        if record[STATE] == RETIRED:
            self._take_out(slot, OLDER, NEWER)
        if record[STATE] == RESERVED:
            control[ROWS_HELD] -= record[NUM_ROWS]
            control[[PENDING, STEPS_PENDING]] -= (1, int(record[NUM_STEPS]))
        if control[ROVER] == slot:
            control[ROVER] = links[slot, BEFORE]
        self._take_out(slot, BEFORE, AFTER)
        links[slot, AFTER] = control[FREE_SLOT]
        control[FREE_SLOT] = slot
        control[FREE_ROWS] += record[NUM_ROWS]
        record[STATE] = FREE

    def note(self, slot: int) -> None:
        """Tell the streams that a slot has changed; their next cut looks at it."""
        self.log[self.control[CHANGED] % len(self.log)] = slot
        self.control[CHANGED] += 1

    def rebuild(self) -> None:
        """Derive everything from the slot table."""
        control, links, slots = self.control, self.links, self.slots
        used = np.nonzero(slots[:, STATE] != FREE)[0]
        self._chain(used[np.argsort(slots[used, FIRST_ROW], kind="stable")], self.ends, BEFORE, AFTER)
        for state, sentinel in ((COMMITTED, self.ends), (RETIRED, self.retired_ends)):
            found = np.nonzero(slots[:, STATE] == state)[0]
            self._chain(found[np.argsort(slots[found, ID], kind="stable")], sentinel, OLDER, NEWER)
        free = np.nonzero(slots[:, STATE] == FREE)[0]
        links[free, AFTER] = np.append(free[1:], -1) if len(free) else free
        control[FREE_SLOT] = free[0] if len(free) else -1
        control[FREE_ROWS] = self.num_rows - int(slots[used, NUM_ROWS].sum())
        control[ROVER] = self.ends
        committed = slots[:, STATE] == COMMITTED
        control[NUM_COMMITTED] = int(committed.sum())
        control[STEPS_COMMITTED] = int(slots[committed, NUM_STEPS].sum())
        reserved = slots[:, STATE] == RESERVED
        control[[PENDING, STEPS_PENDING]] = int(reserved.sum()), int(slots[reserved, NUM_STEPS].sum())
        control[ROWS_HELD] = int(slots[committed | reserved, NUM_ROWS].sum())

    # ---- reading ---------------------------------------------------------------------------------

    def oldest(self) -> int:
        """Return the oldest committed slot whose trajectory grows no more, -1 if there is none."""
        return self._first_grown(NEWER)

    def newest(self) -> int:
        """Return the newest committed slot whose trajectory grows no more, -1 if there is none."""
        return self._first_grown(OLDER)

    def retired(self) -> np.ndarray:
        """Return the retired slots in the order in which they were. [n], int64."""
        found, slot = [], int(self.links[self.retired_ends, NEWER])
        while slot != self.retired_ends:
            found.append(slot)
            slot = int(self.links[slot, NEWER])
        return np.array(found, np.int64)

    @property
    def longest_run(self) -> int:
        """Rows of the longest free run. Cost: one pass over the extents."""
        used = self.slots[self.slots[:, STATE] != FREE]
        order = np.argsort(used[:, FIRST_ROW], kind="stable")
        begins = np.append(0, used[order, FIRST_ROW] + used[order, NUM_ROWS])
        return int((np.append(used[order, FIRST_ROW], self.num_rows) - begins).max())

    def changed_since(self, seen: int) -> np.ndarray | None:
        """Return the slots that have changed, each once; None if there were too many to know."""
        changed = int(self.control[CHANGED])
        if changed - seen > len(self.log):
            return None
        return distinct(self.log[np.arange(seen, changed) % len(self.log)])

    # ---- lists -----------------------------------------------------------------------------------

    def _first_grown(self, on: int) -> int:
        slot = int(self.links[self.ends, on])
        while slot != self.ends and self.life[slot, OPEN]:
            slot = int(self.links[slot, on])
        return -1 if slot == self.ends else slot

    def _end_of(self, slot: int) -> int:
        """Return the row behind an extent; behind the sentinel the first one lies."""
        return 0 if slot == self.ends else int(self.slots[slot, FIRST_ROW] + self.slots[slot, NUM_ROWS])

    def _gap(self, num_rows: int) -> int | None:
        """Return the extent behind which so many rows are free."""
        start = at = int(self.control[ROVER])
        while True:
            following = int(self.links[at, AFTER])
            end = self.num_rows if following == self.ends else int(self.slots[following, FIRST_ROW])
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
        handle: Of the store, from `store_open`.
        *arguments: As `RowAllocator`.
    """

    def __init__(self, native: ModuleType, handle: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._native, self._handle = native, handle

    def reserve(self, num_rows: int, num_steps: int) -> int:
        return int(self._native.store_reserve(self._handle, num_rows, num_steps))

    def commit(self, slot: int, num_steps: int, num_rows: int, born: int) -> int:
        return int(self._native.store_commit(self._handle, slot, num_steps, num_rows, born))

    def retire(self, slot: int) -> None:
        self._native.store_retire(self._handle, slot)

    def note(self, slot: int) -> None:
        super().note(slot)
        if self.control[LISTENING]:
            self.control[LISTENING] = 0
            self._native.bell_ring(int(self.control[BELL:].ctypes.data))

    def free(self, slot: int) -> None:
        self._native.store_free(self._handle, slot)
