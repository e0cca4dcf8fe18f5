"""The ops behind one interface, and checked public wrappers of them.

`load_backend` gives the ops of a backend as they are: in place, positional, checked only for what would read
or write outside a tensor. The functions of this module allocate their results and check every argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShapeError
from . import reference
from .backends import Ops, load_backend
from .between import (
    assign_draws,
    pack_reports,
    pack_rows,
    send_draws,
    take_draws,
    unpack_reports,
    unpack_rows,
)
from .checks import check_key, check_range, check_tensor
from .constants import (
    ALIGN_IN_PLACE,
    FIELD_INTS,
    PAD_EDGE,
    PAD_VALUE,
    RESOLUTION_WORDS,
    SLOT_WORDS,
    SOURCE_POSITION,
    SOURCE_STEPS,
    SOURCE_TIMESTEP,
    SOURCE_TRAJECTORY,
    UNIT_TRAJECTORY,
    minima_size,
    tree_levels,
    tree_size,
)
from .priorities import (
    importance,
    least_mass,
    mass,
    minima,
    minima_update,
    prioritize,
    q62,
    report,
    resolve_rows,
    top_k,
)

__all__ = [
    "Ops",
    "assign_draws",
    "draw",
    "gather",
    "importance",
    "least_mass",
    "load_backend",
    "mass",
    "minima",
    "minima_size",
    "minima_update",
    "n_step",
    "pack_reports",
    "pack_rows",
    "permute",
    "powers_of",
    "prioritize",
    "q62",
    "report",
    "resolve",
    "resolve_rows",
    "scaling",
    "send_draws",
    "suffix_sum",
    "take_draws",
    "top_k",
    "tree",
    "tree_levels",
    "tree_size",
    "tree_total",
    "unpack_reports",
    "unpack_rows",
]

_SCALING_ELEMENTS = 128


def draw(seed: int, stream: int, first: int, total: int, count: int, *, ops: Ops | None = None) -> Tensor:
    """Draw the coordinates of the samples first .. first + count - 1 of a stream.

    Args:
        seed: The run's seed, in [0, 2^63).
        stream: The stream's number, in [0, 2^32).
        first: The number of the first sample, at least 0.
        total: The total mass, in [1, 2^63).
        count: How many samples.
        ops: The backend; None for "auto".
    Returns:
        Points in [0, total), each with probability 1 / total up to 2^-64 relative. [count], int64.
    Raises:
        ShapeError: An argument is out of its range.
    """
    check_key(seed, stream)
    check_range("first", first, 0, 1 << 63)
    check_range("total", total, 1, 1 << 63)
    coordinates = torch.empty(check_range("count", count, 0, 1 << 40), dtype=torch.int64)
    (ops or load_backend()).draw_(coordinates, seed, stream, first, total)
    return coordinates


def permute(
    seed: int, stream: int, epoch: int, first: int, size: int, count: int, *, ops: Ops | None = None
) -> Tensor:
    """Return where an epoch's permutation of [0, size) puts the indices first .. first + count - 1.

    Args:
        seed: The run's seed, in [0, 2^63).
        stream: The stream's number, in [0, 2^32).
        epoch: Every epoch has an order of its own; at least 0.
        first: The first index, at least 0.
        size: How many items are permuted; first + count is at most that.
        count: How many indices.
        ops: The backend; None for "auto".
    Returns:
        Distinct items in [0, size). [count], int64.
    Raises:
        ShapeError: An argument is out of its range.
    """
    check_key(seed, stream)
    check_range("epoch", epoch, 0, 1 << 63)
    check_range("size", size, 0, 1 << 62)
    check_range("first", first, 0, size + 1)
    items = torch.empty(check_range("count", count, 0, size - first + 1), dtype=torch.int64)
    (ops or load_backend()).permute_(items, seed, stream, epoch, first, size)
    return items


def tree(masses: Tensor, *, ops: Ops | None = None) -> Tensor:
    """Build the tree of integer sums over masses.

    Args:
        masses: At least 0, their sum below 2^62. [N], int64.
        ops: The backend; None for "auto".
    Returns:
        All levels, as `tree_levels(N)` lays them out. [tree_size(N)], int64.
    Raises:
        ShapeError: Wrong shape or dtype, or a mass is negative.
    Cost: one pass over the masses.
    """
    check_tensor("masses", masses, torch.int64, (None,))
    if len(masses) and int(masses.min()) < 0:
        raise ShapeError("masses", "must not be negative", int(masses.min()))
    sums = torch.zeros(tree_size(len(masses)), dtype=torch.int64)
    sums[: len(masses)] = masses
    (ops or load_backend()).tree_build_(sums, len(masses))
    return sums


def tree_total(sums: Tensor, num_items: int) -> int:
    """Return the sum of all masses: of the tree's last level."""
    return int(sums[tree_levels(num_items)[-1][0] :].sum())


