"""Consecutive trajectories whose rows lie one after the other, as in the files of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.schema import Column, Rows

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TrajectoryBlock:
    """One trajectory, or several whose rows lie one after the other.

    The arrays of a single trajectory (`of_one`) are those that `DatasetWriter.add` takes. Those of
    any other block are the rows of the data set's files. With `has_final_row`, trajectories of 2
    and 3 steps have the rows

        T+1   a0 a1 a2 b0 b1 b2 b3
        T     a0 a1 0  b0 b1 b2 0
        1     a b

    Attributes:
        name_of: Returns the name of a trajectory, by its place in the block, for errors.
        lengths: Steps of each trajectory. [n], int64.
        arrays: Values by column.
        rows: What the rows of each column are; empty for a single trajectory.
        has_final_row: Every extent has one more row than steps.
    """

    name_of: Callable[[int], str]
    lengths: Int64
    arrays: dict[str, Any]
    rows: Mapping[str, Rows]
    has_final_row: bool = False

    @classmethod
    def of_one(cls, name: str, arrays: dict[str, Any], length: int) -> TrajectoryBlock:
        """Make a block of a single trajectory."""
        return cls(partial(_same, name), np.array([length], np.int64), arrays, {})

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def is_single(self) -> bool:
        """Whether it is a single trajectory, whose arrays are its own."""
        return not self.rows

    @cached_property
    def num_rows(self) -> int:
        """Rows of a column of steps."""
        return int(self.lengths.sum()) + int(self.has_final_row) * len(self)

    @cached_property
    def first_rows(self) -> Int64:
        """First row of each trajectory. [n]."""
        extents = self.lengths + int(self.has_final_row)
        return np.cumsum(extents) - extents

    @cached_property
    def last_steps(self) -> Int64:
        """Row of the last step of each trajectory. [n]."""
        return self.first_rows + self.lengths - 1

    @cached_property
    def final_rows(self) -> Int64:
        """Row after the last step of each trajectory, which is unused in columns of T rows.

        [n], or [0] if extents have no such row.
        """
        return self.last_steps + 1 if self.has_final_row else self.last_steps[:0]

    def sums(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sum of each trajectory's steps, with the bits of `np.sum` over them.

        Args:
            rows: A column of T rows, [rows].
        """
        # `np.sum` adds the sum of all values to 0, `reduceat` that of the others to the first one.
        # So each trajectory gets a 0 in front: steps 1 2 and 3 become 0 1 2 0 3. With unused rows,
        # 1 2 0 3 0 becomes the same.
        if self.has_final_row:
            starts = self.first_rows
            padded = np.append(0.0, rows[:-1])
        else:
            starts = self.first_rows + np.arange(len(self))
            padded = np.insert(rows, self.first_rows, 0.0)
        return np.add.reduceat(padded, starts)

    def mask(self, column: Column, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which rows of a column hold values of the kept trajectories.

        Args:
            keep: Which trajectories are kept, [n].
        """
        if column.rows == "1":
            return keep
        mask = np.repeat(keep, self.lengths + int(self.has_final_row))
        if column.rows == "T":
            mask[self.final_rows] = False
        return mask

    def with_number(self, column: Column, number: int) -> TrajectoryBlock:
        """Return a block with one more column of one value per trajectory, the same in all."""
        values = np.full(len(self), number, column.numpy_dtype)
        if self.is_single:
            return replace(self, arrays={**self.arrays, column.name: values[0]})
        arrays = {**self.arrays, column.name: values}
        return replace(self, arrays=arrays, rows={**self.rows, column.name: column.rows})

    def divided(self) -> Iterator[TrajectoryBlock]:
        """Yield a block for each trajectory."""
        if self.is_single:
            yield self
            return
        firsts = self.first_rows.tolist()
        for place, (first, length) in enumerate(zip(firsts, self.lengths.tolist(), strict=True)):
            arrays = {
                name: array[place]
                if self.rows[name] == "1"
                else array[first : first + length + int(self.rows[name] == "T+1")]
                for name, array in self.arrays.items()
            }
            yield TrajectoryBlock.of_one(self.name_of(place), arrays, length)


def _same(name: str, place: int) -> str:
    return name
