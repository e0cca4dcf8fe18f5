"""Which rows of which trajectories a node must get: what its samples read, as the op `plan_rows_` takes it.

A sender and a receiver compute the same plan from what the samples resolved to, so no message has to say what
is in it. Windows of samples that overlap, or whose item was drawn twice, are merged: a row travels once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import COLUMN_WORDS, WINDOW_WORDS


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


class RowLayout(NamedTuple):
    """What is read, as the op takes it.

    Args:
        names: Columns, those of steps first. [C].
        windows, members, columns: As `ops/reference/rows.py` says.
        num_pieces: Most pieces of a sample.
    """

    names: tuple[str, ...]
    windows: torch.Tensor
    members: torch.Tensor
    columns: torch.Tensor
    num_pieces: int


Window = tuple[int, int, int, int, int, int]  # is_goal, first, end, follows, edge, final_row
Reads = dict[Window, list[int]]  # each with the needs that have it


def layout_of(needs: Sequence[RowNeeds], row_bytes: Mapping[str, int]) -> RowLayout:
    """Lay out what is read.

    Args:
        needs: What is read of a sample, by index.
        row_bytes: Bytes of a row of each column.
    """
    of_steps, single = _windows_by_column(needs), _per_trajectory(needs)
    alike: dict[tuple[tuple[Window, tuple[int, ...]], ...], int] = {}  # columns that are read alike: a group
    columns = []
    for name, reads in of_steps.items():
        key = tuple((window, tuple(which)) for window, which in reads.items())
        columns.append((alike.setdefault(key, len(alike)), 0, row_bytes[name]))
    windows = [(group, *window) for key, group in alike.items() for window, _ in key]
    which: list[tuple[int, ...]] = [indices for key in alike for _, indices in key]
    for name, indices in single.items():
        columns.append((-1, len(which), row_bytes[name]))
        which.append(tuple(indices))
    members = torch.zeros(len(which), len(needs), dtype=torch.bool)
    for row, having in enumerate(which):
        members[row, list(having)] = True
    return RowLayout(
        (*of_steps, *single),
        torch.tensor(windows, dtype=torch.int64).reshape(-1, WINDOW_WORDS),
        members,
        torch.tensor(columns, dtype=torch.int64).reshape(-1, COLUMN_WORDS),
        sum(len(reads) for reads in of_steps.values()) + len(single),
    )


def _windows_by_column(needs: Sequence[RowNeeds]) -> dict[str, Reads]:
    """Return the different windows of each column."""
    found: dict[str, Reads] = {}
    for index, need in enumerate(needs):
        windows = [
            (read.column, (0, read.first, read.end, int(read.follows), int(read.edge), read.final_row))
            for read in need.reads
        ]
        windows += [(column, (1, 0, 1, 0, 0, final_row)) for column, final_row in need.goals]
        for column, window in windows:
            indices = found.setdefault(column, {}).setdefault(window, [])
            if index not in indices:
                indices.append(index)
    return found


def _per_trajectory(needs: Sequence[RowNeeds]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, need in enumerate(needs):
        for column in need.per_trajectory:
            found.setdefault(column, []).append(index)
    return found


class RowPlan(NamedTuple):
    """What travels. Valid until the next plan of the same planner.

    Args:
        pieces, ends: What `copy_rows_` copies. [k, 3] and [C, S], int64.
        sizes: Bytes of rows in each peer's message. [S], int64.
        lies: Of a receiver: what, added to a step's number, gives its place among the rows that arrive, and
            the trajectory among those that arrive. [n, 2], int64.
        num_rows, num_trajectories: Of a receiver: what it needs room for.
    """

    pieces: torch.Tensor
    ends: torch.Tensor
    sizes: np.ndarray
    lies: np.ndarray
    num_rows: int
    num_trajectories: int


class RowPlanner:
    """Plans rows. One thread at a time.

    Args:
        ops: Of the store.
        layout: What is read.
        num_peers: S.
    """

    def __init__(self, ops: Ops, layout: RowLayout, num_peers: int) -> None:
        self._ops, self._layout = ops, layout
        self._pieces = torch.empty(0, 3, dtype=torch.int64)  # kept: fresh memory costs a fault a page
        self._ends = torch.empty(len(layout.names), num_peers, dtype=torch.int64)

    def plan(
        self,
        samples: torch.Tensor,
        heads: np.ndarray,
        slots: torch.Tensor | None,
        at: tuple[int, int] = (0, 0),
    ) -> RowPlan:
        """Plan the rows of some samples.

        Args:
            samples: `constants.S_*`, by sender or receiver. [n, 7], int64.
            heads: Bytes in front of the rows in each peer's message. [S], int64.
            slots: The slot table of the sender; None for the receiver. [N, 8], int64.
            at: First row and slot of the arrivals.
        """
        count, layout = len(samples), self._layout
        if len(self._pieces) < count * layout.num_pieces:
            self._pieces = torch.empty(count * layout.num_pieces, 3, dtype=torch.int64)
        sizes, lies, room = (
            np.empty_like(heads),
            np.empty((count, 2), np.int64),
            torch.zeros(2, dtype=torch.int64),
        )
        self._ops.plan_rows_(
            self._pieces,
            self._ends,
            torch.from_numpy(sizes),
            torch.from_numpy(lies),
            room,
            samples,
            layout.windows,
            layout.members,
            layout.columns,
            torch.from_numpy(heads),
            slots,
            *at,
        )
        return RowPlan(self._pieces, self._ends, sizes, lies, *room.tolist())
