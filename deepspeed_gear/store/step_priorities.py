"""Step priorities of a store: the priorities and masses of its rows, which move with their
trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import Slot, SlotState, UpdateCount
from deepspeed_gear.store.row_allocator import is_among, rows_of
from deepspeed_gear.store.table import Table


@dataclass(frozen=True)
class StepPriorities:
    """A stream's priorities and masses of a store's rows, 0 where there is no trajectory; `repair`
    restores this after a death. Every method requires the lock.
    """

    ops: Ops
    priorities: np.ndarray  # all else is derived from these. [rows], float32
    row_slots: np.ndarray  # the slot of each row. [rows], int32
    sums: torch.Tensor  # masses, and their sum tree. [tree_size(rows)], int64
    minima: torch.Tensor | None  # the min tree, if there is one. [minima_size(rows)], int64
    counts: np.ndarray

    @classmethod
    def find(cls, ops: Ops, views: Mapping[str, np.ndarray], stream: str) -> StepPriorities | None:
        """Return the step priorities of a stream, the prefix of its regions; None: its items have
        none.
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
        rows = slice(first_row, first_row + num_rows)
        leaves = self.leaves
        if not self.priorities[rows].any() and not leaves[rows].any():
            return
        self.counts[UpdateCount.DRAWABLE] -= np.count_nonzero(leaves[rows])
        self.priorities[rows] = 0
        self._update(np.arange(first_row, first_row + num_rows), np.zeros(num_rows, np.int64))

    def replace(self, source: int, to: int, num_rows: int, spare: range) -> None:
        """Move the masses of rows to those where their priorities are now; some went through spare
        rows.
        """
        masses = self.leaves[source : source + num_rows].copy()
        steps = np.arange(num_rows)
        left = np.setdiff1d(steps + source, steps + to)
        self.priorities[left] = 0
        self.priorities[spare.start : spare.stop] = 0
        if masses.any():
            items = np.concatenate([left, steps + to])
            self._update(items, np.concatenate([np.zeros(len(left), np.int64), masses]))

    def repair(self, table: Table) -> None:
        """Repair priorities and slots of rows from the slot table; the caller rebuilds
        the masses.
        """
        used = np.nonzero(
            is_among(table.slots[:, Slot.STATE], (SlotState.COMMITTED, SlotState.EVICTED))
        )[0]
        rows, _, owner = rows_of(table.slots[used])
        self.row_slots[rows] = used[owner]
        free = np.ones(len(self.priorities), bool)
        free[rows] = False
        self.priorities[free] = 0

    def _update(self, items: np.ndarray, masses: np.ndarray) -> None:
        changed = torch.from_numpy(items)
        count = len(self.priorities)
        self.ops.tree_update_(self.sums, count, changed, torch.from_numpy(masses))
        if self.minima is not None:
            self.ops.minima_update_(self.minima, self.sums, count, changed)
