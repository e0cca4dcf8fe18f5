"""Priorities of steps, stored by row as the steps are, and the sum trees derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Slot, SlotState, UpdateCount
from deepspeed_gear.store.row_allocator import is_among
from deepspeed_gear.store.table import Table


@dataclass(frozen=True)
class StepPriorities:
    """A batch stream's priorities and masses of a store's rows. Every method requires the store's lock.

    A row of no trajectory has priority 0. After a death inside a method, `repair` restores that.
    """

    ops: Ops
    priorities: np.ndarray  # all else is derived from these. [rows], float32
    row_slots: np.ndarray  # the slot of each row. [rows], int32
    sums: torch.Tensor  # masses, and their sum tree. [tree_size(rows)], int64
    minima: torch.Tensor | None  # the min tree, if there is one. [minima_size(rows)], int64
    counts: np.ndarray

    @classmethod
    def find(cls, ops: Ops, views: Mapping[str, np.ndarray], stream: str) -> StepPriorities | None:
        """Return the step priorities of a stream; None if its items are no steps with priorities.

        Args:
            views: The regions of its store.
            stream: Prefix of the names of its regions.
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
        """Clear the priorities of rows, so that another trajectory can use them."""
        rows, leaves = slice(first_row, first_row + num_rows), self.leaves
        if not self.priorities[rows].any() and not leaves[rows].any():
            return
        self.counts[UpdateCount.DRAWABLE] -= np.count_nonzero(leaves[rows])
        self.priorities[rows] = 0
        self._update(np.arange(first_row, first_row + num_rows), np.zeros(num_rows, np.int64))

    def replace(self, source: int, to: int, num_rows: int, spare: range) -> None:
        """Move the masses of rows to those where their priorities are now; some went through spare rows."""
        masses, steps = self.leaves[source : source + num_rows].copy(), np.arange(num_rows)
        left = np.setdiff1d(steps + source, steps + to)
        self.priorities[left] = 0
        self.priorities[spare.start : spare.stop] = 0
        if masses.any():
            items = np.concatenate([left, steps + to])
            self._update(items, np.concatenate([np.zeros(len(left), np.int64), masses]))

    def repair(self, table: Table) -> None:
        """Repair priorities and slots of rows from the slot table; the caller rebuilds the masses."""
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
