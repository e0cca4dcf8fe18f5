"""The rows that a node's samples read, in the layout of the ops that encode and decode rows.

Sender and receiver compute the same layout from the samples' resolutions, so messages need not describe it.
Windows of samples that overlap, or whose item was drawn twice, are merged: a row is sent once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deepspeed_gear.ops.records import RowColumn, RowWindow


@dataclass(frozen=True)
class WindowRead:
    """The rows of a column that one window of a sample reads.

    Args:
        first, end: From the anchor on: rows [anchor + first, anchor + end) that the trajectory has.
        follows: They lie after the sample's n-step steps.
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
class RowReads:
    """All rows that a replica's ranks on one node read of a sample.

    Args:
        reads: Rows of steps, at least one of each column that is read.
        per_trajectory: Columns of one row per trajectory.
        goals: Columns of achieved goals, of which relabelled samples read the row that was drawn, with their
            `final_row`.
    """

    reads: tuple[WindowRead, ...]
    per_trajectory: tuple[str, ...] = ()
    goals: tuple[tuple[str, int], ...] = ()


class RowLayout(NamedTuple):
    """The row reads as arguments of the ops.

    Args:
        names: Columns, those of steps first. [C].
        windows, members, columns: Defined in `ops/reference/encode_rows.py`.
    """

    names: tuple[str, ...]
    windows: torch.Tensor
    members: torch.Tensor
    columns: torch.Tensor


Window = tuple[int, int, int, int, int, int]  # is_goal, first, end, follows, edge, final_row
Reads = dict[Window, list[int]]  # each with the needs that have it


def layout_of(needs: Sequence[RowReads], row_bytes: Mapping[str, int]) -> RowLayout:
    """Return the layout of row reads for the ops.

    Args:
        needs: The rows that are read of a sample, by index.
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
        torch.tensor(windows, dtype=torch.int64).reshape(-1, RowWindow.NUM_WORDS),
        members,
        torch.tensor(columns, dtype=torch.int64).reshape(-1, RowColumn.NUM_WORDS),
    )


def _windows_by_column(needs: Sequence[RowReads]) -> dict[str, Reads]:
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


def _per_trajectory(needs: Sequence[RowReads]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, need in enumerate(needs):
        for column in need.per_trajectory:
            found.setdefault(column, []).append(index)
    return found
