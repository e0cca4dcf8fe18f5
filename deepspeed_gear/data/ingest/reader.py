"""Base of all ingest readers: the interface, names, dtypes, and reading HDF5 in blocks."""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.data.ingest.row_buffers import RowBuffers
from deepspeed_gear.data.ingest.source_checks import DAMAGED, Expansion, optional
from deepspeed_gear.data.ingest.source_names import SourceNames
from deepspeed_gear.data.sources.opened_files import hdf5_file, is_hdf5
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.data.trajectory_checks import CORRECT, cast
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import DTYPES, Column, Rows, Schema

_BLOCK_BYTES = 8 * 1024 * 1024
_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
LEAVE_OUT = "leave it out with --columns"
CONVERT = "store it as numbers, in rows of one shape"  # where a data set needs the column
FLAGS = tuple(Column(role, "bool", role=role) for role in ("terminated", "truncated"))
_IMAGE_HEADS = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"  # of JPEG and PNG
SCALARS = ("reward", "terminated", "truncated")  # roles of one value a step
NEEDED = (*SCALARS, "token", "loss_mask")  # roles of columns that are not optional
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


def column_name(*parts: str) -> str:
    """Join the parts of a source's key to a column name; illegal characters become `_`."""
    return ".".join("".join(c if c.isalnum() or c in "_-" else "_" for c in part) for part in parts)


def end_episode(arrays: dict[str, NDArray[Any]]) -> None:
    """Set the truncated flag of the last step where it has no flag."""
    if len(arrays["terminated"]) and not (arrays["terminated"][-1] or arrays["truncated"][-1]):
        arrays["truncated"] = arrays["truncated"].copy()
        arrays["truncated"][-1] = True


def stored_dtype(where: str, dtype: np.dtype[Any], remedy: str = CONVERT) -> str:
    """Return the stored dtype of a source's dtype; uint16, 32 and 64 become signed and wider."""
    name = str(dtype.name)
    name = _WIDER.get(name, name)
    if name not in DTYPES:
        raise DataError(
            where, "must be numeric (bool, integer or float up to 64 bits)", str(dtype), remedy
        )
    return name


def make_column(
    where: str,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    role: str = "other",
    rows: Rows = "T",
) -> Column:
    """Describe a source's array as a stored column.

    Scalar integer actions become int64, integer rewards float64 and flags bool. Rewards and flags
    have the shape ().
    """
    remedy = LEAVE_OUT if "." in name or role == "other" else CONVERT
    stored = stored_dtype(where, dtype, remedy)
    shape = () if role in SCALARS else shape
    if any(n < 1 for n in shape):
        raise DataError(where, "must have rows with at least one value", list(shape), remedy)
    if role in ("terminated", "truncated"):
        stored = "bool"
    elif role == "reward" and dtype.kind != "f":
        stored = "float64"
    elif role == "action" and not shape and dtype.kind in "iu":
        stored = "int64"
    return Column(name, stored, shape, role, rows)


def convert(where: str, array: NDArray[Any], column: Column) -> NDArray[Any]:
    """Convert a source's array to the dtype of its column, as `trajectory_checks.cast` does.

    Rewards and flags lose axes of one value.
    """
    stored_dtype(where, array.dtype, LEAVE_OUT)
    if column.role in SCALARS and array.size == len(array):
        array = array.reshape(-1)
    return cast(array, column, where, LEAVE_OUT if column.role == "other" else CORRECT)


def decode_images(
    where: str, frames: list[bytes], expansion: Expansion, file_bytes: int
) -> NDArray[np.uint8]:
    """Decode JPEG or PNG files.

    Args:
        frames: The image files.
        file_bytes: Bytes of the source's file, which may refer to one image many times.
    Returns:
        [N, height, width(, channels)], uint8.
    """
    Image = optional(where, "must be decoded, as it holds images", "pillow", "PIL.Image")
    for frame in frames:
        if not isinstance(frame, bytes) or not frame.startswith(_IMAGE_HEADS):
            head = frame[:8] if isinstance(frame, bytes) else type(frame).__name__
            raise DataError(where, "must hold images in the format JPEG or PNG", head, LEAVE_OUT)
    # Pillow would open other formats by their content, and for some starts programs. A malformed
    # image can raise any exception.
    with DataError.on(
        where,
        "must hold JPEG or PNG images of one size, with 8 bits a channel",
        Exception,
        remedy=LEAVE_OUT,
    ):
        # `open` reads the headers only, so that the sizes are checked before pixels are decoded.
        images = [Image.open(io.BytesIO(frame), formats=("JPEG", "PNG")) for frame in frames]
        pixels = sum(image.width * image.height * len(image.getbands()) for image in images)
        expansion.check(where, pixels, min(file_bytes, sum(map(len, frames))))
        # Other modes have 16 bits, or a palette.
        if not {image.mode for image in images} <= {"L", "RGB", "RGBA", "CMYK"}:
            raise ValueError(f"an image of mode {images[0].mode}")
        return np.stack([np.asarray(image, dtype=np.uint8) for image in images])


