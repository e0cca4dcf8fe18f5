"""How the time of a draw and of an update grows with the number of items, and the time of the k highest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from support.subject import timed

from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.constants import MOST_MASS_BITS, ONE_Q62, tree_levels, tree_size
from deepspeed_gear.ops.records import MassUnit, PriorityUpdate, Resolution, Slot, SlotState, UpdateCount
from deepspeed_gear.sampling.anchors import AnchorRule

ALPHA = round(0.6 * ONE_Q62)
BATCH = 4096
_STEPS = 1000  # of a trajectory
_KEY, _SEED = 7, 11


@dataclass
class Items:
    """Steps with random priorities, as a store holds them.

    Args:
        num_items: A multiple of 1,000.
    """

    num_items: int

    def __post_init__(self) -> None:
        self.ops = load_backend("cpu")
        n, num_slots = self.num_items, self.num_items // _STEPS
        self.slots = torch.zeros(num_slots, Slot.NUM_WORDS, dtype=torch.int64)
        self.slots[:, Slot.STATE], self.slots[:, Slot.ID] = SlotState.COMMITTED, torch.arange(num_slots)
        self.slots[:, Slot.FIRST_ROW] = torch.arange(num_slots) * _STEPS
        self.slots[:, Slot.NUM_STEPS] = self.slots[:, Slot.NUM_ROWS] = _STEPS
        self.row_slots = torch.arange(num_slots, dtype=torch.int32).repeat_interleave(_STEPS)
        self.priorities = 1 - torch.rand(n, generator=torch.Generator().manual_seed(_SEED))
        self.sums = torch.zeros(tree_size(n), dtype=torch.int64)
        self.ops.mass_(self.sums[:n], self.priorities, ALPHA, MOST_MASS_BITS)
        self.ops.tree_build_(self.sums, n)
        self.counts = torch.zeros(UpdateCount.NUM_WORDS, dtype=torch.int64)
        self._top = self.sums[tree_levels(n)[-1][0] :]
        self._coordinates = torch.empty(BATCH, dtype=torch.int64)
        self._rows = torch.empty(BATCH, Resolution.NUM_WORDS, dtype=torch.int64)
        self._updates = torch.empty(BATCH, PriorityUpdate.NUM_WORDS, dtype=torch.int64)

    def draw(self, turn: int) -> None:
        """Draw a batch: coordinates, and what they hit."""
        first = turn * BATCH
        self.ops.draw_(self._coordinates, _SEED, _KEY, first, int(self._top.sum()))
        self.ops.resolve_rows_(self._rows, self.sums, self.slots, self.row_slots, self._coordinates, first)

    def prepare(self, turn: int) -> None:
        """Draw a batch and make its new priorities, so that `update` finds as little in the cache as we can.

        The items of an update were drawn a batch before, as in training with a lag.
        """
        self.draw(turn)
        self._updates[:, PriorityUpdate.SLOT] = self._rows[:, Resolution.SLOT]
        self._updates[:, PriorityUpdate.GENERATION] = self._rows[:, Resolution.GENERATION]
        self._updates[:, PriorityUpdate.ANCHOR] = self._rows[:, Resolution.ANCHOR]
        self._updates[:, PriorityUpdate.PRIORITY] = (1 - torch.rand(BATCH)).view(torch.int32)
        self.draw(turn + 1)

    def update(self, turn: int) -> None:
        """Apply a batch of updates."""
        del turn
        none = torch.empty(0, dtype=torch.int64)
        self.ops.prioritize_(
            self.sums,
            none,
            self.priorities,
            self.counts,
            self.slots,
            self._updates,
            AnchorRule.all().as_list(),
            ALPHA,
            MassUnit.STEP,
            MOST_MASS_BITS,
        )


def microseconds(num_items: int, count: int) -> dict[str, float]:
    """Return the median CPU time of a draw and of an update, of batches of 4,096."""
    items = Items(num_items)
    for turn in range(3):
        items.prepare(turn)
        items.update(turn)
    draws, updates = timed(items.draw, count)[0], timed(items.update, count, items.prepare)[0]
    return {
        "draw": float(np.median(draws)) / 1e3 / BATCH,
        "update": float(np.median(updates)) / 1e3 / BATCH,
    }


def top_k_ms(num_items: int, k: int, count: int) -> float:
    """Return the median CPU time of the k highest of random priorities."""
    ops = load_backend("cpu")
    priorities = torch.rand(num_items, generator=torch.Generator().manual_seed(_SEED))
    sums = torch.ones(tree_size(num_items), dtype=torch.int64)
    items = torch.empty(k, dtype=torch.int64)
    return float(np.median(timed(lambda _: ops.top_k_(items, priorities, sums), count)[0])) / 1e6
