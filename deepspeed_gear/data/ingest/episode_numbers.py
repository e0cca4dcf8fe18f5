"""Numbers of episodes over all sources of an ingest, such as LeRobot's `episode_index`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest.column_options import OutputColumns
from deepspeed_gear.data.ingest.group_scope import DistinctNumbers, check_free
from deepspeed_gear.schema import Column


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

    def has_any(self, output: OutputColumns) -> bool:
        """Return whether a source has such a column."""
        return bool(self._columns[id(output)])

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
        for key, column in self._columns[id(output)].items():
            if key not in arrays or arrays[key] is None:
                continue
            number = int(arrays[key])
            own = self._own[key]
            if number not in own:
                free = self._numbers[key].take(number)
                check_free(name, column, "episode", free, number)
                own[number] = free
                self._num_changed[key] += free != number
            arrays[key] = np.asarray(own[number])

    def notes(self) -> list[str]:
        """Return notes for the user on the numbers that were replaced."""
        return [
            f"{name}: {count} numbers that an earlier source has are replaced by free ones"
            for name, count in self._num_changed.items()
            if count
        ]


def _counted(output: OutputColumns) -> dict[str, Column]:
    """Return the columns of whole numbers, one per trajectory, that each source counts anew."""
    counted = {output.names.get(name, name) for name in output.reader.counted}
    return {
        column.name: column
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
