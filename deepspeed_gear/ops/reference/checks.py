"""What every op refuses before it reads or writes a row."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import ShapeError
from ..constants import R_ANCHOR, R_FIRST_ROW, R_NUM_STEPS, R_SLOT


def check_rows(
    resolutions: Tensor, num_rows: int | None, num_slots: int | None = None, final_row: int = 0
) -> None:
    """Check that every resolution lies in the columns.

    Args:
        resolutions: [B, 8], int64.
        num_rows: Of the shortest step column; None if there is none.
        num_slots: Of the shortest per-trajectory column; None if there is none.
        final_row: 1 if a column of T+1 rows is read.
    Raises:
        ShapeError: One does not.
    """
    first, steps, anchor = (resolutions[:, i] for i in (R_FIRST_ROW, R_NUM_STEPS, R_ANCHOR))
    good = (first >= 0) & (steps >= 1) & (anchor >= 0) & (anchor < steps) & (resolutions[:, R_SLOT] >= 0)
    if num_rows is not None:
        room = num_rows - final_row
        good &= (steps <= room) & (first <= room - steps)
    if num_slots is not None:
        good &= resolutions[:, R_SLOT] < num_slots
    if not good.all():
        i = int(torch.nonzero(~good)[0])
        rule = f"must lie in the columns' {num_rows} rows and {num_slots} slots"
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
