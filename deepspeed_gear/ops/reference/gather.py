"""Reference op `gather_`: windows of columns into the tensors of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.constants import MOST_STEPS
from deepspeed_gear.ops.gather_spec import GatherSpec, raised
from deepspeed_gear.ops.records import Align, Pad, Resolution, Source
from deepspeed_gear.ops.reference.checks import Reads, check_order, check_rows, is_no_sample
from deepspeed_gear.ops.reference.convert import convert, narrow


class Span(NamedTuple):
    """Rows of each trajectory that a window covers, and their places in it. [B], int64 each."""

    begin: Tensor
    end: Tensor
    place: Tensor
    before: Tensor
    after: Tensor


def bounds(offset: Tensor | int, length: int, align: int, anchor: Tensor, rows: Tensor) -> Span:
    """Clip windows to their trajectories.

    The real rows are [max(0, anchor + offset), min(rows, anchor + offset + length)), or none. `place` is the
    first one's place in the window; `before` and `after` are the rows that pad it on both sides where the pad
    is "edge"; of a trajectory without rows both are 0.
    """
    first = anchor + offset
    zero, rows_1 = torch.zeros_like(rows), (rows - 1).clamp(min=0)
    begin = torch.minimum(torch.maximum(first, zero), rows)
    end = torch.maximum(begin, torch.minimum(torch.maximum(first + length, zero), rows))
    count = end - begin
    if align == Align.IN_PLACE:
        place = begin - first
    elif align == Align.LEFT:
        place = zero
    else:
        place = length - count
    nearest = torch.minimum(torch.maximum(first, zero), rows_1)
    empty = count == 0
    return Span(
        begin,
        end,
        torch.where(empty, 0, place),
        torch.where(empty, nearest, begin),
        torch.where(empty, nearest, end - 1),
    )


def window_rows(span: Span, length: int) -> tuple[Tensor, Tensor]:
    """Return the trajectory's row at every place of the windows (padding: the edge's), and which are real.

    Returns:
        [B, length] int64, and [B, length] bool.
    """
    place = torch.arange(length)
    in_front = place < span.place[:, None]
    real = ~in_front & (place < (span.place + span.end - span.begin)[:, None])
    edge = torch.where(in_front, span.before[:, None], span.after[:, None])
    return torch.where(real, (span.begin - span.place)[:, None] + place, edge), real


def gather_(
    outs: Sequence[Tensor],
    masks: Sequence[Tensor],
    counters: Tensor,
    columns: Sequence[Tensor],
    shifts: Sequence[Tensor],
    gains: Sequence[Tensor],
    resolutions: Tensor,
    n_steps: Tensor | None,
    spec: Sequence[int],
    pad_values: Sequence[float],
    threads: int,
    order: Tensor | None = None,
) -> None:
    """Gather all fields of a batch.

    For a record that is no sample (`is_no_sample`) every row is padding: 0 where the edge pads, and a
    position stays one.

    Args:
        outs: Every field's tensor, written whole: the rows [first, first + count) of its window.
            [B, count, elements] in any shape.
        masks: True where a row is real; fields with equal parts of equal windows may share one, which the
            first of them writes. [B, count], bool.
        counters: Adds real rows, all rows and bytes written. [3], int64.
        columns: Every field's column; ignored for a timestep and a position. [rows, elements] in any shape.
        shifts: Every field's shift, repeated any number of times; empty without. [k * elements] or [1].
        gains: As shifts; both or none.
        resolutions: [B, 8], int64.
        n_steps: What a field with `after_n_step` adds to its offset. [B], int64.
        spec: Every field's GatherSpec, lowered.
        pad_values: Every field's padding, in units of its output.
        threads: Not used here. Threads of the host; on a GPU, above 1: the most blocks of a (short) launch.
        order: The order in which samples are gathered, each index once; affects only speed. [B], int64.
    Raises:
        ShapeError: A row that is read lies outside its column, a part outside its window, there is no
            conversion between two dtypes, or an index is missing in the order.
    """
    fields = raised(spec)
    for field in fields:
        _check_field(field, n_steps)
    check_windows(fields, columns, resolutions, n_steps)
    if order is not None:
        check_order(order, len(resolutions))
    written, none = {-1}, is_no_sample(resolutions)
    for each in zip(fields, outs, columns, shifts, gains, pad_values, strict=True):
        field, out, column, shift, gain, pad = each
        row, real = _rows_of(field, resolutions, n_steps)
        values = _values(field, out.dtype, column, shift, gain, resolutions, row, real)
        if field.source != Source.POSITION:
            has_edge = field.pad == Pad.EDGE
            padded = none[:, None].expand_as(real) if has_edge else ~real
            values[padded] = rounded_pad(0.0 if has_edge else pad, out.dtype)
        out.copy_(values.view(out.shape))
        if field.mask not in written:
            masks[field.mask].copy_(real.view(masks[field.mask].shape))
            written.add(field.mask)
        counters[0] += real.sum()
        counters[1] += real.numel()
        counters[2] += out.numel() * out.element_size()


def _check_field(field: GatherSpec, n_steps: Tensor | None) -> None:
    if not 1 <= field.length <= MOST_STEPS:
        raise ShapeError("length", f"must be in [1, {MOST_STEPS}]", field.length)
    end = field.part_first + field.part_count
    if not 0 <= field.part_first < end <= field.length:
        rule = f"must be a part of the window, [0, {field.length})"
        raise ShapeError("first and count", rule, f"[{field.part_first}, {end})")
    if abs(field.offset) > MOST_STEPS:
        raise ShapeError("offset", f"must be in [-{MOST_STEPS}, {MOST_STEPS}]", field.offset)
    if field.source == Source.TRAJECTORY and field.length != 1:
        raise ShapeError("length", "must be 1 for a column of one row per trajectory", field.length)
    if field.after_n_step and n_steps is None:
        raise ShapeError("n_steps", "must be given for a field that follows it")


def check_windows(
    fields: Sequence[GatherSpec], columns: Sequence[Tensor], resolutions: Tensor, n_steps: Tensor | None
) -> None:
    """Check that the rows that fill every part lie in the columns: the real ones, and the edges that pad.

    Args:
        fields: As `gather_`, like the others.
        columns: [rows, elements] in any shape.
        resolutions: [B, 8], int64.
        n_steps: [B], int64.
    Raises:
        ShapeError: One does not, or a resolution has no anchor.
    """
    reads, slots = [], []
    for field, column in zip(fields, columns, strict=True):
        held = column.numel() // field.elements
        if field.source == Source.TRAJECTORY:
            slots.append(held)
        elif field.source in (Source.STEPS, Source.STEPS_PLUS_ONE):
            step, real = _rows_of(field, resolutions, n_steps)
            reads.append(Reads(step, real | (field.pad == Pad.EDGE), held))
    check_rows(resolutions, reads, min(slots, default=None))


def _rows_of(field: GatherSpec, resolutions: Tensor, n_steps: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the row at every place of the part, and which places are real. [B, count] each."""
    is_sample = ~is_no_sample(resolutions)
    if field.source == Source.TRAJECTORY:
        return resolutions[:, Resolution.SLOT, None], is_sample[:, None]
    offset: Tensor | int = field.offset
    if field.after_n_step and n_steps is not None:
        offset = offset + n_steps
    rows = resolutions[:, Resolution.NUM_STEPS] + is_sample * (field.source == Source.STEPS_PLUS_ONE)
    span = bounds(offset, field.length, field.align, resolutions[:, Resolution.ANCHOR], rows)
    row, real = window_rows(span, field.length)
    part = slice(field.part_first, field.part_first + field.part_count)
    return row[:, part], real[:, part]


