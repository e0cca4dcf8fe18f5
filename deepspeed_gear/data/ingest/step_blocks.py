"""Blocks of episodes from arrays of steps: their rows as they are in the files of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.row_buffers import RowBuffers
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.errors import DataError

Int64 = NDArray[np.int64]
RowsByName = dict[str, NDArray[Any]]
BLOCK_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, eq=False)
class EpisodeBounds:
    """Rows of consecutive episodes in the arrays of a source. [n] each, int64.

    Attributes:
        low: First row of each episode.
        end: Row after its last kept step.
        high: Row after the last of its rows.
    """

    low: Int64
    end: Int64
    high: Int64

    def __len__(self) -> int:
        return len(self.low)

    def __getitem__(self, part: slice | NDArray[np.bool_]) -> EpisodeBounds:
        return EpisodeBounds(self.low[part], self.end[part], self.high[part])

    @property
    def lengths(self) -> Int64:
        """Steps that are kept."""
        return self.end - self.low

    def blocks(self, row_bytes: int) -> Iterator[EpisodeBounds]:
        """Yield consecutive episodes with at most 2 MiB of rows together, but at least one."""
        most_rows = max(1, BLOCK_BYTES // row_bytes)
        first = 0
        while first < len(self):
            until = int(self.low[first]) + most_rows
            end = max(first + 1, int(np.searchsorted(self.high, until, side="right")))
            yield self[first:end]
            first = end


class BlockRows:
    """Places of the rows of some episodes, among those from the first to the last of them.

    Where every row has its place already, as in D4RL's files without terminations, the rows of the
    source are taken as they are.

    Attributes:
        bounds: The episodes.
        first, end: The rows of the source from the first episode to the last one.
        final_rows: Row after the last step of each episode, in the data set; none without final
            rows.
    """

    def __init__(self, bounds: EpisodeBounds, has_final_row: bool) -> None:
        """Compute the places.

        Args:
            bounds: At least one episode, each with a step at least.
            has_final_row: The data set has one row more than steps for each episode.
        """
        self.first = int(bounds.low[0])
        self.end = int(bounds.high[-1])
        self.bounds = bounds
        extents = bounds.lengths + int(has_final_row)
        ends = np.cumsum(extents)
        self._num_rows = int(ends[-1])
        self._starts = ends - extents
        self._has_final_row = has_final_row
        self.final_rows = ends - 1 if has_final_row else ends[:0]
        self._is_same = bool(
            (self._starts == bounds.low - self.first).all()
            and (extents == bounds.high - bounds.low).all()
        )

    @cached_property
    def _index(self) -> Int64:
        """Place of each row in the source."""
        bounds = self.bounds
        extents = bounds.lengths + int(self._has_final_row)
        # Episodes [0, 2) and [2, 5) with final rows are rows 0 1 1 2 3 4 4: an episode without a
        # row after its last step repeats the one of that step.
        index = np.arange(self._num_rows)
        index += np.repeat(bounds.low - self.first - self._starts, extents)
        if self._has_final_row:
            index[self.final_rows] = np.minimum(bounds.end, bounds.high - 1) - self.first
        return index

    def step_rows(self, array: Any) -> NDArray[Any]:
        """Return the rows of the steps of an array, with a row of zeros after each episode.

        A single episode needs no such row, as no other follows it.
        """
        if len(self.bounds) == 1:
            return np.asarray(array[self.first : int(self.bounds.end[0])])
        rows = np.asarray(array[self.first : self.end])
        if not self._is_same:
            rows = self._taken(rows)
        elif self._has_final_row:
            rows = rows.copy()
        if self._has_final_row:
            rows[self.final_rows] = 0
        return rows

    def state_rows(self, array: Any) -> NDArray[Any]:
        """Return the rows of the steps of an array, and of each episode the row after them.

        Where there is no such row in the episode, it is that of the last step.
        """
        rows = np.asarray(array[self.first : self.end])
        return rows if self._is_same else self._taken(rows)

    def _taken(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the rows at the places of `_index`."""
        taken = RowBuffers.shared().empty((self._num_rows, *rows.shape[1:]), rows.dtype)
        # With "raise", NumPy would write into an array of its own first. No index is out of bounds.
        return rows.take(self._index, axis=0, out=taken, mode="clip")


def episode_blocks(
    bounds: EpisodeBounds,
    row_bytes: int,
    number: int,
    read: Callable[[EpisodeBounds], RowsByName],
    converted: Callable[[EpisodeBounds, int, RowsByName], TrajectoryBlock],
) -> Iterator[TrajectoryBlock]:
    """Yield episodes in order, in blocks of about 2 MiB.

    Where a value of a block is wrong, its episodes are converted one by one, so that the error
    names the episode.

    Args:
        bounds: The episodes.
        row_bytes: Bytes of a step in all columns.
        number: Number of the first episode.
        read: Returns the rows of consecutive episodes.
        converted: Returns these as a block in the dtypes of the columns, from the number of the
            first episode; DataError for a wrong value.
    """
    for part in bounds.blocks(row_bytes):
        rows = read(part)
        blocks: Iterable[TrajectoryBlock]
        try:
            blocks = [converted(part, number, rows)]
        except DataError:
            if len(part) == 1:
                raise
            singles = [part[at : at + 1] for at in range(len(part))]
            blocks = (converted(one, number + at, read(one)) for at, one in enumerate(singles))
        for block in blocks:
            yield from block.divided() if len(block) == 1 else (block,)
        number += len(part)


def episode_name(first: int, place: int = 0) -> str:
    """Return the name of an episode for errors.

    Args:
        first: Number of the first episode of its block.
        place: Its place in the block.
    """
    return f"episode {first + place}"
