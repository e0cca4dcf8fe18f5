"""Reference ops on messages of rows: the rows of trajectories to send, each once, and their places.

Sender and receiver compute the same plan from the samples' resolutions, so a message needs no description of
its contents. Windows of samples that overlap, or whose item was drawn twice, are merged: a row is sent once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.records import Resolution, RowColumn, RowWindow, Slot

WORD_BYTES = 8
Rows = set[tuple[int, int]]  # trajectory and row


class _Sample(NamedTuple):
    peer: int
    need: int
    slot: int
    num_steps: int
    anchor: int
    n_steps: int
    goal: int


class _Window(NamedTuple):
    group: int
    is_goal: int
    first: int
    end: int
    follows: int
    edge: int
    final_row: int


class _Plan(NamedTuple):
    """Rows that are sent between nodes for a selection.

    Args:
        known: Peer and slot of each trajectory, ascending.
        trajectory: Of each sample.
        spans: First row and end of what each sample reads.
        rows: Of each column, ascending.
        sizes: Bytes of rows in each peer's message.
    """

    known: list[tuple[int, int]]
    trajectory: list[int]
    spans: list[tuple[int, int]]
    rows: list[list[tuple[int, int]]]
    sizes: list[int]


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
    """Encode the rows of some samples into messages, each row once.

    A message holds, after its head, the rows of one peer: column by column, of each those of its
    trajectories by slot, in their order.

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
        slots: The slot table. [N, 8], int64.
    Raises:
        ShapeError: A row lies outside its column; nothing is copied.
    """
    plan = _plan(samples, windows, members, columns, len(heads))
    sizes.copy_(torch.tensor(plan.sizes, dtype=torch.int64))
    spans = [-(-size // WORD_BYTES) * WORD_BYTES for size in (heads + sizes).tolist()]
    begins, data = [0, *accumulate(spans)], message.view(torch.uint8)
    if begins[-1] > len(data):
        return

    def row_of(which: int, row: int, single: bool) -> int:
        slot = plan.known[which][1]
        return slot if single else int(slots[slot, Slot.FIRST_ROW]) + row

    for column, at, peer, begin, size in list(_places(plan, columns, heads, stored, row_of)):
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
    """Copy rows from messages of `encode_rows_` into the arrivals, which batches are gathered from.

    A block of arrivals spans a sample's steps from the first to the last that any column reads, so that one
    first row serves all columns.

    Args:
        arrivals: Get the rows, unless not all fit. Bytes of each column. [n] each, uint8.
        ring: Gets the slot and first row of each sample, at `which`: first row + number of a step is its row.
            [r, 8], int64.
        sizes: Gets the bytes of rows in each peer's message. [S], int64.
        needed: Gets the rows and slots that arrive. [2], int64.
        messages: Of each peer; of any length where it sends no rows. [words] each, int64.
        which: Places of samples in the ring. [n], int64.
        samples, windows, members, columns, heads: As of `encode_rows_`.
        room: First free row of the arrivals and how many are free, slots likewise; row and slot that the
            first of all arrivals has for the ring.
    Raises:
        ShapeError: A message is too short, or `room` lies outside the arrivals; nothing is copied.
    """
    first_row, num_rows, first_slot, num_slots, base_row, base_slot = room
    plan = _plan(samples, windows, members, columns, len(heads))
    place = {at: index for index, at in enumerate(sorted(_blocks(plan.trajectory, plan.spans)))}
    sizes.copy_(torch.tensor(plan.sizes, dtype=torch.int64))
    needed.copy_(torch.tensor([len(place), len(plan.known)]))
    for at, number, (low, high) in zip(which.tolist(), plan.trajectory, plan.spans, strict=True):
        shift = place[number, low] - low if low < high else 0
        ring[at, Resolution.FIRST_ROW] = base_row + first_row + shift
        ring[at, Resolution.SLOT] = base_slot + first_slot + number
    if len(place) > num_rows or len(plan.known) > num_slots:
        return
    as_bytes = [message.view(torch.uint8) for message in messages]
    for message, head, size in zip(as_bytes, heads.tolist(), plan.sizes, strict=True):
        if size and len(message) < head + size:
            raise ShapeError("messages", "must hold the rows of samples", len(message))

    def row_of(number: int, row: int, single: bool) -> int:
        return first_slot + number if single else first_row + place[number, row]

    for column, at, peer, begin, size in list(_places(plan, columns, heads, arrivals, row_of)):
        arrivals[column][at : at + size] = as_bytes[peer][begin : begin + size]


def _plan(samples: Tensor, windows: Tensor, members: Tensor, columns: Tensor, num_peers: int) -> _Plan:
    requested = [_Sample(*words) for words in samples.tolist()]
    reads = [_Window(*words) for words in windows.tolist()]
    known = sorted({(sample.peer, sample.slot) for sample in requested})
    number = {pair: index for index, pair in enumerate(known)}
    trajectory = [number[sample.peer, sample.slot] for sample in requested]
    of_groups, spans = _rows_read(requested, trajectory, reads, members)
    rows, sizes = [], [0] * num_peers
    for column in columns.tolist():
        if column[RowColumn.GROUP] >= 0:
            travels = of_groups[column[RowColumn.GROUP]]
        else:
            has = members[column[RowColumn.MEMBERS]].tolist()
            pairs = zip(trajectory, requested, strict=True)
            travels = {(which, 0) for which, sample in pairs if has[sample.need]}
        rows.append(sorted(travels))
        for which, _ in travels:
            sizes[known[which][0]] += column[RowColumn.ROW_BYTES]
    return _Plan(known, trajectory, spans, rows, sizes)


def _places(
    plan: _Plan,
    columns: Tensor,
    heads: Tensor,
    data: Sequence[Tensor],
    row_of: Callable[[int, int, bool], int],
) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield each row's column, its first byte there, its peer, its first byte in the message, its size.

    Raises:
        ShapeError: It lies outside its column.
    """
    filled = heads.tolist()
    for c, (column, rows) in enumerate(zip(columns.tolist(), plan.rows, strict=True)):
        size = column[RowColumn.ROW_BYTES]
        for which, row in rows:
            at, peer = row_of(which, row, column[RowColumn.GROUP] < 0) * size, plan.known[which][0]
            if not 0 <= at <= len(data[c]) - size:
                raise ShapeError("rows of samples", "must lie in the columns", at)
            yield c, at, peer, filled[peer], size
            filled[peer] += size