def _values(
    field: GatherSpec,
    dtype: torch.dtype,
    column: Tensor,
    shift: Tensor,
    gain: Tensor,
    resolutions: Tensor,
    row: Tensor,
    real: Tensor,
) -> Tensor:
    """Read and convert the rows of every part. [B, count, elements], of `dtype`.

    A place that is not real is read only where the edge pads it; elsewhere its value is undefined.
    """
    if field.source == Source.POSITION:
        places = torch.arange(field.part_first, field.part_first + field.part_count)
        return places.repeat(len(row), 1)[:, :, None]
    if field.source == Source.TIMESTEP:
        return row[:, :, None].clone()
    is_read = real | ((field.pad == Pad.EDGE) & ~is_no_sample(resolutions)[:, None])
    if field.source != Source.TRAJECTORY:
        row = row + resolutions[:, Resolution.FIRST_ROW, None]
    values = column.new_zeros(*row.shape, field.elements)
    values[is_read] = column.reshape(-1, field.elements)[row[is_read]]
    if not len(gain):
        return convert(values, dtype)
    return convert(values, dtype, shift[: field.elements], gain[: field.elements])


def rounded_pad(value: float, dtype: torch.dtype) -> Tensor:
    """Round a padding to its dtype; -0.0 pads with 0.0, and an integer dtype must hold it exactly."""
    exact = torch.tensor(0.0 if value == 0 else value, dtype=torch.float64)
    if dtype.is_floating_point:
        return narrow(exact, dtype)
    low, end = (0, 2) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1)
    if not (low <= value < end and value == int(value)):
        raise ShapeError("pad value", f"must be a whole number that {dtype} can hold", value)
    return exact.to(dtype)