def resolve(
    sums: Tensor,
    slots: Tensor,
    coordinates: Tensor,
    rule: Sequence[int],
    *,
    unit: int = UNIT_TRAJECTORY,
    seed: int = 0,
    stream: int = 0,
    first: int = 0,
    ops: Ops | None = None,
) -> Tensor:
    """Find the trajectory and the anchor that each coordinate hits.

    Args:
        sums: Tree over the slots. [tree_size(N)], int64.
        slots: The slot table. [N, 8], int64; columns `constants.SLOT_*`.
        coordinates: In [0, total). [B], int64.
        rule: first, trim, stride, most and from_end of the anchors; `common/slot.h` says more.
        unit: `UNIT_TRAJECTORY` (the anchor is a second draw) or `UNIT_STEP` (one unit of mass is one anchor).
        seed: Key of the second draw.
        stream: Stream of the second draw.
        first: Sample number of the first coordinate.
        ops: The backend; None for "auto".
    Returns:
        [B, 8], int64; columns `constants.R_*`.
    Raises:
        ShapeError: Wrong shape or dtype, or a coordinate is outside the tree's total.
    """
    check_key(seed, stream)
    check_tensor("slots", slots, torch.int64, (None, SLOT_WORDS))
    check_tensor("sums", sums, torch.int64, (tree_size(len(slots)),))
    check_tensor("coordinates", coordinates, torch.int64, (None,))
    if len(rule) != 5 or rule[2] < 1:
        raise ShapeError("rule", "must be first, trim, stride >= 1, most, from_end", list(rule))
    total = tree_total(sums, len(slots))
    if len(coordinates) and not 0 <= int(coordinates.min()) <= int(coordinates.max()) < total:
        raise ShapeError("coordinates", f"must lie in [0, {total})", int(coordinates.max()))
    resolutions = torch.empty(len(coordinates), RESOLUTION_WORDS, dtype=torch.int64)
    run = (ops or load_backend()).resolve_
    run(resolutions, sums, slots, coordinates, list(rule), unit, seed, stream, first)
    return resolutions


def suffix_sum(reward: Tensor, extents: Tensor, *, ops: Ops | None = None) -> Tensor:
    """Sum every trajectory's rewards from each step to its end: the undiscounted return-to-go.

    Args:
        reward: Any stored dtype. [rows].
        extents: First row and number of steps of each trajectory. [n, 2], int64.
        ops: The backend; None for "auto".
    Returns:
        Added in float64 from the end, rounded once; 0 in rows of no trajectory. [rows], float32.
    Raises:
        ShapeError: Wrong shape or dtype, or an extent lies outside the rows.
    """
    check_tensor("reward", reward, None, (None,))
    check_tensor("extents", extents, torch.int64, (None, 2))
    reference.check_extents(extents, len(reward))
    out = torch.zeros(len(reward), dtype=torch.float32)
    (ops or load_backend()).suffix_sum_(out, reward, extents)
    return out


def powers_of(gamma: float, n: int) -> Tensor:
    """Return gamma^0 .. gamma^n by repeated multiplication: equal everywhere. [n + 1], float64."""
    powers = [1.0]
    for _ in range(n):
        powers.append(powers[-1] * gamma)
    return torch.tensor(powers, dtype=torch.float64)


