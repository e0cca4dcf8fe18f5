"""Numbers of episodes over all sources of an ingest, such as LeRobot's `episode_index`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest.column_options import OutputColumns
from deepspeed_gear.data.ingest.group_scope import DistinctNumbers
from deepspeed_gear.errors import DataError


class EpisodeNumbers:
    """Columns of one number per trajectory that every source counts anew (`Reader.counted`).

    A number that an earlier source has is replaced by a free one, so that a number stands for the
    same episode in the whole data set. With sources [0, 1, 2] and [0, 1] the column is
    [0, 1, 2, 3, 4]; shards [0, 1] and [2, 3] of one data set keep their numbers. The result depends
    only on the numbers taken before, so appending gives what one ingest of all sources gives.

    Memory: one number for each episode.
    """

    def __init__(self, outputs: Sequence[OutputColumns], known: Dataset | None) -> None:
        self._columns = {id(output): _counted(output) for output in outputs}
        names = {name for columns in self._columns.values() for name in columns}
        self._numbers = {name: DistinctNumbers(_taken(name, known)) for name in sorted(names)}
        self._output: object = None
        # Number in the data set by that in the current source, for each column.
        self._own: dict[str, dict[int, int]] = {}
        self._num_changed = dict.fromkeys(self._numbers, 0)

    def has(self, output: OutputColumns, name: str) -> bool:
        """Return whether a source's column, by the reader's name, gets the data set's numbers."""
        return output.names.get(name, name) in self._columns[id(output)]

    def set_in(self, output: OutputColumns, name: str, arrays: dict[str, Any]) -> None:
        """Replace the numbers in a trajectory's columns by those of the data set.

        Args:
            name: Name of the trajectory, for errors.
            arrays: Its columns, of which those numbers are changed.
        Raises:
            DataError: The column's dtype cannot hold the free number.
        """
        if output is not self._output:
            self._output = output
            self._own = {name: {} for name in self._numbers}
        for column, dtype in self._columns[id(output)].items():
            if column not in arrays or arrays[column] is None:
                continue
            number = int(arrays[column])
            own = self._own[column]
            if number not in own:
                free = self._numbers[column].take(number)
                if free != number and free > np.iinfo(dtype).max:
                    raise DataError(
                        f"{name}: {column}",
                        f"must have a free number for each episode of all sources in {dtype}",
                        f"{free} in place of {number}, which an earlier source has",
                        f'leave the column out (--columns "!{column}"), or store it as int64',
                    )
                own[number] = free
                self._num_changed[column] += free != number
            arrays[column] = np.asarray(own[number])

    def notes(self) -> list[str]:
        """Return notes for the user on the numbers that were replaced."""
        return [
            f"{name}: {count} numbers that an earlier source has are replaced by free ones"
            for name, count in self._num_changed.items()
            if count
        ]


def _counted(output: OutputColumns) -> dict[str, np.dtype[Any]]:
    """Return the dtypes of the columns of whole numbers that each source counts anew.

    They have one number per trajectory.
    """
    counted = {output.names.get(name, name) for name in output.reader.counted}
    return {
        column.name: column.numpy_dtype
        for column in output.columns
        if column.name in counted
        and column.rows == "1"
        and not (column.shape or column.is_opaque or column.is_floating)
        and column.dtype != "bool"
    }


def _taken(name: str, known: Dataset | None) -> list[int]:
    if known is None or name not in known.schema:
        return []
    numbers: list[int] = np.unique(known.columns[name]).tolist()
    return numbers
