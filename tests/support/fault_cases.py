"""Calls of ops whose kernels find a wrong index: for the host's run of them, and for a GPU."""

from collections.abc import Callable
from typing import Any

from op_arguments import COUNT, LENGTH, NUM_SLOTS, arguments
from op_kit import REFERENCE, moved
from op_rings import ALL_ANCHORS, Ring

from deepspeed_gear.ops.constants import ONE_Q62
from deepspeed_gear.ops.records import (
    MassUnit,
    Normalize,
    PlacedTrajectory,
    Resolution,
    Slot,
)

FAR = 1 << 40
#: Op, its arguments in host memory, and what the error names.
Case = tuple[str, tuple[Any, ...], str]
_DRAW = [1, 2, 1, 0, 0, Normalize.BATCH]


def _order() -> Case:
    given = arguments("gather_")
    given[-1][5] = COUNT
    return "gather_", given, "gather_: order[5] must be a position in the batch; pass a perm"


def _record(op: str, at: int, word: int, value: int, rule: str) -> Case:
    given = arguments(op)
    given[at][7, word] = value
    return op, given, f"{op}: resolutions[7] {rule}; pass records that a draw"


def _extent() -> Case:
    given = arguments("suffix_sum_")
    given[2][3, 0] = NUM_SLOTS * LENGTH
    return "suffix_sum_", given, "suffix_sum_: extents[3] must lie in the rewards; pass"


def _priority() -> Case:
    given = arguments("mass_")
    given[1][4] = -1.0
    return "mass_", given, "mass_: priorities[4] must be finite and at least 0; correct"


def _place() -> Case:
    given = arguments("scatter_")
    placed = given[2]
    added = int((placed[:, PlacedTrajectory.SLOT] >= 0).nonzero()[3])
    placed[added, PlacedTrajectory.FIRST_ROW] = FAR
    return "scatter_", given, f"scatter_: placed[{added}] must lie in every column; pass"


def _ring(unit: int) -> Ring:
    """A table of one trajectory, so that its item is the one that is drawn."""
    ring = Ring(REFERENCE, 99, 9, 0, 5, unit, ALL_ANCHORS, True)
    ring.add([1])
    return ring


def _draw(change: Callable[[Ring], object], rule: str) -> Case:
    ring = _ring(MassUnit.STEP)
    change(ring)
    known = ring.slots, ring.sums, ring.minima, ring.row_slots, ring.zeros(1) + ONE_Q62
    given = ring.state, *ring.batch(3), *known, ring.rule, ring.shape, _DRAW, ring.drawn_unit
    return "ring_select_", given, f"ring_select_: row_slots[0] {rule}; change the tensors"


def _limited() -> Case:
    ring = _ring(MassUnit.TRAJECTORY)
    ring.sums[9] = ring.sums[0]  # of no slot
    ring.sums[0] = 0
    known = ring.slots, ring.sums, ring.minima, ring.zeros(1) + ONE_Q62
    how = ring.rule, ring.shape, _DRAW, ring.drawn_unit, 2
    name = "ring_select_limited_: slots[9] must have a trajectory where sums has a mass; change"
    return "ring_select_limited_", (ring.state, *ring.batch(1), *known, *how), name


def _epoch() -> Case:
    ring = Ring(REFERENCE, 99, 9, 0, 5, MassUnit.STEP, ALL_ANCHORS, False)
    ring.add([1])
    ring.sums[9] = ring.sums[0]  # of no slot
    ring.sums[0] = 0
    known = ring.slots, ring.sums, ring.rule, ring.shape, [1, 2, 1, 0, 0, 0], ring.unit
    name = "ring_epoch_: slots[9] must have a trajectory where sums has a mass; change"
    return "ring_epoch_", (ring.state, ring.zeros(1, 8), ring.zeros(1), *known), name


def _top_k(change: Callable[[Ring], object], index: int, rule: str) -> Case:
    ring = _ring(MassUnit.STEP)
    change(ring)
    known = ring.slots, ring.sums, ring.priorities, ring.row_slots, ring.rule, ring.shape
    given = ring.state, *ring.batch(1), *known, _DRAW, ring.item_unit, False
    return "ring_top_k_", given, f"ring_top_k_: items[{index}] {rule}; change the tensors"


def _set(name: str, *index: int, value: int) -> Callable[[Ring], object]:
    return lambda ring: getattr(ring, name).__setitem__(index, value)


ANCHOR = "must have an anchor among its steps"
FAULTS: dict[str, Callable[[], Case]] = {
    "gather_ order": _order,
    "gather_ anchor": lambda: _record("gather_", 6, Resolution.ANCHOR, LENGTH, ANCHOR),
    "gather_ rows": lambda: _record(
        "gather_", 6, Resolution.FIRST_ROW, FAR, "must lead to rows of every column"
    ),
    "n_step_ anchor": lambda: _record("n_step_", 7, Resolution.ANCHOR, -1, ANCHOR),
    "n_step_ rows": lambda: _record(
        "n_step_", 7, Resolution.FIRST_ROW, -FAR, "must lead to rows of the rewards"
    ),
    "suffix_sum_": _extent,
    "mass_": _priority,
    "scatter_": _place,
    "ring_select_ slot": lambda: _draw(
        _set("row_slots", 0, value=9), "must be a slot where the row has a mass"
    ),
    "ring_select_ step": lambda: _draw(
        _set("slots", 0, Slot.FIRST_ROW, value=50), "must be the slot that the row belongs to"
    ),
    "ring_select_limited_": _limited,
    "ring_epoch_": _epoch,
    "ring_top_k_ oldest": lambda: _top_k(
        _set("slots", 0, Slot.FIRST_ROW, value=-3), -3, "must be the oldest stored item"
    ),
    "ring_top_k_ item": lambda: _top_k(
        _set("row_slots", 0, value=-1), 0, "must be a step of a stored trajectory"
    ),
}


def fault_case(name: str) -> Case:
    """Return a case with tensors of its own."""
    op, given, text = FAULTS[name]()
    return op, tuple(moved(given, "cpu")), text
