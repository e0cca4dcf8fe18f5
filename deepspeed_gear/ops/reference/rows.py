"""What the op that plans rows means: which rows of which trajectories travel, each once, and where they lie.

A sender and a receiver compute the same plan from what the samples resolved to, so no message has to say what
is in it. Windows of samples that overlap, or whose item was drawn twice, are merged: a row travels once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ..constants import C_GROUP, C_MEMBERS, C_ROW_BYTES, SLOT_FIRST_ROW, W_GROUP

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


def plan_rows_(
    pieces: Tensor,
    ends: Tensor,
    sizes: Tensor,
    lies: Tensor,
    room: Tensor,
    samples: Tensor,
    windows: Tensor,
    members: Tensor,
    columns: Tensor,
    heads: Tensor,
    slots: Tensor | None,
    first_row: int,
    first_slot: int,
) -> None:
    """Plan the rows of some samples, each row once.

    A message holds, behind its head, the rows of one peer: column by column, of each those of its
    trajectories by slot, in their order.

    Args:
        pieces: Gets to, from and number of bytes of what is copied: with slots from the columns into messages
            that lie one behind the other, each from a multiple of 8 bytes on; without, from each peer's
            message into the columns of arrivals. At least one of each sample, column and window. [k, 3].
        ends: Gets the pieces up to and with those of each column and peer. [C, S], int64.
        sizes: Gets the bytes of rows in each peer's message. [S], int64.
        lies: Without slots: gets what, added to a step's number, gives its place among the rows that arrive,
            and the trajectory among those that arrive. [n, 2], int64.
        room: Without slots: gets the rows and trajectories that arrive. [2], int64.
        samples: `constants.S_*`. [n, 7], int64.
        windows: `constants.W_*`: rows [anchor + first, anchor + end) that a trajectory has, by groups of
            columns that are read alike. [W, 7], int64.
        members: Which needs have each window, and behind them each set of columns of one row per trajectory.
            [W or more, needs], bool.
        columns: `constants.C_*`: group of windows, or -1 and the row of members. [C, 3], int64.
        heads: Bytes in front of the rows in each peer's message. [S], int64.
        slots: The slot table of the sender; None for the receiver. [N, 8], int64.
        first_row: Of the arrivals.
        first_slot: Likewise.
    """
    wanted = [_Sample(*words) for words in samples.tolist()]
    reads = [_Window(*words) for words in windows.tolist()]
    known = sorted({(sample.peer, sample.slot) for sample in wanted})
    number = {pair: index for index, pair in enumerate(known)}
    trajectory = [number[sample.peer, sample.slot] for sample in wanted]
    rows, spans = _rows_read(wanted, trajectory, reads, members)
    place = {at: index for index, at in enumerate(sorted(_blocks(trajectory, spans)))}
    filled, found = heads.tolist(), []
    for c, column in enumerate(columns.tolist()):
        if column[C_GROUP] >= 0:
            travels = rows[column[C_GROUP]]
        else:
            has = members[column[C_MEMBERS]].tolist()
            pairs = zip(trajectory, wanted, strict=True)
            travels = {(which, 0) for which, sample in pairs if has[sample.need]}
        for which, first, end in _runs(travels):
            peer, slot = known[which]
            if slots is not None:
                row = slot if column[C_GROUP] < 0 else int(slots[slot, SLOT_FIRST_ROW]) + first
            else:
                row = first_slot + which if column[C_GROUP] < 0 else first_row + place[which, first]
            size = (end - first) * column[C_ROW_BYTES]
            found.append((c, peer, row * column[C_ROW_BYTES], filled[peer], size))
            filled[peer] += size
    _write(found, filled, heads, slots is not None, pieces, ends, sizes)
    if slots is None:
        lows = zip(trajectory, spans, strict=True)
        shifts = [place[which, low] - low if low < high else 0 for which, (low, high) in lows]
        lies.copy_(torch.tensor([shifts, trajectory], dtype=torch.int64).T.reshape(lies.shape))
        room.copy_(torch.tensor([len(place), len(known)]))


def _rows_read(
    samples: list[_Sample], trajectory: list[int], windows: list[_Window], members: Tensor
) -> tuple[list[Rows], list[tuple[int, int]]]:
    """Return the rows that each group of windows reads, and the span of rows of each sample."""
    rows: list[Rows] = [set() for _ in {window[W_GROUP] for window in windows}]
    spans = []
    for sample, which in zip(samples, trajectory, strict=True):
        every: set[int] = set()
        for window, has in zip(windows, members.tolist(), strict=False):
            if has[sample.need]:
                read, nearest = _read(sample, window)
                rows[window.group].update((which, row) for row in read)
                every.update(read, nearest)  # ops check the row that is nearest, even if nobody reads it
        spans.append((min(every), max(every) + 1) if every else (0, 0))
    return rows, spans


def _read(sample: _Sample, window: _Window) -> tuple[range, range]:
    """Return the rows that a window reads of a sample, and the one that is nearest to it."""
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
    """Return the rows that have a place: of each sample all of its span."""
    return {(which, row) for which, span in zip(trajectory, spans, strict=True) for row in range(*span)}


def _runs(rows: Rows) -> Iterable[tuple[int, int, int]]:
    """Return trajectory, first row and end of rows that lie together. Ascending."""
    runs: list[tuple[int, int, int]] = []
    for which, row in sorted(rows):
        if runs and runs[-1][0] == which and runs[-1][2] == row:
            runs[-1] = which, runs[-1][1], row + 1
        else:
            runs.append((which, row, row + 1))
    return runs


def _write(
    found: list[tuple[int, int, int, int, int]],
    filled: list[int],
    heads: Tensor,
    sends: bool,
    pieces: Tensor,
    ends: Tensor,
    sizes: Tensor,
) -> None:
    """Write pieces, each with column, peer, byte in its column, byte in its message, and size."""
    words = torch.tensor(filled, dtype=torch.int64)
    begins = (-(-words // WORD_BYTES) * WORD_BYTES).cumsum(0).roll(1)
    begins[:1] = 0
    flat = torch.zeros(ends.numel(), dtype=torch.int64)
    for i, (column, peer, row, at, size) in enumerate(found):
        pieces[i] = torch.tensor([int(begins[peer]) + at, row, size] if sends else [row, at, size])
        flat[column * len(heads) + peer] += 1
    ends.copy_(flat.cumsum(0).reshape(ends.shape))
    sizes.copy_(words - heads)
