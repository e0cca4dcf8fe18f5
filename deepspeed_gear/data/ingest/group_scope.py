"""Group numbers over all files of an ingest: one group in several files, or one group each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest.column_options import OutputColumns
from deepspeed_gear.data.ingest.token_rows import GROUPS
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.schema import Column

_SCOPES = ("file", "all")
# Numbers below it are taken for counts. Larger ones, such as hashes, are not equal by accident.
_COUNTED = 1 << 32


class DistinctNumbers:
    """Numbers that are taken once each: the wanted one, or the smallest free one.

    The result depends only on the numbers taken before, so appending to a data set gives the same
    numbers as one ingest of all sources. With {0, 1} taken, taking 1, 5, 1 gives 2, 5, 3.
    """

    def __init__(self, taken: Iterable[int] = ()) -> None:
        self.taken = set(taken)
        self._smallest = 0

    def take(self, own: int) -> int:
        number = own
        if own in self.taken:
            while self._smallest in self.taken:
                self._smallest += 1
            number = self._smallest
        self.taken.add(number)
        return number


def check_free(where: str, column: Column, what: str, free: int, own: int) -> None:
    """Raise DataError if a column cannot hold the free number that replaces its own one.

    Args:
        where: Name of the trajectory.
        what: What the numbers stand for, such as "group".
    """
    is_whole = column.numpy_dtype.kind in "iu"
    if is_whole and free != own and free > np.iinfo(column.numpy_dtype).max:
        raise DataError(
            f"{where}: {column.name}",
            f"must have a free number for each {what} of all sources in {column.dtype}",
            f"{free} in place of {own}, which an earlier file or source has",
            f'--dtype {column.name}=int64, or leave the column out (--columns "!{column.name}")',
        )


class GroupNumbers:
    """Group numbers over all files of an ingest, by its option `group_scope`.

    Dumps of rollouts often begin with group 0 in each file. If both were taken for one group, the
    trajectories of two prompts would be compared with each other, and those beyond the group's size
    would never be trained.

    - "file": a group belongs to one file. A number that an earlier file has is replaced.
    - "all": equal numbers are one group, in all files.
    - None: a number that two files have is refused, unless it is too large for a count, such as a
      hash.

    Memory: one number for each group.
    """

    def __init__(
        self, scope: str | None, outputs: Sequence[OutputColumns], known: Dataset | None
    ) -> None:
        if scope is not None and scope not in _SCOPES:
            raise ConfigError(
                "group_scope",
                f"must be one of {', '.join(_SCOPES)}",
                scope,
                'see "gear ingest --help" for their meaning',
            )
        self._scope = scope
        self._columns = {id(output): _group_column(output) for output in outputs}
        if scope is not None and not any(self._columns.values()):
            raise DataError(
                f"{outputs[0].reader.path}: --group-scope",
                f"must be for sources with a column of groups, such as {' or '.join(GROUPS)}",
                scope,
                "leave it out for this source",
            )
        first = next(filter(None, self._columns.values()), None)
        before: list[int] = []
        if known is not None and first is not None and first.name in known.schema:
            before = np.unique(known.columns[first.name]).tolist()
        self._numbers = DistinctNumbers(before)
        self._file: object = None
        # Number in the data set by that in the current file.
        self._own: dict[int, int] = {}
        self._num_shared = 0

    def has(self, output: OutputColumns) -> bool:
        """Return whether a source has a column of group numbers."""
        return self._columns[id(output)] is not None

    def set_in(
        self, output: OutputColumns, name: str, file: Path | None, arrays: dict[str, Any]
    ) -> None:
        """Set the group number of a trajectory.

        Args:
            output: Its source.
            name: Its name, for errors.
            file: The file that it comes from, for a source of several files.
            arrays: Its columns, of which one is changed.
        Raises:
            DataError: A number is that of a group in an earlier file, or the column cannot hold a
                free one.
        """
        column = self._columns[id(output)]
        value = None if column is None else arrays.get(column.name)
        scope = "file" if output.reader.numbers_groups else self._scope
        if column is None or value is None or np.ndim(value) or scope == "all":
            return
        place = (id(output), file)
        if place != self._file:
            self._file = place
            self._own = {}
        number = int(value)
        if number not in self._own:
            is_shared = number in self._numbers.taken
            if is_shared and scope is None and number < _COUNTED:
                raise DataError(
                    f"{name}: {column.name}",
                    "must not be the number of a group in an earlier file",
                    number,
                    "--group-scope file: they are other groups, and get other numbers; "
                    "--group-scope all: they are the same groups (group_scope of ingest)",
                )
            self._num_shared += is_shared and scope is None
            is_own = scope == "file" or not is_shared
            free = self._numbers.take(number) if is_own else number
            check_free(name, column, "group", free, number)
            self._own[number] = free
        arrays[column.name] = np.asarray(self._own[number])

    def notes(self) -> list[str]:
        """Return notes for the user on the groups of all files."""
        shared = (
            f"{self._num_shared} groups are in several files by their ids: taken as the same ones"
        )
        return [f"{shared} (--group-scope file takes them as others)"] if self._num_shared else []


def _group_column(output: OutputColumns) -> Column | None:
    """Return the column of group numbers, known by its name in the data set or in the source."""
    names = {new: old for old, new in output.names.items()}

    def is_group(column: Column) -> bool:
        is_number = not column.is_opaque and not column.is_floating and column.dtype != "bool"
        is_single = column.rows == "1" and not column.shape
        return (
            is_number
            and is_single
            and {column.name, names.get(column.name)}.intersection(GROUPS) != set()
        )

    return next((column for column in output.columns if is_group(column)), None)
