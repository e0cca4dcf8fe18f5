"""Open slots: rows that writers have reserved, and trajectories that still grow.

An open trajectory is committed with its first steps and keeps the rows that were reserved for it. Its writer
writes after the published steps, where no process reads, and then publishes the new number (`grow`). It is
never evicted to free rows. Where it is retired all the same (by hand, or by age), its rows are not free
before its writer has detected that.
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
    """A slot at the time a process reserved it: a checkpoint may be loaded in the meantime."""

    slot: int
    generation: int
    loads: int


class OpenSlots:
    """The slots of a store that are reserved or still grow. Every method requires the store's lock.

    Args:
        control: The store's control words.
        extents: The store's lists of extents.
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
        """Mark a reserved slot as open, and set the steps that its commit publishes."""
        self._slots[slot, Slot.NUM_STEPS] = num_steps
        self._open[slot] = 1

    def handle_of(self, slot: int) -> OpenHandle:
        """Return the handle of a slot that this process has reserved; valid as long as `is_own`."""
        return OpenHandle(slot, int(self._slots[slot, Slot.GENERATION]), int(self._control[Control.LOADS]))

    def is_own(self, handle: OpenHandle) -> bool:
        """Return whether this process still has to end a slot, even if its trajectory was evicted."""
        record = self._slots[handle.slot]
        is_same = handle == self.handle_of(handle.slot) and record[Slot.OWNER] == self._memory.peer
        return bool(is_same and (self._open[handle.slot] or record[Slot.STATE] == SlotState.RESERVED))

    def stands(self, handle: OpenHandle) -> bool:
        """Return whether a slot is still this process's own and was not evicted."""
        return self.is_own(handle) and bool(self._slots[handle.slot, Slot.STATE] != SlotState.EVICTED)

    def grow(self, slot: int, num_steps: int) -> None:
        """Publish the first `num_steps` steps of a trajectory, whose rows are written."""
        self._extents.grow(slot, num_steps)

    def end(self, slot: int, truncated: bool) -> None:
        """Mark a slot as complete; free the rows after its trajectory, or all if nothing is published.

        Args:
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
        """Free slots reserved by dead processes; end their open trajectories as truncated."""
        for slot in self._abandoned(
            (self._slots[:, Slot.STATE] == SlotState.RESERVED) | (self._open != 0)
        ).tolist():
            self.end(slot, truncated=True)

    def give_up(self, peer: int) -> None:
        """Free the slots that a process had reserved; end its open trajectories as truncated."""
        begun = (self._open != 0) | (self._slots[:, Slot.STATE] == SlotState.RESERVED)
        for slot in np.nonzero(begun & (self._slots[:, Slot.OWNER] == peer))[0].tolist():
            self.end(slot, truncated=True)

    def end_all(self) -> None:
        """End all open trajectories: they were loaded from a checkpoint, without their writers."""
        for slot in np.nonzero(self._open)[0].tolist():
            self.end(slot, truncated=True)

    def _abandoned(self, which: np.ndarray) -> np.ndarray:
        found = np.nonzero(which)[0]
        owners = self._slots[found, Slot.OWNER]
        dead = [owner for owner in set(owners.tolist()) if not self._memory.is_alive(owner)]
        return np.asarray(found[is_among(owners, dead)])

    # ---- repair ----------------------------------------------------------------------------------

    def recover(self) -> None:
        """Free slots reserved by dead processes, and rows after trajectories whose end was interrupted."""
        slots = self._slots
        slots[self._abandoned(slots[:, Slot.STATE] == SlotState.RESERVED), Slot.STATE] = SlotState.FREE
        ended = (slots[:, Slot.STATE] == SlotState.COMMITTED) & (self._open == 0)
        slots[ended, Slot.NUM_ROWS] = slots[ended, Slot.NUM_STEPS] + self._final_rows
