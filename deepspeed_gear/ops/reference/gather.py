"""Reference ops that read columns: windows into the tensors of a batch, and packs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.constants import MOST_STEPS
from deepspeed_gear.ops.conversion import convert, narrow
from deepspeed_gear.ops.records import Follows, GatherSpec, Pad, Resolution, Source, lower, raised
from deepspeed_gear.ops.windows import is_no_sample, rows_of


class Reads(NamedTuple):
    """Steps that an op reads of each trajectory, and the length of the column that holds them."""

    step: Tensor  # [B, n], int64
    is_read: Tensor  # [B, n], bool
    num_rows: int


def check_rows(resolutions: Tensor, reads: Iterable[Reads], num_slots: int | None = None) -> None:
    """Check that resolutions have anchors, and that rows of `reads` lie in their columns.

    A record that is no sample reads nothing. Step t of a trajectory is row first_row + t. A
    trajectory of which only some steps are present may begin before its column, at a negative row,
    and end after it.
    """
    words = Resolution.FIRST_ROW, Resolution.NUM_STEPS, Resolution.ANCHOR, Resolution.SLOT
    first, steps, anchor, slot = (resolutions[:, word] for word in words)
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
        raise ShapeError(
            f"resolution {i}", rule, resolutions[i].tolist(), "resolve against the same table"
        )


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

    Every row of a record that is no sample (`is_no_sample`) is padding: 0 where the edge pads. Only
    positions keep their values.

    Args:
        outs: Every field's tensor, written whole: the rows [first, first + count) of its window.
            [B, count, elements] in any shape.
        masks: True where a row is real; fields with equal parts of equal windows may share one,
            which the first of them writes. [B, count], bool.
        counters: Adds real rows, all rows and bytes written. [3], int64.
        columns: Every field's column; ignored for a timestep and a position. [rows, elements] in
            any shape.
        shifts, gains: Every field's, repeated any number of times; both empty without. [k *
            elements] or [1].
        n_steps: Steps that fields which follow n-step returns add to their offset. If the fields
            follow goals (all of them), the step of each sample's goal, below 0 for none. [B],
            int64.
        pad_values: Every field's padding, in units of its output.
        threads: Not used here. Threads of the host; on a GPU, above 1: the most blocks of a (short)
            launch.
        order: The order in which samples are gathered, each index once; affects only speed. [B],
            int64.
    Raises:
        ShapeError: A row that is read lies outside its column, a part outside its window, there is
            no conversion between two dtypes, or an index is missing in the order.
    """
    fields = raised(spec)
    reads = []
    slots = []
    if any(field.follows == Follows.GOAL for field in fields):
        if n_steps is None:
            raise ShapeError("n_steps", "must be the steps of goals for fields that follow them")
        if any(field.follows != Follows.GOAL for field in fields):
            raise ShapeError("goals", "must be gathered in a call of their own")
        # The rows of goals are gathered and written for the samples that have one.
        chosen = (n_steps >= 0).nonzero().view(-1)
        some = resolutions[chosen]
        parts = [tensor[chosen] for tensor in (*outs, *masks)]
        lowered = lower(replace(field, follows=Follows.N_STEP) for field in fields)
        steps = n_steps[chosen] - some[:, Resolution.ANCHOR]
        given = (columns, shifts, gains, some)
        gather_(
            parts[: len(outs)], parts[len(outs) :], counters, *given, steps, lowered, pad_values, 1
        )
        for target, values in zip([*outs, *masks], parts, strict=True):
            target[chosen] = values
        return
    for field, column in zip(fields, columns, strict=True):
        _check_field(field, n_steps)
        held = column.numel() // field.elements
        if field.source == Source.TRAJECTORY:
            slots.append(held)
        elif field.source in (Source.STEPS, Source.STEPS_PLUS_ONE):
            step, real = rows_of(field, resolutions, n_steps)
            reads.append(Reads(step, real | (field.pad == Pad.EDGE), held))
    check_rows(resolutions, reads, min(slots, default=None))
    if order is not None and not torch.equal(order.sort().values, torch.arange(len(resolutions))):
        rule = f"must have every index of [0, {len(resolutions)}) once"
        raise ShapeError("order", rule, order.tolist())
    written = {-1}
    none = is_no_sample(resolutions)
    for each in zip(fields, outs, columns, shifts, gains, pad_values, strict=True):
        field, out, column, shift, gain, pad = each
        row, real = rows_of(field, resolutions, n_steps)
        has_edge = field.pad == Pad.EDGE
        if field.source == Source.POSITION:
            places = torch.arange(field.part_first, field.part_first + field.part_count)
            values = places.repeat(len(row), 1)[:, :, None]
        else:
            if field.source == Source.TIMESTEP:
                values = row[:, :, None].clone()
            else:
                is_read = real | (has_edge & ~none[:, None])
                if field.source != Source.TRAJECTORY:
                    row = row + resolutions[:, Resolution.FIRST_ROW, None]
                stored = column.new_zeros(*row.shape, field.elements)
                stored[is_read] = column.reshape(-1, field.elements)[row[is_read]]
                scale = (shift[: field.elements], gain[: field.elements]) if len(gain) else ()
                values = convert(stored, out.dtype, *scale)
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
    if field.follows and n_steps is None:
        raise ShapeError("n_steps", "must be given for a field that follows it")


