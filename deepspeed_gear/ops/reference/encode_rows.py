"""Reference ops on messages of rows: the rows of trajectories to send, each once where windows or draws
overlap. Sender and receiver compute the same plan from the samples' resolutions: nothing else is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.records import Resolution, RowColumn, RowSample, RowWindow, Slot

WORD_BYTES = 8
Row = tuple[int, int]  # a trajectory of the plan, and one of its rows


class _Plan(NamedTuple):
    """Rows that are sent between nodes for a selection."""

    known: list[tuple[int, int]]  # peer and slot of each trajectory, ascending
    trajectory: list[int]  # of each sample
    spans: list[tuple[int, int]]  # first row and end of what each sample reads
    rows: list[list[Row]]  # of each column, ascending
    sizes: list[int]  # bytes of rows in each peer's message


def encode_rows_(
    message: Tensor,
    sizes: Tensor,
    stored: Sequence[Tensor],
    samples: Tensor,
    windows: Tensor,
    members: Tensor,
    columns: Tensor,
    heads: Tensor,
    slots: Tensor,
) -> None:
    """Encode the rows of some samples into messages, each row once. A message holds, after its head, the rows
    of one peer: column by column, of each those of its trajectories by slot, in their order.

    Args:
        message: Gets the rows of all messages, which lie one after the other, each from a word on; nothing
            where it is too short. Heads stay as they are. [words], int64.
        sizes: Gets the bytes of rows in each peer's message. [S], int64.
        stored: The bytes of each column. [n] each, uint8.
        samples: `RowSample`. [n, 7], int64.
        windows: `RowWindow`: rows [anchor + first, anchor + end) that a trajectory has, by groups of
            columns that are read alike. [W, 7], int64.
        members: Which needs have each window, and after them each set of columns of one row per trajectory.
            [W or more, needs], bool.
        columns: `RowColumn`: group of windows, or -1 and the row of members. [C, 3], int64.
        heads: Bytes in front of the rows in each peer's message. [S], int64.
    Raises:
        ShapeError: A row lies outside its column; nothing is copied.
    """
    plan = _plan(samples, windows, members, columns, len(heads))
    sizes.copy_(torch.tensor(plan.sizes, dtype=torch.int64))
    spans = [-(-size // WORD_BYTES) * WORD_BYTES for size in (heads + sizes).tolist()]
    begins, data = [0, *accumulate(spans)], message.view(torch.uint8)
    if begins[-1] > len(data):
        return
    own_slots = [slot for _, slot in plan.known]
    first_rows = slots[own_slots, Slot.FIRST_ROW].tolist()
    own_rows = {(which, row): first_rows[which] + row for rows in plan.rows for which, row in rows}
    for column, at, peer, begin, size in _places(plan, columns, heads, stored, own_rows, own_slots):
        begin += begins[peer]
        data[begin : begin + size] = stored[column][at : at + size]


def decode_rows_(
    arrivals: Sequence[Tensor],
    ring: Tensor,
    sizes: Tensor,
    needed: Tensor,
    messages: Sequence[Tensor],
    which: Tensor,
    samples: Tensor,
    windows: Tensor,
    members: Tensor,
    columns: Tensor,
    heads: Tensor,
    room: Sequence[int],
) -> None:
    """Copy rows from messages of `encode_rows_` into the arrivals, which batches are gathered from. A block
    of arrivals spans a sample's steps from the first to the last that any column reads, so one first row
    serves all columns.

    Args:
        arrivals: Get the rows, unless not all fit. Bytes of each column. [n] each, uint8.
        ring: Gets the slot and first row of each sample, at `which`: first row + number of a step is its row.
            [r, 8], int64.
        needed: Gets the rows and slots that arrive. [2], int64.
        messages: Of each peer; of any length where it sends no rows. [words] each, int64.
        which: Places of samples in the ring. [n], int64.
        sizes, samples, windows, members, columns, heads: As of `encode_rows_`.
        room: First free row of the arrivals and how many are free, slots likewise; row and slot that the
            first of all arrivals has for the ring.
    Raises:
        ShapeError: A message is too short, or `room` lies outside the arrivals; nothing is copied.
    """
    first_row, num_rows, first_slot, num_slots, base_row, base_slot = room
    plan = _plan(samples, windows, members, columns, len(heads))
    spans = zip(plan.trajectory, plan.spans, strict=True)
    blocks = sorted({(which, row) for which, span in spans for row in range(*span)})
    place = {row: first_row + index for index, row in enumerate(blocks)}
    sizes.copy_(torch.tensor(plan.sizes, dtype=torch.int64))
    needed.copy_(torch.tensor([len(place), len(plan.known)]))
    for at, number, (low, high) in zip(which.tolist(), plan.trajectory, plan.spans, strict=True):
        ring[at, Resolution.FIRST_ROW] = base_row + (place[number, low] - low if low < high else first_row)
        ring[at, Resolution.SLOT] = base_slot + first_slot + number
    if len(place) > num_rows or len(plan.known) > num_slots:
        return
    as_bytes = [message.view(torch.uint8) for message in messages]
    for message, head, size in zip(as_bytes, heads.tolist(), plan.sizes, strict=True):
        if size and len(message) < head + size:
            raise ShapeError("messages", "must hold the rows of samples", len(message))
    own_slots = [first_slot + number for number in range(len(plan.known))]
    for column, at, peer, begin, size in _places(plan, columns, heads, arrivals, place, own_slots):
        arrivals[column][at : at + size] = as_bytes[peer][begin : begin + size]


def _plan(samples: Tensor, windows: Tensor, members: Tensor, columns: Tensor, num_peers: int) -> _Plan:
    drawn = samples.tolist()
    known = sorted({(sample[RowSample.PEER], sample[RowSample.SLOT]) for sample in drawn})
    trajectory = [known.index((sample[RowSample.PEER], sample[RowSample.SLOT])) for sample in drawn]
    groups: dict[int, set[Row]] = {}
    spans = []
    for sample, which in zip(drawn, trajectory, strict=True):
        every: set[int] = set()
        for window, has in zip(windows.tolist(), members.tolist(), strict=False):
            if has[sample[RowSample.NEED]]:
                read, nearest = _read(sample, window)
                groups.setdefault(window[RowWindow.GROUP], set()).update((which, row) for row in read)
                every.update(read, nearest)  # ops check the row that is nearest, even if it is not read
        spans.append((min(every), max(every) + 1) if every else (0, 0))
    rows, sizes = [], [0] * num_peers
    for column in columns.tolist():
        if column[RowColumn.GROUP] >= 0:
            travels = groups.get(column[RowColumn.GROUP], set())
        else:
            has = members[column[RowColumn.MEMBERS]].tolist()
            pairs = zip(trajectory, drawn, strict=True)
            travels = {(which, 0) for which, sample in pairs if has[sample[RowSample.NEED]]}
        rows.append(sorted(travels))
        for which, _ in travels:
            sizes[known[which][0]] += column[RowColumn.ROW_BYTES]
    return _Plan(known, trajectory, spans, rows, sizes)


def _read(sample: list[int], window: list[int]) -> tuple[range, range]:
    """Return the rows that a window reads of a sample, and the row that is nearest to the window."""
    _, _, _, num_steps, anchor, n_steps, goal = sample
    _, is_goal, first, end, after_n_step, edge, final_row = window
    if is_goal:
        row = range(goal, goal + 1) if goal >= 0 else range(0)
        return row, row
    held = num_steps + final_row
    at = anchor + first + (n_steps if after_n_step else 0)
    read = range(max(at, 0), max(min(at + end - first, held), 0))
    inside = min(max(at, 0), held - 1)
    nearest = range(inside, inside + 1)
    return (nearest if edge and not read else read), nearest


def _places(
    plan: _Plan,
    columns: Tensor,
    heads: Tensor,
    data: Sequence[Tensor],
    rows: Mapping[Row, int],
    slots: Sequence[int],
) -> list[tuple[int, int, int, int, int]]:
    """Return each row's column, its first byte there, its peer, its first byte in the message, its size.

    `rows` and `slots` have the places of rows, and of trajectories, in their columns; all must lie in `data`.
    """
    filled, places = heads.tolist(), []
    for c, (column, travelling) in enumerate(zip(columns.tolist(), plan.rows, strict=True)):
        size = column[RowColumn.ROW_BYTES]
        for which, row in travelling:
            at = (slots[which] if column[RowColumn.GROUP] < 0 else rows[which, row]) * size
            peer = plan.known[which][0]
            if not 0 <= at <= len(data[c]) - size:
                raise ShapeError("rows of samples", "must lie in the columns", at)
            places.append((c, at, peer, filled[peer], size))
            filled[peer] += size
    return places
