"""Windows: the rows that each one covers in its trajectory, and the row at every place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_gear.ops.records import Align, GatherSpec, Resolution, Source


def is_no_sample(resolutions: Tensor) -> Tensor:
    """Return which records are no samples: draws from a table without masses. [B], bool."""
    is_named = (resolutions[:, [Resolution.ID, Resolution.SLOT]] == Resolution.NO_SAMPLE).all(dim=1)
    return is_named & (resolutions[:, Resolution.GENERATION : Resolution.SAMPLE_NUMBER] == 0).all(
        dim=1
    )


class Span(NamedTuple):
    """Rows of each trajectory that a window covers, and their places in it. [B], int64 each."""

    begin: Tensor
    end: Tensor
    place: Tensor
    before: Tensor
    after: Tensor


def bounds(offset: Tensor | int, length: int, align: int, anchor: Tensor, rows: Tensor) -> Span:
    """Clip windows of `length` rows at anchor + offset to their trajectories.

    The rows are [max(0, anchor + offset), min(rows, anchor + offset + length)). `place` is the
    first real row's place in the window; `before` and `after` are the rows that an "edge" pads it
    with on both sides, 0 of a trajectory without rows. For anchor 1, offset -3, length 4 and 5
    rows, begin is 0, end 2 and in place the first real row has place 2.
    """
    first = anchor + offset
    zero = torch.zeros_like(rows)
    begin = torch.minimum(first.clamp(min=0), rows)
    end = torch.maximum(begin, torch.minimum((first + length).clamp(min=0), rows))
    count = end - begin
    place = {Align.IN_PLACE: begin - first, Align.LEFT: zero, Align.RIGHT: length - count}[align]
    nearest = torch.minimum(first.clamp(min=0), (rows - 1).clamp(min=0))
    empty = count == 0
    before = torch.where(empty, nearest, begin)
    after = torch.where(empty, nearest, end - 1)
    return Span(begin, end, torch.where(empty, 0, place), before, after)


def rows_of(
    field: GatherSpec, resolutions: Tensor, n_steps: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the row at every place of the window's part, and which of them are real.

    Places that are not real have the nearest edge's row. [B, part_count] each.
    """
    is_sample = ~is_no_sample(resolutions)
    if field.source == Source.TRAJECTORY:
        return resolutions[:, Resolution.SLOT, None], is_sample[:, None]
    offset: Tensor | int = field.offset
    if field.follows and n_steps is not None:
        offset = offset + n_steps
    rows = resolutions[:, Resolution.NUM_STEPS] + is_sample * (
        field.source == Source.STEPS_PLUS_ONE
    )
    span = bounds(offset, field.length, field.align, resolutions[:, Resolution.ANCHOR], rows)
    place = torch.arange(field.length)
    in_front = place < span.place[:, None]
    real = ~in_front & (place < (span.place + span.end - span.begin)[:, None])
    edge = torch.where(in_front, span.before[:, None], span.after[:, None])
    row = torch.where(real, (span.begin - span.place)[:, None] + place, edge)
    part = slice(field.part_first, field.part_first + field.part_count)
    return row[:, part], real[:, part]
