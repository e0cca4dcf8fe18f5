"""Renumbering: groups, episodes and tasks that each source of an ingest counts from 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.ingest.output_columns import OutputColumns
from deepspeed_gear.data.ingest.token_rows import GROUPS
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.schema import Column

_SCOPES = ("file", "all")
# Numbers below it are taken for counts. Larger ones, such as hashes, are not equal by accident.
_COUNTED = 1 << 32
TEXTS = "texts"  # in the source of a data set: the numbers of texts, by column


class Renumbering(ABC):
    """Columns of numbers whose meaning is a source's own, and the numbers of the data set for them.

    The result depends only on the numbers taken before, so appending to a data set gives the same
    numbers as one ingest of all sources.
    """

    @abstractmethod
    def has(self, output: OutputColumns) -> bool:
        """Return whether a source has such a column."""

    @abstractmethod
    def set_in(
        self, output: OutputColumns, name: str, file: Path | None, arrays: dict[str, Any]
    ) -> None:
        """Replace the numbers in a trajectory's columns by those of the data set.

        Args:
            output: Its source.
            name: Its name, for errors.
            file: The file that it comes from, for a source of several files.
            arrays: Its columns, of which those numbers are changed.
        Raises:
            DataError: A column's dtype cannot hold the free number in place of its own; or, of
                groups, a number is that of a group in an earlier file.
        """

    def notes(self) -> list[str]:
        """Return notes for the user, when all trajectories have their numbers."""
        return []


class DistinctNumbers:
    """Numbers that are taken once each: the wanted one, or the smallest free one.

    With {0, 1} taken, taking 1, 5, 1 gives 2, 5, 3.
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


class _PlaceNumbers(DistinctNumbers):
    """Numbers of a column that each place, such as a file, counts anew.

    Attributes:
        num_changed: Numbers that an earlier place has.
    """

    def __init__(self, column: str, known: Dataset | None) -> None:
        taken = known.columns[column] if known is not None and column in known.schema else ()
        super().__init__(np.unique(taken).tolist())
        self.num_changed = 0
        self._place: object = None
        self._of_place: dict[int, int] = {}

    def of_place(self, place: object) -> dict[int, int]:
        """Return the numbers in the data set by those of a place; places come one by one."""
        if place != self._place:
            self._place = place
            self._of_place = {}
        return self._of_place


class GroupNumbers(Renumbering):
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
        first = next(filter(None, self._columns.values()), None)
        if scope is not None and first is None:
            raise DataError(
                f"{outputs[0].reader.path}: --group-scope",
                f"must be for sources with a column of groups, such as {' or '.join(GROUPS)}",
                scope,
                "leave it out for this source",
            )
        self._numbers = _PlaceNumbers("" if first is None else first.name, known)

    def has(self, output: OutputColumns) -> bool:
        return self._columns[id(output)] is not None

    def set_in(
        self, output: OutputColumns, name: str, file: Path | None, arrays: dict[str, Any]
    ) -> None:
        column = self._columns[id(output)]
        value = None if column is None else arrays.get(column.name)
        scope = "file" if output.reader.numbers_groups else self._scope
        if column is None or value is None or np.ndim(value) or scope == "all":
            return
        own = self._numbers.of_place((id(output), file))
        number = int(value)
        if number not in own:
            is_shared = scope is None and number in self._numbers.taken
            if is_shared and number < _COUNTED:
                raise DataError(
                    f"{name}: {column.name}",
                    "must not be the number of a group in an earlier file",
                    number,
                    "--group-scope file: they are other groups, and get other numbers; "
                    "--group-scope all: they are the same groups (group_scope of ingest)",
                )
            self._numbers.num_changed += is_shared
            own[number] = number if is_shared else self._numbers.take(number)
            _check_free(name, column, "group", own[number], number)
        arrays[column.name] = np.asarray(own[number])

    def notes(self) -> list[str]:
        num_shared = self._numbers.num_changed
        shared = f"{num_shared} groups are in several files by their ids: taken as the same ones"
        return [f"{shared} (--group-scope file takes them as others)"] if num_shared else []


