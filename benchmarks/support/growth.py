"""How the time of a draw and of an update grows with the number of items, and the time of the k highest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.constants import (
    COMMITTED,
    MOST_MASS_BITS,
    NUM_UPDATE_COUNTS,
    ONE_Q62,
    R_ANCHOR,
    R_GENERATION,
    R_SLOT,
    RESOLUTION_WORDS,
    SLOT_FIRST_ROW,
    SLOT_ID,
    SLOT_NUM_ROWS,
    SLOT_NUM_STEPS,
    SLOT_STATE,
    SLOT_WORDS,
    U_ANCHOR,
    U_GENERATION,
    U_PRIORITY,
    U_SLOT,
    UNIT_STEP,
    UPDATE_WORDS,
    tree_levels,
    tree_size,
)
from support.subject import timed

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
        self.slots = torch.zeros(num_slots, SLOT_WORDS, dtype=torch.int64)
        self.slots[:, SLOT_STATE], self.slots[:, SLOT_ID] = COMMITTED, torch.arange(num_slots)
        self.slots[:, SLOT_FIRST_ROW] = torch.arange(num_slots) * _STEPS
        self.slots[:, SLOT_NUM_STEPS] = self.slots[:, SLOT_NUM_ROWS] = _STEPS
        self.row_slots = torch.arange(num_slots, dtype=torch.int32).repeat_interleave(_STEPS)
        self.priorities = 1 - torch.rand(n, generator=torch.Generator().manual_seed(_SEED))
        self.sums = torch.zeros(tree_size(n), dtype=torch.int64)
        self.ops.mass_(self.sums[:n], self.priorities, ALPHA, MOST_MASS_BITS)
        self.ops.tree_build_(self.sums, n)
        self.counts = torch.zeros(NUM_UPDATE_COUNTS, dtype=torch.int64)
        self._top = self.sums[tree_levels(n)[-1][0] :]
        self._coordinates = torch.empty(BATCH, dtype=torch.int64)
        self._rows = torch.empty(BATCH, RESOLUTION_WORDS, dtype=torch.int64)
        self._updates = torch.empty(BATCH, UPDATE_WORDS, dtype=torch.int64)

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
        self._updates[:, U_SLOT] = self._rows[:, R_SLOT]
        self._updates[:, U_GENERATION] = self._rows[:, R_GENERATION]
        self._updates[:, U_ANCHOR] = self._rows[:, R_ANCHOR]
        self._updates[:, U_PRIORITY] = (1 - torch.rand(BATCH)).view(torch.int32)
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
            ALPHA,
            UNIT_STEP,
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
