"""What writers have begun and not ended: rows that they have reserved, and trajectories that still grow.

A trajectory that grows is committed with its first steps and keeps the rows that were reserved for it. Its
writer writes after the published steps, which no process reads, and then publishes their number (`grow`).
It is never evicted to make room. Where it is retired all the same (by hand, or by age), its rows are not free
before its writer knows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.store.records import Control, SlotRetention
from deepspeed_gear.store.row_allocator import RowAllocator
from deepspeed_gear.store.shared_memory import SharedMemory
from deepspeed_gear.store.slot_sets import is_among


class OpenHandle(NamedTuple):
    """A slot that a process has reserved, as it was then: checkpoints may be loaded meanwhile."""

    slot: int
    generation: int
    loads: int


class OpenSlots:
    """The slots of a store that some writer has not done with. Every method wants the store's lock.

    Args:
        slots: The slot table.
        control: The store's control words.
        extents: Its lists.
        memory: Where the store lies.
        terminated, truncated: The columns of these roles, by row; None: the table has none.
        final_rows: Rows of a trajectory beyond its steps: 1 where a column has T+1.
    """

    def __init__(
        self,
        slots: np.ndarray,
        control: np.ndarray,
        extents: RowAllocator,
        memory: SharedMemory,
        terminated: np.ndarray | None,
        truncated: np.ndarray | None,
        final_rows: int,
    ) -> None:
        self._slots, self._control, self._extents, self._memory = slots, control, extents, memory
        self._open: np.ndarray = extents.retention[:, SlotRetention.OPEN]
        self._terminated, self._truncated, self._final_rows = terminated, truncated, final_rows

    # ---- growing ---------------------------------------------------------------------------------

    def open(self, slot: int, num_steps: int) -> None:
        """Say that a reserved slot is to grow, and how many steps its commit publishes."""
        self._slots[slot, Slot.NUM_STEPS] = num_steps
        self._open[slot] = 1

    def handle_of(self, slot: int) -> OpenHandle:
        """Return what names that which this process has reserved for as long as it is its own."""
        return OpenHandle(slot, int(self._slots[slot, Slot.GENERATION]), int(self._control[Control.LOADS]))

    def is_own(self, handle: OpenHandle) -> bool:
        """Return whether a slot is still this process's to end, whatever became of its trajectory."""
        record = self._slots[handle.slot]
        is_same = handle == self.handle_of(handle.slot) and record[Slot.OWNER] == self._memory.peer
        return bool(is_same and (self._open[handle.slot] or record[Slot.STATE] == SlotState.RESERVED))

    def stands(self, handle: OpenHandle) -> bool:
        """Return whether what this process has reserved or published was not evicted."""
        return self.is_own(handle) and bool(self._slots[handle.slot, Slot.STATE] != SlotState.EVICTED)

    def grow(self, slot: int, num_steps: int) -> None:
        """Publish the first `num_steps` steps, whose rows are written."""
        self._extents.grow(slot, num_steps)

    def end(self, slot: int, truncated: bool) -> None:
        """Say that a trajectory grows no more; rows after it are free, or all if nothing is published.

        Args:
            slot: Of the trajectory.
            truncated: Whether to mark its last step as truncated, unless it is terminated.
        """
        if self._slots[slot, Slot.STATE] == SlotState.RESERVED:
            self._open[slot] = 0
            self._extents.free(slot)
            return
        last = int(self._slots[slot, Slot.FIRST_ROW] + self._slots[slot, Slot.NUM_STEPS]) - 1
        if truncated and self._truncated is not None and self._slots[slot, Slot.STATE] == SlotState.COMMITTED:
            self._truncated[last] |= self._terminated is None or not self._terminated[last]
        self._extents.end_growth(slot, int(self._slots[slot, Slot.NUM_STEPS]) + self._final_rows)

    # ---- deaths ----------------------------------------------------------------------------------

    def end_abandoned(self) -> None:
        """Free what dead processes had reserved; let what they have published stay, as truncated."""
        for slot in self._abandoned(
            (self._slots[:, Slot.STATE] == SlotState.RESERVED) | (self._open != 0)
        ).tolist():
            self.end(slot, truncated=True)

    def give_up(self, peer: int) -> None:
        """Free what a process had reserved, and end what it let grow."""
        begun = (self._open != 0) | (self._slots[:, Slot.STATE] == SlotState.RESERVED)
        for slot in np.nonzero(begun & (self._slots[:, Slot.OWNER] == peer))[0].tolist():
            self.end(slot, truncated=True)

    def end_all(self) -> None:
        """End whatever grows: it was loaded, and its writers are not here."""
        for slot in np.nonzero(self._open)[0].tolist():
            self.end(slot, truncated=True)

    def _abandoned(self, which: np.ndarray) -> np.ndarray:
        found = np.nonzero(which)[0]
        owners = self._slots[found, Slot.OWNER]
        dead = [owner for owner in set(owners.tolist()) if not self._memory.is_alive(owner)]
        return np.asarray(found[is_among(owners, dead)])

    # ---- repair ----------------------------------------------------------------------------------

    def recover(self) -> None:
        """Free what the dead had reserved, and the rows after trajectories that ended while they died."""
        slots = self._slots
        slots[self._abandoned(slots[:, Slot.STATE] == SlotState.RESERVED), Slot.STATE] = SlotState.FREE
        ended = (slots[:, Slot.STATE] == SlotState.COMMITTED) & (self._open == 0)
        slots[ended, Slot.NUM_ROWS] = slots[ended, Slot.NUM_STEPS] + self._final_rows