def _rows_read(
    samples: list[_Sample], trajectory: list[int], windows: list[_Window], members: Tensor
) -> tuple[list[Rows], list[tuple[int, int]]]:
    """Return the rows that each group of windows reads, and the span of rows of each sample."""
    rows: list[Rows] = [set() for _ in {window[RowWindow.GROUP] for window in windows}]
    spans = []
    for sample, which in zip(samples, trajectory, strict=True):
        every: set[int] = set()
        for window, has in zip(windows, members.tolist(), strict=False):
            if has[sample.need]:
                read, nearest = _read(sample, window)
                rows[window.group].update((which, row) for row in read)
                every.update(read, nearest)  # ops check the row that is nearest, even if it is not read
        spans.append((min(every), max(every) + 1) if every else (0, 0))
    return rows, spans


def _read(sample: _Sample, window: _Window) -> tuple[range, range]:
    """Return the rows that a window reads of a sample, and the row that is nearest to the window."""
    if window.is_goal:
        goal = range(sample.goal, sample.goal + 1) if sample.goal >= 0 else range(0)
        return goal, goal
    held = sample.num_steps + window.final_row
    at = sample.anchor + window.first + (sample.n_steps if window.follows else 0)
    read = range(max(at, 0), max(min(at + window.end - window.first, held), 0))
    first = min(max(at, 0), held - 1)
    nearest = range(first, first + 1)
    return (nearest if window.edge and not read else read), nearest


def _blocks(trajectory: list[int], spans: list[tuple[int, int]]) -> Rows:
    """Return the rows that have a place in the arrivals: the whole span of each sample."""
    return {(which, row) for which, span in zip(trajectory, spans, strict=True) for row in range(*span)}
