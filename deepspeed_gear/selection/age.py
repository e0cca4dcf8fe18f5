"""Masses by age: the oldest and the newest items, and windows of the newest ones.

A trajectory is newer than those with a smaller id: ids are given in the order in which trajectories arrive,
and a data set has its stored order. What a window admits depends on everything that is stored; so a cut that
follows a change asks for the masses of all slots again.
"""

from __future__ import annotations

import numpy as np
import torch

from deepspeed_gear.selection.masses import Masses
from deepspeed_gear.store.table import COMMITTED, ID, STATE


class AgeMasses(Masses):
    """Masses in the order of age. Cost of a cut that needs the order: a sort of the trajectories."""

    def initialise(self) -> None:
        super().initialise()
        self._requeue_window()
        self.apply_slots()

    def apply_slots(self) -> None:
        if self.waiting:
            self._requeue_window()
        super().apply_slots()

    def _requeue_window(self) -> None:
        """Queue what enters or leaves the window because of what is queued."""
        if self.spec.rule.window is None:
            return
        committed = np.nonzero(self.table.slots[:, STATE] == COMMITTED)[0]
        masses = self.of(committed)
        inside = self.spec.rule.window.admits(
            self.table.slots[committed, ID],
            masses if self.spec.rule.unit == "step" else masses > 0,
            lambda name: self.table.values(name, committed),
        )
        wanted = np.zeros(self.num_items, np.int64)
        wanted[committed] = np.where(inside, masses, 0)
        changed = np.nonzero(np.where(self.queued >= 0, self.queued, self.leaves) != wanted)[0]
        self.queue(changed, wanted[changed])

    def extreme(self, count: int, newest: bool) -> torch.Tensor:
        """Return the coordinates of the oldest items, oldest first, or of the newest, newest first.

        Returns:
            [count], or fewer if there are not so many; int64.
        """
        slots = np.nonzero(self.leaves)[0]
        slots = slots[np.argsort(self.table.slots[slots, ID], kind="stable")]
        slots = slots[::-1] if newest else slots
        slots = slots[: np.searchsorted(np.cumsum(self.leaves[slots]), count) + 1]
        masses = self.leaves[slots]
        first = self.coordinates_of(torch.from_numpy(slots.copy())).numpy()
        index = np.arange(masses.sum()) - np.repeat(np.cumsum(masses) - masses, masses)
        index = np.repeat(masses, masses) - 1 - index if newest else index
        return torch.from_numpy((np.repeat(first, masses) + index)[:count])
