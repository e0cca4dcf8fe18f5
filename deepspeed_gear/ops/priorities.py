"""Checked public wrappers of the ops of priorities; `functional` gives them with the others."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ShapeError
from . import reference
from .backends import Ops, load_backend
from .checks import check_range, check_tensor
from .constants import (
    MOST_MASS_BITS,
    NUM_UPDATE_COUNTS,
    ONE_Q62,
    R_MASS,
    REPORT_WORDS,
    RESOLUTION_WORDS,
    SLOT_WORDS,
    U_PRIORITY,
    UNIT_STEP,
    UNIT_TRAJECTORY,
    UPDATE_WORDS,
    minima_levels,
    minima_size,
    tree_size,
)


def q62(name: str, exponent: float) -> int:
    """Return an exponent in [0, 1] as the ops take it: times 2^62, rounded.

    Raises:
        ShapeError: It is outside, under this name.
    """
    if not 0 <= exponent <= 1:
        raise ShapeError(name, "must be in [0, 1]", exponent)
    return round(exponent * ONE_Q62)


def mass(
    priorities: Tensor, alpha: float, *, most_bits: int = MOST_MASS_BITS, ops: Ops | None = None
) -> Tensor:
    """Compute the masses of priorities: priority^alpha in units of 2^-24.

    Args:
        priorities: Finite and at least 0. [n], float32.
        alpha: In [0, 1]; 0 makes all that are not 0 equal.
        most_bits: log2 of the largest mass, in [1, 40]; `most_mass_bits` keeps sums below 2^62.
        ops: The backend; None for "auto".
    Returns:
        Rounded (halves up) and clamped to [1, 2^most_bits]; 0 for priority 0. The same bits on every machine
        and backend, at most 1 from the exact power. [n], int64.
    Raises:
        ShapeError: Wrong shape or dtype, a priority is negative, infinite or NaN, or alpha or most_bits is
            out of range.
    Cost: about 11 ns a priority on a CPU.
    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016, equation 1.
    """
    check_tensor("priorities", priorities, torch.float32, (None,))
    _check_priorities(priorities)
    check_range("most_bits", most_bits, 1, MOST_MASS_BITS + 1)
    masses = torch.empty(len(priorities), dtype=torch.int64)
    (ops or load_backend()).mass_(masses, priorities, q62("alpha", alpha), most_bits)
    return masses


def importance(
    resolutions: Tensor, numerator: int, count: int, beta: float, *, ops: Ops | None = None
) -> Tensor:
    """Compute the importance weights of samples: (numerator / (count * mass))^beta.

    Args:
        resolutions: What was drawn; only the masses are read. [B, 8], int64.
        numerator: The total mass with `count` the number of items, for (N * P(i))^-beta; the least mass with
            `count` 1, for these divided by the greatest of them. In [1, 2^63).
        count: In [1, 2^63).
        beta: In [0, 1].
        ops: The backend; None for "auto".
    Returns:
        Rounded once, exactly 1 where numerator is the mass and count is 1. [B], float32.
    Raises:
        ShapeError: Wrong shape, dtype or range, or a mass is not positive.
    Cost: about 12 ns a sample on a CPU.
    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016, section 3.4.
    """
    check_tensor("resolutions", resolutions, torch.int64, (None, RESOLUTION_WORDS))
    check_range("numerator", numerator, 1, 1 << 63)
    check_range("count", count, 1, 1 << 63)
    if len(resolutions) and int(resolutions[:, R_MASS].min()) <= 0:
        raise ShapeError("masses", "must be positive", int(resolutions[:, R_MASS].min()))
    weights = torch.empty(len(resolutions), dtype=torch.float32)
    run = (ops or load_backend()).importance_
    run(weights, resolutions, numerator, count, q62("beta", beta))
    return weights


def minima(sums: Tensor, num_items: int, *, ops: Ops | None = None) -> Tensor:
    """Build the tree of least non-zero masses above the leaves of a tree of sums.

    Args:
        sums: The tree of sums; only its leaves are read. [tree_size(N)], int64.
        num_items: N.
        ops: The backend; None for "auto".
    Returns:
        Its levels >= 1; empty up to 32 items. [minima_size(N)], int64.
    Raises:
        ShapeError: Wrong shape or dtype.
    Cost: one pass over the leaves.
    """
    _check_tree(sums, num_items)
    out = torch.empty(minima_size(num_items), dtype=torch.int64)
    (ops or load_backend()).minima_build_(out, sums, num_items)
    return out


def minima_update(
    minima: Tensor, sums: Tensor, num_items: int, items: Tensor, *, ops: Ops | None = None
) -> None:
    """Mend the tree of minima in place after leaves of the sums have changed.

    Args:
        minima: Right before these leaves changed. [minima_size(N)], int64.
        sums: The tree of sums with the new leaves. [tree_size(N)], int64.
        num_items: N.
        items: The leaves that have changed; may repeat. [n], int64.
        ops: The backend; None for "auto".
    Raises:
        ShapeError: Wrong shape or dtype, or an item is outside [0, N).
    Cost: 32 leaves an item, and above them only what changes.
    """
    _check_tree(sums, num_items)
    check_tensor("minima", minima, torch.int64, (minima_size(num_items),))
    check_tensor("items", items, torch.int64, (None,))
    reference.check_items(items, num_items)
    (ops or load_backend()).minima_update_(minima, sums, num_items, items)


def least_mass(sums: Tensor, minima: Tensor, num_items: int) -> int:
    """Return the least non-zero mass of a tree, 0 if all are 0. Cost: one group of 32."""
    levels = minima_levels(num_items)
    top = minima[levels[-1][0] :] if levels else sums
    some = top[top > 0]
    return int(some.min()) if len(some) else 0


def resolve_rows(
    sums: Tensor,
    slots: Tensor,
    row_slots: Tensor,
    coordinates: Tensor,
    *,
    first: int = 0,
    ops: Ops | None = None,
) -> Tensor:
    """Find the row that each coordinate hits in a tree over the store's rows, and whose step it is.

    Args:
        sums: Tree over the rows. [tree_size(R)], int64.
        slots: The slot table. [S, 8], int64; columns `constants.SLOT_*`.
        row_slots: The slot that holds each row. [R], int32.
        coordinates: In [0, total). [B], int64.
        first: Sample number of the first coordinate.
        ops: The backend; None for "auto".
    Returns:
        The anchor is the row. [B, 8], int64; columns `constants.R_*`.
    Raises:
        ShapeError: Wrong shape or dtype, or a coordinate is outside the tree's total.
        RuntimeError: A row that is hit is no step of its slot (`ShapeError` with the reference).
    """
    check_tensor("row_slots", row_slots, torch.int32, (None,))
    check_tensor("slots", slots, torch.int64, (None, SLOT_WORDS))
    _check_tree(sums, len(row_slots))
    check_tensor("coordinates", coordinates, torch.int64, (None,))
    reference.check_coordinates(sums, len(row_slots), coordinates)
    resolutions = torch.empty(len(coordinates), RESOLUTION_WORDS, dtype=torch.int64)
    (ops or load_backend()).resolve_rows_(resolutions, sums, slots, row_slots, coordinates, first)
    return resolutions


def top_k(priorities: Tensor, sums: Tensor, k: int, *, ops: Ops | None = None) -> Tensor:
    """Find the k items with a mass that have the highest priorities.

    Args:
        priorities: Finite and at least 0. [N], float32.
        sums: Their masses first, as in a tree of sums. [N or more], int64.
        k: How many, at least 0.
        ops: The backend, not "cuda"; None for "auto".
    Returns:
        In falling order, equal ones by their number; -1 where there are fewer. [k], int64.
    Raises:
        ShapeError: Wrong shape, dtype or range, or a priority is negative, infinite or NaN.
    Cost: two passes over the priorities; 3 ms for 1,024 of ten million with few that stand out.
    """
    check_tensor("priorities", priorities, torch.float32, (None,))
    check_tensor("sums", sums, torch.int64, (None,))
    if len(sums) < len(priorities):
        raise ShapeError("sums", f"must have at least {len(priorities)} masses", len(sums))
    _check_priorities(priorities)
    items = torch.empty(check_range("k", k, 0, 1 << 40), dtype=torch.int64)
    (ops or load_backend()).top_k_(items, priorities, sums)
    return items


def report(
    log: Tensor, resolutions: Tensor, priorities: Tensor, tail: int, batch: int, *, ops: Ops | None = None
) -> None:
    """Write the new priorities of samples into a ring of reports, in place.

    Args:
        log: Rows of an update as `prioritize` takes it, global batch and sample number. [L, 6], int64.
        resolutions: What was drawn. [n, 8], int64; n <= L.
        priorities: Finite and at least 0. [n], float32.
        tail: Row of the first one, modulo L; at least 0.
        batch: The global batch they belong to.
        ops: The backend, not "cuda"; None for "auto".
    Raises:
        ShapeError: Wrong shape, dtype or range, or a priority is negative, infinite or NaN.
    Cost: about 5 ns a sample.
    """
    check_tensor("log", log, torch.int64, (None, REPORT_WORDS))
    check_tensor("priorities", priorities, torch.float32, (None,))
    check_tensor("resolutions", resolutions, torch.int64, (len(priorities), RESOLUTION_WORDS))
    check_range("tail", tail, 0, 1 << 63)
    if len(priorities) > len(log):
        raise ShapeError("log", f"must hold {len(priorities)} reports", len(log))
    _check_priorities(priorities)
    (ops or load_backend()).report_(log, resolutions, priorities, tail, batch)


def prioritize(
    sums: Tensor,
    minima: Tensor,
    priorities: Tensor,
    counts: Tensor,
    slots: Tensor,
    updates: Tensor,
    alpha: float,
    *,
    unit: int = UNIT_TRAJECTORY,
    most_bits: int = MOST_MASS_BITS,
    ops: Ops | None = None,
) -> None:
    """Set priorities in place, in order, and mend the trees above them.

    Args:
        sums: Tree over the N items. [tree_size(N)], int64.
        minima: Tree of minima over them; empty: none is kept. [minima_size(N)] or [0], int64.
        priorities: [N], float32.
        counts: Takes what was done, at `constants.APPLIED`, `STALE`, `CLAMPED`, `HIGHEST_PRIORITY` (float32
            bits; a maximum) and `DRAWABLE` (a change). [5], int64.
        slots: The slot table. [S, 8], int64.
        updates: Slot, generation, anchor, and the priority's float32 bits, in their order. [n, 4], int64. Or
            reports, as `report` writes them: they count by batch and sample number. [n, 6], int64.
        alpha: In [0, 1].
        unit: `UNIT_TRAJECTORY` (an item is a slot) or `UNIT_STEP` (a row of the store).
        most_bits: As in `mass`.
        ops: The backend, not "cuda"; None for "auto".
    Raises:
        ShapeError: Wrong shape, dtype or range, or a priority is negative, infinite or NaN.
        RuntimeError: An item lies outside [0, N) (`ShapeError` with the reference); nothing is changed.
    Cost: below 100 ns an update at a million items, one thread.
    Not thread safe: whoever calls it holds the store's lock.
    """
    check_tensor("priorities", priorities, torch.float32, (None,))
    _check_tree(sums, len(priorities))
    check_tensor("minima", minima, torch.int64, (minima_size(len(priorities)) if len(minima) else 0,))
    check_tensor("counts", counts, torch.int64, (NUM_UPDATE_COUNTS,))
    check_tensor("slots", slots, torch.int64, (None, SLOT_WORDS))
    words = REPORT_WORDS if updates.shape[1:] == (REPORT_WORDS,) else UPDATE_WORDS
    check_tensor("updates", updates, torch.int64, (None, words))
    if unit not in (UNIT_TRAJECTORY, UNIT_STEP):
        raise ShapeError("unit", "must be 0 or 1", unit)
    reference.order_of(updates[:, U_PRIORITY] & 0xFFFFFFFF)
    check_range("most_bits", most_bits, 1, MOST_MASS_BITS + 1)
    run = (ops or load_backend()).prioritize_
    run(sums, minima, priorities, counts, slots, updates, q62("alpha", alpha), unit, most_bits)


def _check_tree(sums: Tensor, num_items: int) -> None:
    check_range("num_items", num_items, 0, 1 << 50)
    check_tensor("sums", sums, torch.int64, (tree_size(num_items),))


def _check_priorities(priorities: Tensor) -> None:
    reference.order_of(priorities.view(torch.int32).long() & 0xFFFFFFFF)