def rounded_pad(value: float, dtype: torch.dtype) -> Tensor:
    """Round a padding to its dtype; an integer dtype must hold it exactly. -0.0 becomes 0.0."""
    exact = torch.tensor(0.0 if value == 0 else value, dtype=torch.float64)
    if dtype.is_floating_point:
        return narrow(exact, dtype)
    low = 0 if dtype == torch.bool else torch.iinfo(dtype).min
    high = 1 if dtype == torch.bool else torch.iinfo(dtype).max
    if not (low <= value <= high and value == int(value)):
        raise ShapeError("pad value", f"must be a whole number that {dtype} can hold", value)
    return exact.to(dtype)


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
    """Write a part of a pack: the rows of whole trajectories, one place per step.

    A place holds the field's row of the step that is `offset` later in the same trajectory, or
    padding where there is none. Places of no trajectory are not written.

    Args:
        outs: The pack's places [first, first + rows) of every per-step field. [rows, elements] in
            any shape.
        resolutions: Records of the trajectories, of which slot, first row and number of steps are
            read. [S, 8], int64.
        places: First place of each trajectory in the pack. [S], int64.
        spec: Single steps, padded by a value; it and the other arguments are those of `gather_`.
    Raises:
        ShapeError: A row that is read lies outside its column, or there is no conversion between
            two dtypes.
    """
    fields = raised(spec)
    steps = resolutions[:, Resolution.NUM_STEPS]
    slots = []
    reads = []
    good = (steps >= 1) & (steps <= MOST_STEPS) & (places >= 0) & (places <= MOST_STEPS)
    if not good.all():
        i = int(torch.nonzero(~good)[0])
        rule = f"must have a place and steps in [1, {MOST_STEPS}]"
        raise ShapeError(f"resolution {i}", rule, int(steps[i]))
    for field, column in zip(fields, columns, strict=True):
        single = field.length == 1 and field.pad == Pad.VALUE and not field.follows
        if not single or field.source == Source.POSITION:
            raise ShapeError("a packed field", "must be of single steps, padded by a value", field)
        held = column.numel() // field.elements
        if field.source == Source.TRAJECTORY:
            slots.append(held)
        elif field.source != Source.TIMESTEP:
            end = steps + (field.source == Source.STEPS_PLUS_ONE)
            low = torch.minimum(torch.full_like(end, field.offset).clamp(min=0), end)
            high = torch.minimum((steps + field.offset).clamp(min=0), end)
            is_read = (low < high)[:, None].expand(-1, 2)
            reads.append(Reads(torch.stack((low, high - 1), dim=1), is_read, held))
    whole = resolutions.clone()
    whole[:, Resolution.ANCHOR] = 0
    check_rows(whole, reads, min(slots, default=None))
    # A pack is a gather of windows of one step, of each step of the trajectories.
    every = resolutions.repeat_interleave(steps, dim=0)
    every[:, Resolution.ANCHOR] = torch.cat([steps[:0], *map(torch.arange, steps.tolist())])
    place = places.repeat_interleave(steps) + every[:, Resolution.ANCHOR] - first
    is_inside = (place >= 0) & (place < rows)
    gathered = [
        out.new_empty(len(every), field.elements) for out, field in zip(outs, fields, strict=True)
    ]
    unmasked = lower(replace(field, mask=-1) for field in fields)
    counters = torch.zeros(3, dtype=torch.int64)
    gather_(gathered, [], counters, columns, shifts, gains, every, None, unmasked, pad_values, 1)
    for out, values in zip(outs, gathered, strict=True):
        out.view(rows, values.size(1))[place[is_inside]] = values[is_inside]