def hdf5_members(path: Path, group: str = "/") -> dict[str, type]:
    """Return the classes of a group's members by name; none for other files and nodes."""
    if not path.is_file() or not is_hdf5(path):
        return {}
    with open_hdf5(path) as file:
        node = file.get(group)
        if not isinstance(node, h5py.Group):
            return {}
        return {name: node.get(name, getclass=True) for name in node}


def open_hdf5(path: Path) -> h5py.File:
    """Open an HDF5 file; DataError if it is none or is damaged."""
    check_no_pointer(path)
    if path.is_dir():
        inside = next((file for file in sorted(path.iterdir()) if is_hdf5(file)), None)
        remedy = f"give the file in it: {inside}" if inside else "check the path"
        raise DataError(str(path), "must be an HDF5 file", "a folder", remedy)
    remedy = DAMAGED if is_hdf5(path) else "check the path"
    with DataError.on(str(path), "must be a readable HDF5 file", OSError, remedy=remedy):
        return hdf5_file(path)


def hdf5_arrays(group: h5py.Group) -> dict[str, h5py.Dataset]:
    """Return the arrays in a group and below it, by path; without empty ones (h5py.Empty)."""
    nodes: dict[str, Any] = {}
    group.visititems(lambda key, node: nodes.update({key: node}))
    return {key: node for key, node in nodes.items() if getattr(node, "shape", None) is not None}


def single_attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a group or array that hold one value each.

    Those of several values may repeat one text any number of times.
    """
    shapes = {name: node.attrs.get_id(name).shape for name in node.attrs}
    return {name: node.attrs[name] for name, shape in shapes.items() if shape == ()}


def read_rows(
    where: str,
    dataset: h5py.Dataset,
    low: int,
    high: int,
    into: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """Read rows [low, high) of an HDF5 array; DataError if they are damaged.

    Args:
        into: Takes the rows, in the dtype of the array; None: a new array.
    """
    with DataError.on(
        where, f"must be readable in rows {low} to {high - 1}", OSError, remedy=DAMAGED
    ):
        if into is None:
            return np.asarray(dataset[low:high])
        if low < high:
            dataset.read_direct(into, np.s_[low:high])
        return into


def block_rows(array: Any) -> int:
    """Return how many rows of an array make 8 MiB, at least one."""
    row_bytes: int = array.dtype.itemsize * math.prod(array.shape[1:])
    return max(1, _BLOCK_BYTES // max(1, row_bytes))


class RowReader:
    """Reads increasing ranges of rows of an HDF5 array, in blocks of whole chunks.

    So a compressed chunk is decompressed once per pass, not once per episode, but for one or two
    per block. Memory: one block, about 8 MiB (`block_rows`), or 1 MiB of an array without chunks,
    or the requested range where it is larger.
    """

    def __init__(self, where: str, dataset: h5py.Dataset) -> None:
        self._where = where
        self._dataset = dataset
        self.shape = dataset.shape
        self.ndim = dataset.ndim
        self.dtype = dataset.dtype
        self._buffers = RowBuffers.shared()
        self._chunk = dataset.chunks[0] if dataset.chunks else 1
        self.block_rows = max(1, block_rows(dataset) // self._chunk) * self._chunk
        if not dataset.chunks:  # nothing is read twice, so rows are in a cache when they are used
            self.block_rows = max(1, self.block_rows // 8)
        self._takes_buffers = isinstance(dataset, h5py.Dataset)
        self._first = 0
        self._block = np.empty((0, *dataset.shape[1:]), dtype=dataset.dtype)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: slice | tuple[()]) -> NDArray[Any]:
        """Return rows in an array that later calls do not change; with () all of them."""
        if isinstance(rows, tuple):
            if not self.ndim:
                return np.asarray(self._dataset[()])
            return read_rows(self._where, self._dataset, 0, len(self))
        low, high, _ = rows.indices(len(self))
        high = max(low, high)
        until = self._first + len(self._block)
        if not self._first <= low <= high <= until:
            # Rounded out to whole chunks: with chunks of 10 rows, [7, 23) is read as [0, 30), or
            # up to the end of the block if that is later. Rows that were read already are kept.
            first = low // self._chunk * self._chunk
            end = max(first + self.block_rows, -(-high // self._chunk) * self._chunk)
            end = min(end, len(self))
            begin = until if self._first <= first < until else first
            block = self._read(first, begin, end)
            self._first = first
            self._block = block
        return self._block[low - self._first : high - self._first]

    def _read(self, first: int, begin: int, end: int) -> NDArray[Any]:
        """Return rows [first, end), of which those before `begin` are in the block."""
        known = self._block[first - self._first :] if begin > first else self._block[:0]
        shape = (end - first, *self.shape[1:])
        if not (self._takes_buffers and self._buffers.lends(shape, self.dtype)):
            rows = read_rows(self._where, self._dataset, begin, end)  # faster for a few rows
            return np.concatenate([known, rows]) if len(known) else rows
        block = self._buffers.empty(shape, self.dtype)
        block[: len(known)] = known
        read_rows(self._where, self._dataset, begin, end, block[len(known) :])
        return block