class EpisodeNumbers(Renumbering):
    """Columns of one number per trajectory that every source counts anew (`Reader.counted`).

    A number that an earlier source has is replaced by a free one, so that a number stands for the
    same episode in the whole data set. With sources [0, 1, 2] and [0, 1] the column is
    [0, 1, 2, 3, 4]; shards [0, 1] and [2, 3] of one data set keep their numbers.

    Memory: one number for each episode.
    """

    def __init__(self, outputs: Sequence[OutputColumns], known: Dataset | None) -> None:
        self._columns = {
            id(output): [
                column
                for column in output.columns
                if column.name in _counted(output) and _is_whole_number(column)
            ]
            for output in outputs
        }
        names = {column.name for columns in self._columns.values() for column in columns}
        self._numbers = {name: _PlaceNumbers(name, known) for name in sorted(names)}

    def has(self, output: OutputColumns) -> bool:
        return bool(self._columns[id(output)])

    def left_as_they_are(self, output: OutputColumns) -> list[str]:
        """Return the columns of a source that it counts anew and that keep its numbers."""
        renumbered = {column.name for column in self._columns[id(output)]}
        return [own for name, own in _counted(output).items() if name not in renumbered]

    def set_in(
        self, output: OutputColumns, name: str, file: Path | None, arrays: dict[str, Any]
    ) -> None:
        for column in self._columns[id(output)]:
            if (value := arrays.get(column.name)) is None:
                continue
            numbers = self._numbers[column.name]
            own = numbers.of_place(id(output))
            number = int(value)
            if number not in own:
                own[number] = numbers.take(number)
                _check_free(name, column, "episode", own[number], number)
                numbers.num_changed += own[number] != number
            arrays[column.name] = np.asarray(own[number])

    def notes(self) -> list[str]:
        return [
            f"{name}: {numbers.num_changed} numbers that an earlier source has are replaced by "
            "free ones"
            for name, numbers in self._numbers.items()
            if numbers.num_changed
        ]


class TextNumbers(Renumbering):
    """Columns of numbers that stand for texts, such as LeRobot's `task_index`, over all sources.

    Equal texts get equal numbers. The first source keeps its numbers. The numbers are recorded in
    the data set's `source` (`TEXTS`), because appending needs them.
    """

    def __init__(self, outputs: Sequence[OutputColumns], known: Dataset | None) -> None:
        #: Number of each text, by column of the data set.
        self.texts: dict[str, dict[str, int]] = {}
        # The new number of each one, by column of each output.
        self._changed: dict[int, list[tuple[Column, dict[int, int]]]] = {}
        recorded: Mapping[str, Any] = {} if known is None else known.source.get(TEXTS, {})
        numbers: dict[str, DistinctNumbers] = {}
        for output in outputs:
            columns = {column.name: column for column in output.columns}
            of_output = self._changed[id(output)] = []
            for key, texts in output.reader.texts.items():
                column = output.names.get(key, key)
                if known is not None and column in known.schema and column not in recorded:
                    raise DataError(
                        f"{known.path}: column {column}",
                        "must have recorded the texts of its numbers to be appended to",
                        None,
                        "ingest all sources again into one data set",
                    )
                of_column = self.texts.setdefault(column, dict(recorded.get(column, {})))
                taken = numbers.setdefault(column, DistinctNumbers(of_column.values()))
                changed = dict[int, int]()
                of_output.append((columns[column], changed))
                for number, text in sorted(texts.items()):
                    if text not in of_column:
                        of_column[text] = taken.take(number)
                    changed[number] = of_column[text]

    def has(self, output: OutputColumns) -> bool:
        return bool(self._changed[id(output)])

    def set_in(
        self, output: OutputColumns, name: str, file: Path | None, arrays: dict[str, Any]
    ) -> None:
        for column, changed in self._changed[id(output)]:
            if column.name in arrays:
                given, places = np.unique(arrays[column.name], return_inverse=True)
                for number in given.tolist():
                    _check_free(name, column, "text", changed[number], number)
                new = np.array([changed[number] for number in given.tolist()], dtype=np.int64)
                arrays[column.name] = new[places].reshape(np.shape(arrays[column.name]))


def _check_free(where: str, column: Column, what: str, free: int, own: int) -> None:
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


def _is_whole_number(column: Column) -> bool:
    """Return whether a column has one whole number for each trajectory."""
    is_number = not (column.is_opaque or column.is_floating or column.dtype == "bool")
    return is_number and column.rows == "1" and not column.shape


def _counted(output: OutputColumns) -> dict[str, str]:
    """Return the source's names of the columns that it counts anew, by those in the data set."""
    return {output.names.get(name, name): name for name in output.reader.counted}


def _group_column(output: OutputColumns) -> Column | None:
    """Return the column of group numbers, known by its name in the data set or in the source."""
    names = {new: old for old, new in output.names.items()}
    return next(
        (
            column
            for column in output.columns
            if _is_whole_number(column)
            and not {column.name, names.get(column.name)}.isdisjoint(GROUPS)
        ),
        None,
    )
