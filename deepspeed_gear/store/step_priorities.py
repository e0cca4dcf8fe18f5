"""Priorities of steps, which lie by row as the steps do, and what is derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Slot, SlotState, UpdateCount
from deepspeed_gear.store.slot_sets import is_among
from deepspeed_gear.store.table import Table


@dataclass(frozen=True)
class StepPriorities:
    """What a stream keeps for each row of a store. Every method wants the store's lock.

    A row that no trajectory has, has priority 0. After a death inside, `mend` restores that.

    Args:
        ops: The ops.
        priorities: The truth. [rows], float32.
        row_slots: The slot that each row is of. [rows], int32.
        sums: Masses, and the sums over them. [tree_size(rows)], int64.
        minima: The least masses, if they are kept. [minima_size(rows)], int64.
        counts: Of the stream.
    """

    ops: Ops
    priorities: np.ndarray
    row_slots: np.ndarray
    sums: torch.Tensor
    minima: torch.Tensor | None
    counts: np.ndarray

    @classmethod
    def find(cls, ops: Ops, views: Mapping[str, np.ndarray], stream: str) -> StepPriorities | None:
        """Return those of a stream whose items are steps with priorities.

        Args:
            ops: The ops.
            views: The regions of its store.
            stream: What the names of its regions begin with.
        """
        if f"{stream}/row_slots" not in views:
            return None
        minima = views.get(f"{stream}/minima")
        return cls(
            ops,
            views[f"{stream}/priorities"],
            views[f"{stream}/row_slots"],
            torch.from_numpy(views[f"{stream}/sums"]),
            None if minima is None else torch.from_numpy(minima),
            views[f"{stream}/counts"],
        )

    @property
    def leaves(self) -> np.ndarray:
        """Masses of the rows. [rows], int64."""
        return self.sums[: len(self.priorities)].numpy()

    def forget(self, first_row: int, num_rows: int) -> None:
        """Take the priorities of rows, so that these can be another's."""
        rows, leaves = slice(first_row, first_row + num_rows), self.leaves
        if not self.priorities[rows].any() and not leaves[rows].any():
            return
        self.counts[UpdateCount.DRAWABLE] -= np.count_nonzero(leaves[rows])
        self.priorities[rows] = 0
        self._update(np.arange(first_row, first_row + num_rows), np.zeros(num_rows, np.int64))

    def copy(self, source: int, to: int, num_rows: int) -> None:
        """Give free rows what others have; `replace` follows when they are the trajectory's."""
        self.priorities[to : to + num_rows] = self.priorities[source : source + num_rows]
        self.row_slots[to : to + num_rows] = self.row_slots[source : source + num_rows]

    def replace(self, source: int, to: int, num_rows: int) -> None:
        """Let rows that were copied take the masses of those that they were copied from, now free."""
        self.priorities[source : source + num_rows] = 0
        masses, steps = self.leaves[source : source + num_rows].copy(), np.arange(num_rows)
        if masses.any():
            items = np.concatenate([steps + source, steps + to])
            self._update(items, np.concatenate([np.zeros_like(masses), masses]))

    def mend(self, table: Table) -> None:
        """Make priorities and slots of the rows agree with the slot table; masses are to be built anew."""
        used = np.nonzero(is_among(table.slots[:, Slot.STATE], (SlotState.COMMITTED, SlotState.EVICTED)))[0]
        free = np.ones(len(self.priorities), bool)
        extents = table.slots[used][:, [Slot.FIRST_ROW, Slot.NUM_ROWS]].tolist()
        for slot, (first, count) in zip(used.tolist(), extents, strict=True):
            free[first : first + count] = False
            self.row_slots[first : first + count] = slot
        self.priorities[free] = 0

    def _update(self, items: np.ndarray, masses: np.ndarray) -> None:
        changed, count = torch.from_numpy(items), len(self.priorities)
        self.ops.tree_update_(self.sums, count, changed, torch.from_numpy(masses))
        if self.minima is not None:
            self.ops.minima_update_(self.minima, self.sums, count, changed)


def rows_of(records: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of trajectories, one after the other.

    Args:
        records: Of the slot table. [n, 8], int64.
    Returns:
        Row of the store, step, and index of the trajectory. [m] each, int64.
    """
    count = records[:, Slot.NUM_ROWS]
    owner = np.repeat(np.arange(len(records)), count)
    steps = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    return records[owner, Slot.FIRST_ROW] + steps, steps, owner
