"""Masses by age: the oldest and the newest items, and windows of the newest ones.

A trajectory is newer than those with a smaller id: ids follow the order of arrival, and in a data set the
stored order. What a window admits depends on all stored trajectories; so a selection that follows a change
computes the masses of all slots again.
"""

from __future__ import annotations

import numpy as np
import torch

from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling.mass_rules import WindowEdge
from deepspeed_gear.sampling.sum_tree import ItemMasses


class AgeMasses(ItemMasses):
    """Masses in the order of age. Cost of a selection that needs the order: a sort of all trajectories."""

    def initialise(self) -> None:
        super().initialise()
        self._requeue_window(None)
        super().apply_slots()

    def apply_slots(self) -> None:
        waiting = self.waiting
        self.take_changes()
        if waiting and self.spec.num_shards == 1:
            self._requeue_window(None)
        super().apply_slots()

    def apply_window(self, edge: WindowEdge) -> None:
        """Queue the mass changes of a window over all nodes; `apply` writes them to the tree."""
        self._requeue_window(edge)

    def contents(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return ids, numbers of items and values of the window's column of all admitted trajectories."""
        slots, counts = self._counted()
        window = self.spec.rule.window
        assert window is not None
        values = None if window.column is None else self.table.values(window.column, slots)
        return self.table.slots[slots, Slot.ID], counts, values

    def _counted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the committed slots and the number of items of each."""
        committed = np.nonzero(self.table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0]
        masses = self.of(committed)
        return committed, masses if self.spec.rule.unit == "step" else (masses > 0).astype(np.int64)

    def _requeue_window(self, edge: WindowEdge | None) -> None:
        """Queue the mass changes of trajectories that enter or leave the window after queued changes."""
        window = self.spec.rule.window
        if window is None:
            return
        committed, counts = self._counted()
        masses = self.of(committed)
        ids = self.table.slots[committed, Slot.ID]

        def column(name: str) -> np.ndarray:
            return self.table.values(name, committed)

        edge = window.edge(ids, counts, column) if edge is None else edge
        inside = window.admits(edge, ids, counts, column)
        wanted = np.zeros(self.num_items, np.int64)
        wanted[committed] = np.where(inside, masses, 0)
        changed = np.nonzero(np.where(self.queued >= 0, self.queued, self.leaves) != wanted)[0]
        self.queue(changed, wanted[changed])

    def extreme(self, count: int, newest: bool) -> torch.Tensor:
        """Return the coordinates of the oldest items, oldest first, or of the newest, newest first.

        Returns:
            [count], or fewer if there are fewer items; int64.
        """
        _, masses, first = self.ends(count, newest)
        return items_of(masses, first, count, newest)

    def ends(self, count: int, newest: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the trajectories that hold the oldest or the newest items, the oldest or newest first.

        Returns:
            Id, mass and first coordinate of each. [n], int64.
        """
        slots = np.nonzero(self.leaves)[0]
        slots = slots[np.argsort(self.table.slots[slots, Slot.ID], kind="stable")]
        slots = slots[::-1] if newest else slots
        slots = slots[: np.searchsorted(np.cumsum(self.leaves[slots]), count) + 1]
        first = self.coordinates_of(torch.from_numpy(slots.copy())).numpy()
        return self.table.slots[slots, Slot.ID], self.leaves[slots], first


def items_of(masses: np.ndarray, first: np.ndarray, count: int, newest: bool) -> torch.Tensor:
    """Return the coordinates of the items of trajectories, optionally each one's newest first.

    Args:
        masses: Of the trajectories. [n], int64.
        first: Their first coordinates. [n], int64.
        count: At most so many items.
        newest: Whether the last items of a trajectory come first.
    """
    index = np.arange(masses.sum()) - np.repeat(np.cumsum(masses) - masses, masses)
    index = np.repeat(masses, masses) - 1 - index if newest else index
    return torch.from_numpy((np.repeat(first, masses) + index)[:count])
