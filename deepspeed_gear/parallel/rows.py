"""Which rows of which trajectories a node must get, each once, and where they lie in messages. Pure.

A sender and a receiver compute the same plan from what the samples resolved to, so no message has to say what
is in it. Windows of samples that overlap, or whose item was drawn twice, are merged: a row travels once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

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
    known, trajectory = np.unique(samples.peer * wide + samples.slot, return_inverse=True)
    trajectory = trajectory.reshape(-1)
    apart = int(samples.num_steps.max(initial=0)) + 2  # of the rows of neighbouring trajectories
    windows = _windows_by_column(needs)
    found: dict[tuple[object, ...], Spans] = {}
    low, high = np.full(count, apart, np.int64), np.zeros(count, np.int64)  # of each sample's rows
    for reads in dict.fromkeys(windows.values()):
        parts = [_rows_read(samples, trajectory, which, read, low, high) for which, read in reads]
        owner, first, end = (np.concatenate(of) for of in zip(*parts, strict=True))
        found[reads] = _merge(owner, first, end, apart)
    nothing = low >= high
    low[nothing] = high[nothing] = 0
    block, first, end = _merge(trajectory[~nothing], low[~nothing], high[~nothing], apart)
    begin = np.cumsum(end - first) - (end - first)
    at = np.searchsorted(block * apart + first, trajectory * apart + low, side="right") - 1
    shift = np.where(nothing, 0, (begin - first)[at]) if len(block) else np.zeros(count, np.int64)
    rows = {column: found[reads] for column, reads in windows.items()}
    starts, place = block * apart + first, {}
    for column, (owner, row, _) in rows.items():
        inside = np.searchsorted(starts, owner * apart + row, side="right") - 1
        place[column] = begin[inside] + row - first[inside] if len(block) else row
    single = {
        column: np.unique(trajectory[np.isin(samples.needs, which)])
        for column, which in _per_trajectory(needs).items()
    }
    return RowPlan(
        known // wide, known % wide, rows, single, place, trajectory, shift, int((end - first).sum())
    )


Which = tuple[int, ...]
Goal = tuple[int]  # final_row of a column of achieved goals


def _windows_by_column(needs: Sequence[RowNeeds]) -> dict[str, tuple[tuple[Which, Read | Goal], ...]]:
    """Return the different windows of each column, each with the indices of the needs that have it."""
    found: dict[str, dict[Read | Goal, list[int]]] = {}
    for index, need in enumerate(needs):
        for read in need.reads:
            window = Read("", read.first, read.end, read.follows, read.edge, read.final_row)
            found.setdefault(read.column, {}).setdefault(window, []).append(index)
        for column, final_row in need.goals:
            found.setdefault(column, {}).setdefault((final_row,), []).append(index)
    return {
        column: tuple((tuple(dict.fromkeys(which)), window) for window, which in windows.items())
        for column, windows in found.items()
    }


def _per_trajectory(needs: Sequence[RowNeeds]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, need in enumerate(needs):
        for column in need.per_trajectory:
            found.setdefault(column, []).append(index)
    return found


def _rows_read(
    samples: Samples,
    trajectory: np.ndarray,
    which: Which,
    read: Read | Goal,
    low: np.ndarray,
    high: np.ndarray,
) -> Spans:
    """Return what one window of a column reads, and widen the samples' own spans by it."""
    here = np.isin(samples.needs, which)
    if isinstance(read, tuple):
        first = samples.goal
        end = first + (first >= 0)
    else:
        held = samples.num_steps + read.final_row
        at = samples.anchor + read.first + (samples.n_steps if read.follows else 0)
        first = np.clip(at, 0, held)
        end = np.maximum(first, np.clip(at + (read.end - read.first), 0, held))
        nearest = np.clip(at, 0, held - 1)  # has a place even if it does not travel: ops check that it has
        np.minimum(low, nearest, out=low, where=here)
        np.maximum(high, nearest + 1, out=high, where=here)
        if read.edge:
            first, end = np.where(end > first, (first, end), (nearest, nearest + 1))
    there = (end > first) & here
    np.minimum(low, first, out=low, where=there)
    np.maximum(high, end, out=high, where=there)
    return trajectory[there], first[there], end[there]


def _merge(owner: np.ndarray, first: np.ndarray, end: np.ndarray, apart: int) -> Spans:
    """Merge overlapping and touching spans of each trajectory. Ascending."""
    if not len(owner):
        return owner, first, end
    order = np.argsort(owner * apart + first, kind="stable")
    begins, ends = (owner * apart + first)[order], (owner * apart + end)[order]
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
    columns = [*plan.rows, *plan.per_trajectory]
    sizes = [(end - first) * row_bytes[column] for column, (_, first, end) in plan.rows.items()]
    sizes += [np.full(len(which), row_bytes[column]) for column, which in plan.per_trajectory.items()]
    owners = [owner for owner, _, _ in plan.rows.values()] + list(plan.per_trajectory.values())
    peers = [plan.peer[owner] for owner in owners]
    totals = np.array(
        [np.bincount(peer, size, num_peers) for peer, size in zip(peers, sizes, strict=True)], np.float64
    ).astype(np.int64)  # exact below 2^53
    totals = totals.reshape(len(columns), num_peers)
    before = np.cumsum(totals.T.reshape(-1)) - totals.T.reshape(-1)  # by peer, then column
    starts = before.reshape(num_peers, len(columns))
    found = {}
    for index, (column, peer, size) in enumerate(zip(columns, peers, sizes, strict=True)):
        within = np.cumsum(size) - size
        first_of_peer = np.cumsum(totals[index]) - totals[index]
        found[column] = Pieces(starts[peer, index] + within - first_of_peer[peer], size)
    return found, totals.sum(0)
