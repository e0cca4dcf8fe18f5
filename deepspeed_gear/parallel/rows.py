"""Which rows of which trajectories a node must get, each once, and where they lie in messages. Pure.

A sender and a receiver compute the same plan from what the samples resolved to, so no message has to say what
is in it. Windows of samples that overlap, or whose item was drawn twice, are merged: a row travels once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

WORD_BITS = 63  # of a word that is not negative
Spans = tuple[np.ndarray, np.ndarray, np.ndarray]  # trajectory, first row, end. [n] each, int64


@dataclass(frozen=True)
class Read:
    """Rows of a column that a sample's windows read.

    Args:
        column: Its name.
        first, end: From the anchor on: rows [anchor + first, anchor + end) that the trajectory has.
        follows: They lie behind the sample's n-step steps.
        edge: The nearest row is read where the trajectory has none of them.
        final_row: 1 if the column has T+1 rows.
    """

    column: str
    first: int
    end: int
    follows: bool = False
    edge: bool = False
    final_row: int = 0


@dataclass(frozen=True)
class RowNeeds:
    """What a replica's ranks on one node read of a sample.

    Args:
        reads: Rows of steps, at least one of each column that is read.
        per_trajectory: Columns of one row per trajectory.
        goals: Columns of achieved goals, of which relabelled samples read the row that was drawn, with their
            `final_row`.
    """

    reads: tuple[Read, ...]
    per_trajectory: tuple[str, ...] = ()
    goals: tuple[tuple[str, int], ...] = ()


class Samples(NamedTuple):
    """Samples whose rows travel, in any order. [n] each, int64.

    Args:
        peer: Node that they come from, or go to.
        needs: Index of what is read of them.
        slot: Of their trajectories, in the store that holds them.
        num_steps: Lengths of the trajectories.
        anchor: Of the samples.
        n_steps: Steps of their n-step returns.
        goal: Rows of achieved goals, -1 for none.
    """

    peer: np.ndarray
    needs: np.ndarray
    slot: np.ndarray
    num_steps: np.ndarray
    anchor: np.ndarray
    n_steps: np.ndarray
    goal: np.ndarray


class RowPlan(NamedTuple):
    """What travels.

    Args:
        peer, slot: Of each trajectory of which a row travels, ascending. [G] each.
        rows: By column of steps: trajectory, first row and end of the pieces, disjoint, ascending.
        per_trajectory: By column of one row per trajectory: the trajectories.
        place: By column of steps: where each piece lies among the receiver's rows. [n] each.
        trajectory: Of each sample. [samples].
        shift: What, added to a step's number, gives its place among the receiver's rows. [samples].
        num_rows: Rows that the receiver needs room for.
    """

    peer: np.ndarray
    slot: np.ndarray
    rows: dict[str, Spans]
    per_trajectory: dict[str, np.ndarray]
    place: dict[str, np.ndarray]
    trajectory: np.ndarray
    shift: np.ndarray
    num_rows: int


def plan_rows(samples: Samples, needs: Sequence[RowNeeds]) -> RowPlan:
    """Return which rows travel for some samples.

    Args:
        samples: Those of all peers.
        needs: What is read, by index.
    Cost: a sort of the windows for each different set of windows that columns have.
    """
    count = len(samples.slot)
    wide = int(samples.slot.max(initial=0)) + 1
    known, trajectory = _distinct(samples.peer * wide + samples.slot)
    apart = int(samples.num_steps.max(initial=0)) + 2  # of the rows of neighbouring trajectories
    windows, per_trajectory = _columns_of(tuple(needs))
    found: dict[Reads, Spans] = {}
    low, high = np.full(count, apart, np.int64), np.zeros(count, np.int64)  # of each sample's rows
    all_travel = True  # every window has a row, so what is to have a place is what travels
    for reads in dict.fromkeys(windows.values()):
        parts = [_rows_read(samples, trajectory, which, read, low, high) for which, read in reads]
        owner, first, end = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        all_travel = all_travel and len(owner) == count
        found[reads] = _merge(owner, first, end, apart)
    one_window = all_travel and len(found) == 1 and len(reads) == 1
    if one_window:
        block, first, end = found[reads]
    else:
        nothing = low >= high
        low[nothing] = high[nothing] = 0
        block, first, end = _merge(trajectory[~nothing], low[~nothing], high[~nothing], apart)
    begin, starts = np.cumsum(end - first) - (end - first), block * apart + first
    if len(block):
        at = np.searchsorted(starts, trajectory * apart + low, side="right") - 1
        shift = (begin - first)[at] if one_window else np.where(nothing, 0, (begin - first)[at])
    else:
        shift = np.zeros(count, np.int64)
    places: dict[Reads, np.ndarray] = {}
    for reads, (owner, row, _) in found.items():
        if one_window:
            places[reads] = begin
            continue
        inside = np.searchsorted(starts, owner * apart + row, side="right") - 1
        places[reads] = begin[inside] + row - first[inside] if len(block) else row
    rows = {column: found[reads] for column, reads in windows.items()}
    place = {column: places[reads] for column, reads in windows.items()}
    single = {column: np.unique(trajectory[_of(samples, which)]) for column, which in per_trajectory.items()}
    return RowPlan(
        known // wide, known % wide, rows, single, place, trajectory, shift, int((end - first).sum())
    )


Which = tuple[int, ...]
Goal = tuple[int]  # final_row of a column of achieved goals
Reads = tuple[tuple[Which, "Read | Goal"], ...]
ALL: Which = ()  # where all needs have a window


@lru_cache(maxsize=64)
def _columns_of(needs: tuple[RowNeeds, ...]) -> tuple[dict[str, Reads], dict[str, Which]]:
    """Return the windows of each column of steps, and which needs have each column of trajectories."""
    return _windows_by_column(needs), _per_trajectory(needs)


def _of(samples: Samples, which: Which) -> np.ndarray:
    """Return the samples that have one of some needs. [n], bool."""
    return np.ones(len(samples.needs), bool) if which == ALL else np.isin(samples.needs, which)


def _windows_by_column(needs: Sequence[RowNeeds]) -> dict[str, Reads]:
    """Return the different windows of each column, each with the indices of the needs that have it."""
    found: dict[str, dict[Read | Goal, list[int]]] = {}
    for index, need in enumerate(needs):
        for read in need.reads:
            window = Read("", read.first, read.end, read.follows, read.edge, read.final_row)
            found.setdefault(read.column, {}).setdefault(window, []).append(index)
        for column, final_row in need.goals:
            found.setdefault(column, {}).setdefault((final_row,), []).append(index)
    return {
        column: tuple((_which(which, len(needs)), window) for window, which in windows.items())
        for column, windows in found.items()
    }


def _which(indices: Sequence[int], num_needs: int) -> Which:
    known = tuple(dict.fromkeys(indices))
    return ALL if len(known) == num_needs else known


def _per_trajectory(needs: Sequence[RowNeeds]) -> dict[str, Which]:
    found: dict[str, list[int]] = {}
    for index, need in enumerate(needs):
        for column in need.per_trajectory:
            found.setdefault(column, []).append(index)
    return {column: _which(which, len(needs)) for column, which in found.items()}


def _rows_read(
    samples: Samples,
    trajectory: np.ndarray,
    which: Which,
    read: Read | Goal,
    low: np.ndarray,
    high: np.ndarray,
) -> Spans:
    """Return what one window of a column reads, and widen the samples' own spans by it."""
    here = _of(samples, which)
    if isinstance(read, tuple):
        first = samples.goal
        end = first + (first >= 0)
    else:
        # np.clip, and a ufunc with `where`, take several times as long as these.
        held = samples.num_steps + read.final_row
        at = samples.anchor + (read.first + samples.n_steps if read.follows else read.first)
        inside = np.maximum(at, 0)
        first = np.minimum(inside, held)
        end = np.maximum(first, np.minimum(np.maximum(at + (read.end - read.first), 0), held))
        nearest = np.minimum(
            inside, held - 1
        )  # has a place even if it does not travel: ops check that it has
        _widen(low, high, nearest, nearest + 1, None if which == ALL else here)
        if read.edge:
            first, end = np.where(end > first, (first, end), (nearest, nearest + 1))
    there = (end > first) & here
    if there.all():
        _widen(low, high, first, end, None)
        return trajectory, first, end
    _widen(low, high, first, end, there)
    return trajectory[there], first[there], end[there]


