"""Priorities, masses and trees of any magnitude for the ops on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import ONE_Q62, tree_size
from deepspeed_gear.ops.records import SlotState

SIZES = (0, 1, 7, 33)
NUM_ITEMS = (0, 1, 7, 31, 32, 33, 1023, 1024, 1025, 33000)
ALPHAS = (0, 1, round(0.6 * ONE_Q62), ONE_Q62 - 1, ONE_Q62)
REFUSED = (ValueError, RuntimeError)
BAD_PRIORITIES = [-1.0, -1e-45, float("inf"), float("-inf"), float("nan")]
SameBits = Callable[[Tensor, Tensor], bool]


def any_priorities(count: int) -> Tensor:
    """Finite floats of any magnitude, and zeros of both signs."""
    priorities = torch.randint(0, 0x7F800000, (count,), dtype=torch.int32).view(torch.float32)
    chosen = torch.rand(count)
    return torch.where(chosen < 0.1, -0.0, torch.where(chosen < 0.2, 0.0, priorities))


def masses_of(count: int) -> Tensor:
    """Masses of any magnitude, a third of them 0, and small ones that repeat."""
    masses = torch.randint(1, 1 << 40, (count,)) >> torch.randint(0, 40, (count,))
    return masses * (torch.rand(count) < 0.67)


def tree_of(masses: Tensor, ops: Ops) -> Tensor:
    sums = torch.zeros(tree_size(len(masses)), dtype=torch.int64)
    sums[: len(masses)] = masses
    ops.tree_build_(sums, len(masses))
    return sums


def store_of(lengths: list[int], gap: int = 2) -> tuple[Tensor, Tensor]:
    """Slots in falling order of their rows, with unused rows between them; and the slot of each row."""
    slots = torch.randint(0, 1 << 40, (len(lengths), 8))
    slots[:, 0] = SlotState.COMMITTED
    row_slots = torch.full((sum(lengths) + gap * len(lengths),), -1, dtype=torch.int32)
    first = len(row_slots)
    for i, length in enumerate(lengths):
        first -= length + gap
        slots[i, 3], slots[i, 4] = first, length
        row_slots[first : first + length] = i
    return slots, row_slots