def n_step(
    reward: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    resolutions: Tensor,
    n: int,
    gamma: float,
    *,
    ops: Ops | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute n-step returns from the anchors on.

    Args:
        reward: Any stored dtype. [rows].
        terminated: [rows], bool.
        truncated: None: never. [rows], bool.
        resolutions: [B, 8], int64.
        n: Most steps, at least 1.
        gamma: Discount, in [0, 1].
        ops: The backend; None for "auto".
    Returns:
        The return (summed in float64; [B], float32), the discount of the value behind it (gamma^k, 0 after a
        termination; [B], float32) and the number of steps k (up to n, a termination, a truncation or the end
        of the trajectory; [B], int64).
    Raises:
        ShapeError: Wrong shape, dtype or range, or a step of [anchor, min(anchor + n, num_steps)) lies
            outside the rows: step t is row first_row + t, and other steps need not be there.
    """
    check_tensor("reward", reward, None, (None,))
    for name, flags in (("terminated", terminated), ("truncated", truncated)):
        if flags is not None:
            check_tensor(name, flags, torch.bool, (len(reward),))
    check_range("n", n, 1, 1 << 31)
    if not 0 <= gamma <= 1:
        raise ShapeError("gamma", "must be in [0, 1]", gamma)
    check_tensor("resolutions", resolutions, torch.int64, (None, RESOLUTION_WORDS))
    reference.check_rows(resolutions, [reference.n_step_reads(resolutions, n, len(reward))])
    returns, discount = torch.empty(2, len(resolutions), dtype=torch.float32).unbind()
    steps = torch.empty(len(resolutions), dtype=torch.int64)
    run = (ops or load_backend()).n_step_
    run(returns, discount, steps, reward, terminated, truncated, powers_of(gamma, n), resolutions, n)
    return returns, discount, steps


def gather(
    column: Tensor,
    resolutions: Tensor,
    *,
    source: int = SOURCE_STEPS,
    offset: int = 0,
    length: int | None = None,
    align: int = ALIGN_IN_PLACE,
    pad: float | str = 0.0,
    dtype: torch.dtype | None = None,
    first: int = 0,
    count: int | None = None,
    order: Tensor | None = None,
    ops: Ops | None = None,
) -> tuple[Tensor, Tensor]:
    """Collect one window of one column for every resolution.

    Args:
        column: Stored rows. [rows, *shape], contiguous.
        resolutions: [B, 8], int64.
        source: `SOURCE_STEPS`, `SOURCE_STEPS_PLUS_ONE` (a column of T+1 rows) or `SOURCE_TRAJECTORY`.
        offset: Of the window's first step from the anchor.
        length: Steps of the window; None for a single step without a time axis.
        align: `ALIGN_IN_PLACE`, `ALIGN_LEFT` or `ALIGN_RIGHT`: where the real steps lie in the window.
        pad: "edge", or the value of the other steps, in units of the result.
        dtype: Of the result; None keeps the column's.
        first: The first row of the window that is wanted.
        count: Rows of the window that are wanted; None: up to its end.
        order: The order in which a GPU takes the samples, each index once; None: as they come. The result is
            the same; rows of host memory are read faster by rising address. [B], int64.
        ops: The backend; None for "auto".
    Returns:
        The rows [first, first + count) of the window ([B, count, *shape], or [B, *shape] without a time axis)
        and where they are real ([B, count] or [B], bool).
    Raises:
        ShapeError: Wrong shape, dtype or range, an index is missing in the order, or a row that is read (a
            real one, or the nearest one as the edge's padding) lies outside the column: step t is row
            first_row + t, and other steps need not be there.
    """
    check_tensor("resolutions", resolutions, torch.int64, (None, RESOLUTION_WORDS))
    target = dtype or column.dtype
    if not reference.is_allowed(column.dtype, target):
        raise ShapeError("dtype", f"must be one that {column.dtype} can be converted to", target)
    if source in (SOURCE_TIMESTEP, SOURCE_POSITION) or (source == SOURCE_TRAJECTORY and length is not None):
        raise ShapeError("source", "must be a column of steps where there is a window", source)
    steps = 1 if length is None else check_range("length", length, 1, 1 << 40)
    check_range("first", first, 0, steps)
    rows_wanted = steps - first if count is None else check_range("count", count, 1, steps - first + 1)
    elements = math.prod(column.shape[1:])
    if order is not None:
        check_tensor("order", order, torch.int64, (len(resolutions),))
        reference.check_order(order, len(resolutions))
    kind = PAD_EDGE if pad == "edge" else PAD_VALUE
    spec = [source, offset, steps, align, 0, kind, elements, 0, first, rows_wanted]
    assert len(spec) == FIELD_INTS
    reference.check_windows([reference.FieldSpec(*spec)], [column], resolutions, None)
    out = torch.empty(len(resolutions), rows_wanted, *column.shape[1:], dtype=target)
    mask = torch.empty(len(resolutions), rows_wanted, dtype=torch.bool)
    none = torch.empty(0)
    counters, value = torch.zeros(3, dtype=torch.int64), 0.0 if isinstance(pad, str) else float(pad)
    run = (ops or load_backend()).gather_
    run([out], [mask], counters, [column], [none], [none], resolutions, None, spec, [value], 1, order)
    return (out[:, 0], mask[:, 0]) if length is None else (out, mask)


def scaling(shift: Tensor, gain: Tensor, source: torch.dtype, target: torch.dtype) -> tuple[Tensor, Tensor]:
    """Prepare the (x - shift) * gain of one field for `gather_`.

    Args:
        shift: One value, or one for each element of a row.
        gain: Like `shift`.
        source: The column's dtype.
        target: The field's dtype.
    Returns:
        Both of the type in which the op computes; short rows repeated, so that it works on many at once (rows
        of 11 floats: up to 4 times faster). [k * elements], or [1].
    """
    dtype = reference.arithmetic_dtype(source, target)
    repeats = 1 if shift.numel() == 1 else -(-_SCALING_ELEMENTS // shift.numel())
    return shift.reshape(-1).to(dtype).repeat(repeats), gain.reshape(-1).to(dtype).repeat(repeats)
