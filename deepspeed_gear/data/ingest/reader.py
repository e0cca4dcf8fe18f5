"""Base of all ingest readers: the interface of a format, and the selection of columns to keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from deepspeed_gear.data.ingest.source_checks import Expansion
from deepspeed_gear.data.ingest.source_names import SourceNames
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema

_WHOLE_GROUPS = ("observation", "next_observation", "action")


class Reader(ABC):
    """Base of readers: one source in one format.

    A format of the package is a subclass in this folder and an entry in `READERS`; one from outside
    is named by "module:Class" (docs/how-to/add-an-ingest-format.md).

    Attributes:
        format: Name of the format, for `--format`.
        takes: Names of the options that only this format has, keywords of `open_source`.
        early_roles: Roles whose option `role` counts before the reader judges names.
        names: The names that the options `rename` and `role` give to keys of the source.
        options: The given options by name.
        path: The source.
        select: Decides whether an optional column is kept, by its name.
        expansion: Bound of the memory that the files may decompress to.
        files: Exit stack of open files, closed with the reader.
        columns: Columns of every episode, in the order of the schema.
        num_steps: Steps of all episodes, for progress; 0 where they are not known.
        file: For a source of several files, the file of the trajectory that `episodes` yielded
            last.
        has_schema: Whether the source states its columns, so that it needs no rule of rewards.
        whole: For an export, the columns of its data set in their order, including derived ones;
            None where it does not state them.
        texts: The text of each number, by column of numbers that stand for texts.
        numbers_groups: Whether the reader numbers the groups itself, from 0.
        reads_ahead: Whether a thread may read the episodes while others are written: reading
            releases the interpreter's lock, runs no function of a user and starts no threads.
        counted: Columns of a number per trajectory that every source counts anew, such as
            `episode_index`.
        notes: Notes for the user on how the source was read.
        description: Record of the source in the data set; JSON-able, without paths.
    """

    format: ClassVar[str]
    takes: ClassVar[tuple[str, ...]] = ()
    early_roles: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        path: Path,
        select: ColumnSelection,
        expansion: Expansion,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.select = select
        self.expansion = expansion
        self.options = dict(options or {})
        self.names = SourceNames(self.options, self.early_roles)
        self.files = ExitStack()
        self.columns: tuple[Column, ...] = ()
        self.num_steps = 0
        self.file: Path | None = None
        self.has_schema = False
        self.whole: Schema | None = None
        self.texts: dict[str, dict[int, str]] = {}
        self.numbers_groups = False
        self.reads_ahead = False
        self.counted: tuple[str, ...] = ()
        self.notes: list[str] = []
        self.description: dict[str, Any] = {"format": self.format, "name": path.resolve().name}

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Return whether the content of an existing file or folder is in this format."""

    @abstractmethod
    def open(self) -> None:
        """Open the source, check its layout, and set the attributes from `columns` on.

        Raises:
            DataError: The layout is wrong; names file and key.
        """

    @abstractmethod
    def episodes(self) -> Iterator[tuple[str, dict[str, NDArray[Any]]]]:
        """Yield the episodes in order: a name for errors ("episode 3") and the arrays.

        Arrays are by column name, with the dtype and shape of the reader's columns. Called once.

        Raises:
            DataError: An episode is malformed; names file, episode and key.
        """

    def blocks(self) -> Iterator[TrajectoryBlock]:
        """Yield the episodes in order, in blocks; here in blocks of one.

        A reader whose arrays hold the rows of many episodes one after the other overrides it, since
        the work for each episode takes longer than that for the rows of a short one. Called once,
        in place of `episodes`.
        """
        first = next(column for column in self.columns if column.rows != "1")
        for name, arrays in self.episodes():
            if first.name not in arrays:
                raise DataError(
                    f"{self.path}: {name}: column {first.name}",
                    "must be in every trajectory",
                    remedy="remove the trajectories without it from the source",
                )
            length = len(arrays[first.name]) - int(first.rows == "T+1")
            yield TrajectoryBlock.of_one(name, arrays, length)

    def note(self, text: str, about: int | str | Iterable[str]) -> None:
        """Add a note for the user about something, if there is any of it.

        Args:
            about: A number or names, which take the place of `{}` in the text.
        """
        if about:
            shown = about if isinstance(about, (int, str)) else ", ".join(about)
            self.notes.append(text.format(shown))

    @property
    def held_bytes(self) -> int:
        """Bytes of rows in memory after `open`."""
        return 0

    def release(self) -> None:  # noqa: B027 - most readers hold no rows
        """Release the rows in memory: `episodes` reads them again."""

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.files.close()


class ColumnSelection:
    """Selection of the optional columns to keep (`--columns`).

    A group is the part before the first dot of a column's name (`infos`, `observation`), unless
    `assign_groups` gives another. Without patterns all columns are kept. With patterns, a group is
    reduced to the columns that match one; observations and actions are kept whole where no pattern
    names them, and every other optional column is left out. A pattern after "!" leaves out what it
    matches; if all patterns have "!", the rest is kept.

        `infos.*,!infos.qpos`   keeps observations, actions and infos but for qpos
        `!infos.*`              keeps everything but infos

    Attributes:
        left_out: Columns that are left out because no pattern names them.
        excluded: Groups that a pattern after "!" leaves a column out of.
    """

    def __init__(self, patterns: Sequence[str] | None = None) -> None:
        self._patterns = () if patterns is None else tuple(patterns)
        self._without = tuple(one[1:] for one in self._patterns if one.startswith("!"))
        kept = tuple(one for one in self._patterns if not one.startswith("!"))
        self._kept = None if patterns is None or (self._without and not kept) else kept
        self._asked: list[str] = []
        self._groups: Mapping[str, str] = {}
        self.left_out: list[str] = []
        self.excluded: set[str] = set()

    def assign_groups(self, groups: Mapping[str, str]) -> None:
        """Set the groups of columns that their names do not begin with, before any selection."""
        self._groups = groups

    def __call__(self, name: str) -> bool:
        """Return whether an optional column is kept, and record that the source has it."""
        self._asked.append(name)
        is_kept = self.keeps(name)
        if _matches(name, self._without):
            self.excluded.add(self._group(name))
        elif not is_kept and name not in self.left_out:
            self.left_out.append(name)
        return is_kept

    def keeps(self, name: str) -> bool:
        """Return whether an optional column would be kept if the source had it."""
        if _matches(name, self._without):
            return False
        kept = self._kept
        return kept is None or _matches(name, kept) or self._is_kept_whole(self._group(name), kept)

    def excludes(self, name: str) -> bool:
        """Return whether a pattern after "!" matches a name."""
        return _matches(name, self._without)

    def _group(self, name: str) -> str:
        return self._groups.get(name, name.split(".")[0])

    def _is_kept_whole(self, group: str, kept: Sequence[str]) -> bool:
        members = (name for name, of in self._groups.items() if of == group)
        is_named = any(pattern.split(".")[0] == group for pattern in kept)
        is_named |= any(_matches(name, kept) for name in members)
        return group in _WHOLE_GROUPS and not is_named

    def check_used(self, path: Path) -> None:
        """Raise DataError for a pattern that matches none of the optional columns."""
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern.removeprefix("!")) for name in self._asked):
                known = f"optional columns are {', '.join(self._asked)}"
                remedy = known if self._asked else "there are no optional columns"
                raise DataError(
                    f"{path}: --columns", "must match an optional column", pattern, remedy
                )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
