"""Checks that every op makes before it reads or writes a row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_gear.ops.records import Resolution

from ...errors import ShapeError
from ..constants import MOST_STEPS


class Reads(NamedTuple):
    """Steps that an op reads of each trajectory, and the number of rows of the column that holds them."""

    step: Tensor  # [B, n], int64
    is_read: Tensor  # [B, n], bool
    num_rows: int


def is_no_sample(resolutions: Tensor) -> Tensor:
    """Return which records are no samples, as a draw from a table without masses gives. [B], bool."""
    is_named = (resolutions[:, [Resolution.ID, Resolution.SLOT]] == Resolution.NO_SAMPLE).all(dim=1)
    return is_named & (resolutions[:, Resolution.GENERATION : Resolution.SAMPLE_NUMBER] == 0).all(dim=1)


def check_rows(resolutions: Tensor, reads: Iterable[Reads], num_slots: int | None = None) -> None:
    """Check that every resolution has an anchor and that the rows that are read lie in the columns.

    Step t of a trajectory is row first_row + t. A trajectory with only some of its steps present may begin
    before its column, at a negative row, and end after it. A record that is no sample reads nothing.

    Args:
        resolutions: [B, 8], int64.
        reads: Those of every step column.
        num_slots: Of the shortest per-trajectory column; None if there is none.
    Raises:
        ShapeError: A resolution has no anchor, or a row lies outside.
    """
    first, steps, anchor, slot = (
        resolutions[:, i]
        for i in (Resolution.FIRST_ROW, Resolution.NUM_STEPS, Resolution.ANCHOR, Resolution.SLOT)
    )
    good = (steps >= 1) & (steps <= MOST_STEPS) & (anchor >= 0) & (anchor < steps) & (slot >= 0)
    if num_slots is not None:
        good &= slot < num_slots
    columns = list(reads)
    for step, is_read, num_rows in columns:
        is_inside = (first[:, None] >= -step) & (first[:, None] < num_rows - step)
        good &= (is_inside | ~is_read).all(dim=1)
    good |= is_no_sample(resolutions)
    if not good.all():
        i = int(torch.nonzero(~good)[0])
        rows = min((column.num_rows for column in columns), default=None)
        rule = f"must lie in the columns' {rows} rows and {num_slots} slots"
        raise ShapeError(f"resolution {i}", rule, resolutions[i].tolist(), "resolve against the same table")


def check_extents(extents: Tensor, num_rows: int) -> None:
    """Check that every extent lies in the rows.

    Raises:
        ShapeError: One does not.
    """
    first, length = extents.unbind(1)
    good = (first >= 0) & (length >= 0) & (length <= num_rows) & (first <= num_rows - length)
    if not good.all():
        i = int(torch.nonzero(~good)[0])
        raise ShapeError(f"extent {i}", f"must lie in {num_rows} rows", extents[i].tolist())


def check_order(order: Tensor, count: int) -> None:
    """Check that an order takes every sample once.

    Raises:
        ShapeError: It does not.
    """
    if not torch.equal(order.sort().values, torch.arange(count)):
        raise ShapeError("order", f"must have every index of [0, {count}) once", order.tolist())