def _widen(
    low: np.ndarray, high: np.ndarray, first: np.ndarray, end: np.ndarray, where: np.ndarray | None
) -> None:
    """Widen spans so that they hold others."""
    if where is None:
        np.minimum(low, first, out=low)
        np.maximum(high, end, out=high)
    else:
        np.minimum(low, first, out=low, where=where)
        np.maximum(high, end, out=high, where=where)


def _distinct(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what `np.unique` returns with inverse. [n], int64, at least 0 -> [m] and [n], int64."""
    bits = len(values).bit_length()
    if not len(values) or int(values.max()).bit_length() + bits >= WORD_BITS:
        known, index = np.unique(values, return_inverse=True)
        return known, index.reshape(-1)
    words = np.sort(values << bits | np.arange(len(values)))
    ordered = words >> bits
    new = np.empty(len(values), bool)
    new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    index = np.empty(len(values), np.int64)
    index[words & ((1 << bits) - 1)] = np.cumsum(new) - 1
    return ordered[new], index


def _merge(owner: np.ndarray, first: np.ndarray, end: np.ndarray, apart: int) -> Spans:
    """Merge overlapping and touching spans of each trajectory. Ascending."""
    if not len(owner):
        return owner, first, end
    begins, size = owner * apart + first, end - first
    bits = int(size.max()).bit_length()
    if (
        int(begins.max()).bit_length() + bits < WORD_BITS
    ):  # sorting words is 10 times as fast as sorting indices
        words = np.sort(begins << bits | size)
        begins = words >> bits
        ends = begins + (words & ((1 << bits) - 1))
    else:
        order = np.argsort(begins, kind="stable")
        begins, ends = begins[order], (begins + size)[order]
    reach = np.maximum.accumulate(ends)
    new = np.concatenate([[True], begins[1:] > reach[:-1]])
    at = np.nonzero(new)[0]
    last = np.concatenate([at[1:], [len(begins)]]) - 1
    trajectory = begins[at] // apart
    return trajectory, begins[at] - trajectory * apart, reach[last] - trajectory * apart


class Pieces(NamedTuple):
    """Where pieces of a column lie in the messages of all peers, one behind the other. [n] each, in bytes.

    Args:
        at: Where each begins.
        size: Of each.
    """

    at: np.ndarray
    size: np.ndarray


def messages(
    plan: RowPlan, row_bytes: Mapping[str, int], num_peers: int
) -> tuple[dict[str, Pieces], np.ndarray]:
    """Return where the rows of a plan lie in messages: peer by peer, and of each column by column.

    Args:
        plan: What travels.
        row_bytes: Bytes of a row of each column.
        num_peers: S.
    Returns:
        By column, and the bytes of each peer's message [S].
    """
    spread: dict[int, Spread] = {}  # of columns that have the same rows
    columns: dict[str, Spread] = {}
    for column, spans in plan.rows.items():
        if id(spans) not in spread:
            spread[id(spans)] = _spread(plan.peer[spans[0]], spans[2] - spans[1], num_peers)
        columns[column] = spread[id(spans)]
    for column, which in plan.per_trajectory.items():
        columns[column] = _spread(plan.peer[which], np.ones(len(which), np.int64), num_peers)
    totals = np.array([columns[column][3] * row_bytes[column] for column in columns], np.int64)
    totals = totals.reshape(len(columns), num_peers)
    before = np.cumsum(totals.T.reshape(-1)) - totals.T.reshape(-1)  # by peer, then column
    starts = before.reshape(num_peers, len(columns))
    found = {}
    for index, (column, (peer, count, within, _)) in enumerate(columns.items()):
        size = row_bytes[column]
        found[column] = Pieces(starts[peer, index] + within * size, count * size)
    return found, totals.sum(0)


Spread = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _spread(peer: np.ndarray, count: np.ndarray, num_peers: int) -> Spread:
    """Return peer and rows of each piece, the rows of its peer before it, and the rows of each peer."""
    totals = np.bincount(peer, count, num_peers).astype(np.int64)  # exact below 2^53
    before = np.cumsum(totals) - totals
    return peer, count, np.cumsum(count) - count - before[peer], totals
