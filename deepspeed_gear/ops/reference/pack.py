"""Reference op `pack_`: rows of whole trajectories, one after the other, in one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.constants import MOST_STEPS
from deepspeed_gear.ops.gather_spec import GatherSpec, raised
from deepspeed_gear.ops.records import Pad, Resolution, Source
from deepspeed_gear.ops.reference.convert import convert
from deepspeed_gear.ops.reference.gather import rounded_pad


def pack_(
    outs: Sequence[Tensor],
    columns: Sequence[Tensor],
    shifts: Sequence[Tensor],
    gains: Sequence[Tensor],
    resolutions: Tensor,
    places: Tensor,
    spec: Sequence[int],
    pad_values: Sequence[float],
    first: int,
    rows: int,
) -> None:
    """Write a part of a pack: the rows of whole trajectories, each at its place.

    A trajectory of T steps takes T places. A place holds the field's row of the step that is `offset` later
    in the same trajectory, or padding where there is none. Places of no trajectory are not written.

    Args:
        outs: Every field's tensor: places [first, first + rows) of the pack. [rows, elements] in any shape.
        columns: Every field's column; ignored for a timestep. [rows, elements] in any shape.
        shifts: As `gather_`, like the others below.
        gains: [k * elements] or [1], or empty.
        resolutions: Of the trajectories; read are slot, first row and number of steps. [S, 8], int64.
        places: Where each begins in the pack. [S], int64.
        spec: Every field's GatherSpec, lowered: single steps, padded by a value.
        pad_values: Every field's padding, in units of its output.
        first: The first place that is written.
        rows: Places that are written.
    Raises:
        ShapeError: A row that is read lies outside its column, or there is no conversion between two dtypes.
    """
    fields = raised(spec)
    for field, column in zip(fields, columns, strict=True):
        _check(field, column, resolutions, places)
    for field, out, column, shift, gain, pad in zip(
        fields, outs, columns, shifts, gains, pad_values, strict=True
    ):
        target = out.view(rows, field.elements)
        for record, place in zip(resolutions, places.tolist(), strict=True):
            begin, end = max(place, first), min(place + int(record[Resolution.NUM_STEPS]), first + rows)
            if begin >= end:
                continue
            steps = torch.arange(begin, end) - place + field.offset
            held = record[Resolution.NUM_STEPS] + (field.source == Source.STEPS_PLUS_ONE)
            real = (steps >= 0) & (steps < held)
            part = target[begin - first : end - first]
            if field.source == Source.TRAJECTORY:
                row = column.reshape(-1, field.elements)[record[Resolution.SLOT]]
                part.copy_(_converted(row.expand(end - begin, -1), out.dtype, shift, gain))
                continue
            part.copy_(rounded_pad(pad, out.dtype).expand_as(part))
            if field.source == Source.TIMESTEP:
                part[real] = steps[real, None]
            else:
                found = column.reshape(-1, field.elements)[steps[real] + record[Resolution.FIRST_ROW]]
                part[real] = _converted(found, out.dtype, shift, gain)


def _converted(values: Tensor, dtype: torch.dtype, shift: Tensor, gain: Tensor) -> Tensor:
    if not len(gain):
        return convert(values, dtype)
    elements = values.size(1)
    return convert(values, dtype, shift[:elements], gain[:elements])


def _check(field: GatherSpec, column: Tensor, resolutions: Tensor, places: Tensor) -> None:
    single = field.length == 1 and field.pad == Pad.VALUE and not field.after_n_step
    if not single or field.source == Source.POSITION:
        raise ShapeError("a packed field", "must be of single steps, padded by a value", field)
    first, steps = resolutions[:, Resolution.FIRST_ROW], resolutions[:, Resolution.NUM_STEPS]
    good = (steps >= 1) & (steps <= MOST_STEPS) & (places >= 0) & (places <= MOST_STEPS)
    held = 0 if field.source == Source.TIMESTEP else column.numel() // field.elements
    if field.source == Source.TRAJECTORY:
        slot = resolutions[:, Resolution.SLOT]
        good &= (slot >= 0) & (slot < held)
    elif field.source != Source.TIMESTEP:
        end = steps + (field.source == Source.STEPS_PLUS_ONE)
        low = torch.minimum(torch.full_like(end, field.offset).clamp(min=0), end)
        high = torch.minimum((steps + field.offset).clamp(min=0), end)
        good &= (low >= high) | ((first + low >= 0) & (first + high <= held))
    if not good.all():
        i = int(torch.nonzero(~good)[0])
        rule = f"must lie in the columns' {held} rows"
        raise ShapeError(f"resolution {i}", rule, resolutions[i].tolist(), "resolve against the same table")
