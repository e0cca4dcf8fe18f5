"""Export of trajectories to the formats of other programs, one writer class per format.

Parquet, JSON lines and npz carry the schema under `SCHEMA_KEY`, so that `gear ingest` reads the
same bits back.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.array_file import ArrayFile
from deepspeed_gear.data.dataset_files import write_json
from deepspeed_gear.data.ingest.output_columns import LENGTH, RETURN
from deepspeed_gear.data.ingest.reader import ColumnSelection, Reader
from deepspeed_gear.data.ingest.readers.exported import (
    LENGTHS_KEY,
    ROWS_FILE,
    SCHEMA_KEY,
    ExportedReader,
    written_schema,
)
from deepspeed_gear.data.ingest.readers.minari import GROUPS, MinariReader
from deepspeed_gear.data.ingest.source_checks import pyarrow_for
from deepspeed_gear.data.ingest.source_columns import NEEDED, make_column
from deepspeed_gear.data.opaque_rows import encode
from deepspeed_gear.data.partial_folder import PartialFolder, check_destination, writing
from deepspeed_gear.data.stored_values import as_numbers, not_finite
from deepspeed_gear.errors import DataError, known_names
from deepspeed_gear.file_system import sync
from deepspeed_gear.schema import Column, Schema

_GROUP_BYTES = 32 << 20  # of a row group of Parquet
_ELSE = "use --format parquet, or leave it out with --columns"


class TrajectoryFile(ABC):
    """A file or folder that trajectories are appended to; it holds few of them in memory."""

    format: ClassVar[str]  # for `--format`
    reader: ClassVar[type[Reader] | None] = (
        None  # recognises folders of the format; None: it is a file
    )

    def __init__(self, path: Path, schema: Schema, stated: Mapping[str, Any]) -> None:
        """Start a file.

        Args:
            schema: Columns to write.
            stated: Description of the columns that the file carries (`written_schema`).
        """
        self.path = path
        self.schema = schema
        self.stated = stated
        self._file: Any = None

    @abstractmethod
    def add(self, name: str, trajectory: Mapping[str, Any]) -> None:
        """Append a trajectory as `Dataset.trajectory` returns it; `name` is its name in errors."""

    @abstractmethod
    def close(self) -> None:
        """Complete the file."""

    def discard(self) -> None:
        """Close the file without completing it; safe after `close`, and on a full disk."""
        with suppress(Exception):  # closing writes the rest of a buffer
            self._file.close()

    @classmethod
    def replaces(cls, path: Path) -> bool:
        """Return whether the content at a path has this format, and may be replaced."""
        if cls.reader is None:
            return path.is_file()
        return path.is_dir() and cls.reader.recognises(path)


class _Hdf5Disk(io.FileIO):
    """The file below an HDF5 file, which hides failures of the disk from HDF5.

    HDF5 ends the process with a segmentation fault where it cannot flush. So a write always
    succeeds for HDF5; the first failure is kept, and raised by `check`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w+")
        self._failure: OSError | None = None

    def write(self, content: Any) -> int:
        left = memoryview(content).cast("B")
        num_bytes = len(left)
        while len(left) and self._failure is None:
            try:
                left = left[super().write(left) :]
            except OSError as error:
                self._failure = error
        return num_bytes  # all of them, also after a failure: see the class

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self._failure = self._failure or error
            return size or 0

    def check(self) -> None:
        """Raise the first failure of the disk, if there was one."""
        if self._failure is not None:
            raise self._failure


class MinariFile(TrajectoryFile):
    """A Minari data set in one HDF5 file, without an environment.

    Its spaces follow from the dtypes.
    """

    format = "minari"
    reader = MinariReader

    def __init__(self, path: Path, schema: Schema, stated: Mapping[str, Any]) -> None:
        super().__init__(path, schema, stated)
        heads = [column.name.split(".")[0] for column in schema]
        for group in GROUPS.values():
            if group not in heads:
                raise DataError(
                    f"column {group}", "must be present for the format minari", heads, _ELSE
                )
        # Path in an episode's group by column; [] for attributes of the group.
        self._keys = {column.name: self._key(column) for column in schema}
        (path / "data").mkdir(parents=True)
        self._disk = _Hdf5Disk(path / "data" / "main_data.hdf5")
        self._file = h5py.File(self._disk, "w")
        self._steps = 0
        self._actions = (0, 0)  # least and greatest discrete action

    def _key(self, column: Column) -> list[str]:
        """Return the path of a column's array; DataError if ingest would read another column."""
        head, *parts = column.name.split(".")
        if (
            column.name in ("episode_id", "seed")
            and replace(column, dtype="int64", rows="1") == column
        ):
            return []
        name = f"column {column.name}"
        role = head if head in GROUPS.values() else "other"
        read = None
        if not column.is_opaque and column.dtype != "bfloat16" and column.rows != "1":
            rows = "T+1" if role == "observation" else column.rows
            read = make_column(name, column.name, column.numpy_dtype, column.shape, role, rows)
        if read != replace(column, late=False, allow_nan=False):
            raise DataError(
                name,
                "must be one that Minari's layout holds exactly",
                f"{column.dtype}, role {column.role}, rows {column.rows}",
                _ELSE,
            )
        group = next((key for key, of in GROUPS.items() if of == head), head)
        return [group, *(f"_index_{part}" if part.isdigit() else part for part in parts)]

    def add(self, name: str, trajectory: Mapping[str, Any]) -> None:
        if not (trajectory["terminated"][-1] or trajectory["truncated"][-1]):
            raise DataError(name, "must end with a flag for the format minari", None, _ELSE)
        group = self._file.create_group(f"episode_{len(self._file)}")
        for column, key in self._keys.items():
            if key:
                group.create_dataset("/".join(key), data=trajectory[column])
            else:
                group.attrs["id" if column == "episode_id" else column] = trajectory[column]
        group.attrs["total_steps"] = len(trajectory["reward"])
        self._disk.check()
        self._steps += len(trajectory["reward"])
        if "action" in trajectory and trajectory["action"].ndim == 1:
            low = int(trajectory["action"].min())
            high = int(trajectory["action"].max())
            self._actions = min(low, self._actions[0]), max(high, self._actions[1])

    def close(self) -> None:
        spaces = {group: self._space(group, []) for group in ("observation", "action")}
        metadata = {
            "dataset_id": "gear/export-v0",
            "minari_version": "0.5.4",
            "data_format": "hdf5",
            "jpeg_encoding": False,
            "total_episodes": len(self._file),
            "total_steps": self._steps,
            **{f"{group}_space": json.dumps(space) for group, space in spaces.items()},
            SCHEMA_KEY: json.dumps(self.stated),
        }
        self._file.close()
        self._disk.check()
        self._disk.close()
        metadata["dataset_size"] = (self.path / "data" / "main_data.hdf5").stat().st_size / 1e6
        write_json(self.path / "data" / "metadata.json", metadata)

    def discard(self) -> None:
        self._file.close()
        self._disk.close()

    def _space(self, head: str, parts: list[str]) -> dict[str, Any]:
        """Return the space of a column, or of all columns below a name, as Minari serialises it."""
        name = ".".join([head, *parts])
        if name in self.schema:
            column = self.schema[name]
            if name == "action" and column.dtype == "int64" and not column.shape:
                low, high = self._actions
                return {"type": "Discrete", "dtype": "int64", "start": low, "n": high - low + 1}
            bounds = [-np.inf, np.inf] if column.is_floating else [0, 1]
            if column.numpy_dtype.kind in "iu":
                bounds = [np.iinfo(column.numpy_dtype).min, np.iinfo(column.numpy_dtype).max]
            low, high = (np.full(column.shape, bound).tolist() for bound in bounds)
            shape = list(column.shape)
            return {"type": "Box", "dtype": column.dtype, "shape": shape, "low": low, "high": high}
        below = [
            c.name[len(name) + 1 :].split(".")[0]
            for c in self.schema
            if c.name.startswith(f"{name}.")
        ]
        spaces = {key: self._space(head, [*parts, key]) for key in dict.fromkeys(below)}
        if all(key.isdigit() for key in spaces):
            return {"type": "Tuple", "subspaces": [spaces[key] for key in sorted(spaces, key=int)]}
        return {"type": "Dict", "subspaces": spaces}


class ParquetFile(TrajectoryFile):
    """A Parquet file with one row per trajectory.

    A row holds a list of steps per column, and lists of fixed size inside it for the shape.
    """

    format = "parquet"

    def __init__(self, path: Path, schema: Schema, stated: Mapping[str, Any]) -> None:
        super().__init__(path, schema, stated)
        self._arrow = pyarrow_for(str(path), "needs pyarrow")
        self._rows: list[Mapping[str, Any]] = []
        self._num_bytes = 0

    def add(self, name: str, trajectory: Mapping[str, Any]) -> None:
        self._rows.append(trajectory)
        self._num_bytes += sum(getattr(value, "nbytes", 64) for value in trajectory.values())
        if self._num_bytes >= _GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        table = self._arrow.table({column.name: self._array(column) for column in self.schema})
        table = table.replace_schema_metadata({SCHEMA_KEY: json.dumps(self.stated)})
        self._file = self._file or self._arrow.parquet.ParquetWriter(self.path, table.schema)
        self._file.write_table(table)
        self._rows = []
        self._num_bytes = 0

    def _array(self, column: Column) -> Any:
        values = [row[column.name] for row in self._rows]
        if column.is_opaque:
            return self._arrow.array(
                values if column.dtype == "bytes" else [*map(json.dumps, values)]
            )
        steps = np.stack(values) if column.rows == "1" else np.concatenate(values)
        array = self._arrow.array(steps.reshape(-1))
        for size in reversed(column.shape):
            array = self._arrow.FixedSizeListArray.from_arrays(array, size)
        if column.rows == "1":
            return array
        # Trajectories of 2 and 3 rows are the lists between the offsets [0, 2, 5].
        offsets = np.cumsum([0, *map(len, values)]).astype(np.int32)
        return self._arrow.ListArray.from_arrays(self._arrow.array(offsets), array)

    def close(self) -> None:
        if self._rows:
            self._flush()
        self._file.close()


class JsonlFolder(TrajectoryFile):
    """A folder with one JSON line per trajectory, and the schema in a file beside them.

    Floats are written as Python's repr, which is exact.
    """

    format = "jsonl"
    reader = ExportedReader

    def __init__(self, path: Path, schema: Schema, stated: Mapping[str, Any]) -> None:
        super().__init__(path, schema, stated)
        path.mkdir()
        write_json(path / f"{SCHEMA_KEY}.json", stated)
        self._file = (path / ROWS_FILE).open("w", encoding="utf-8")

    def add(self, name: str, trajectory: Mapping[str, Any]) -> None:
        row = {
            column.name: self._value(name, column, trajectory[column.name])
            for column in self.schema
        }
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def _value(self, name: str, column: Column, value: Any) -> Any:
        where = f"{name}: column {column.name}"
        if column.dtype == "bytes":
            with DataError.on(
                where, "must be UTF-8 for the format jsonl", UnicodeDecodeError, remedy=_ELSE
            ):
                return value.decode()
        if column.is_opaque:
            return value
        if column.allow_nan and not_finite(value, column).any():
            raise DataError(where, "must be finite for the format jsonl", None, _ELSE)
        return as_numbers(value, column).tolist()

    def close(self) -> None:
        self._file.close()


class NpzFile(TrajectoryFile):
    """An npz file with one array per column, over all trajectories, and their lengths."""

    format = "npz"

    def __init__(self, path: Path, schema: Schema, stated: Mapping[str, Any]) -> None:
        super().__init__(path, schema, stated)
        folder = path.with_name("arrays")
        folder.mkdir()
        self._files = {
            c.name: ArrayFile(folder / f"{c.name}.npy", c.numpy_dtype, c.shape) for c in schema
        }
        self._files[LENGTHS_KEY] = ArrayFile(folder / LENGTHS_KEY, np.dtype(np.int64), ())

    def add(self, name: str, trajectory: Mapping[str, Any]) -> None:
        for column in self.schema:
            value = trajectory[column.name]
            self._files[column.name].append(
                encode(value, column, name) if column.is_opaque else value
            )
        self._files[LENGTHS_KEY].append(np.array([_num_steps(trajectory, self.schema)]))

    def close(self) -> None:
        with zipfile.ZipFile(self.path, "w") as archive:
            for name, file in self._files.items():
                file.finish()
                archive.write(file.path, f"{name}.npy")
            with archive.open(f"{SCHEMA_KEY}.npy", "w") as entry:
                np.lib.format.write_array(entry, np.array(json.dumps(self.stated)))

    def discard(self) -> None:
        for file in self._files.values():
            file.discard()


def _num_steps(trajectory: Mapping[str, Any], schema: Schema) -> int:
    first = schema.step_columns[0]
    return len(trajectory[first.name]) - int(first.rows == "T+1")


FORMATS = {kind.format: kind for kind in (MinariFile, ParquetFile, JsonlFolder, NpzFile)}


def export(
    trajectories: Iterable[Mapping[str, Any]],
    schema: Schema,
    dest: str | Path,
    format: str,
    columns: list[str] | None = None,
    overwrite: bool = False,
    derives: bool = False,
) -> int:
    """Write trajectories in another format; return their number.

    The output is made in DEST.partial, and renamed to DEST once it is on the disk. `return` and
    `length` are left out where ingest derives them again; a data set without them is marked, so
    that ingest does not. Memory: one trajectory, or a row group of 32 MiB for Parquet.

    Args:
        trajectories: As `Dataset.trajectory` returns them, with the columns of `schema`.
        dest: The file (parquet, npz) or folder (minari, jsonl) to create.
        format: A key of `FORMATS`.
        columns: Patterns of optional columns to keep, as in `ingest`; None keeps all.
        overwrite: Replace a file, or a folder of the same format.
        derives: Let ingest derive `return` and `length` in any case. For tables, which have
            neither.
    Raises:
        DataError: The format cannot hold a column or value exactly, or `dest` exists or cannot be
            written; nothing is made.
    """
    dest = Path(os.path.abspath(arguments.folder("dest", dest)))
    if format not in FORMATS:
        raise DataError(
            "format", f"must be one of {', '.join(FORMATS)}", format, known_names(format, FORMATS)
        )
    kind = FORMATS[format]
    select = ColumnSelection(columns)
    names = (LENGTH,) if schema.role("reward") is None else (LENGTH, RETURN)
    derived = [c for c in schema if replace(c, allow_nan=False) in names]
    needed = (*GROUPS.values(), *NEEDED)
    kept = Schema([c for c in schema if c not in derived and (c.role in needed or select(c.name))])
    select.check_used(dest)
    instead = "or overwrite it (--overwrite)"
    check_destination(dest, overwrite, kind.replaces, f"must be of the format {format}", instead)
    whole = Schema([c for c in schema if c in derived or c in kept.columns])
    stated = written_schema(kept, None if derives else whole)
    partial = PartialFolder(dest)
    count = 0
    with ExitStack() as stack, writing(dest):
        stack.callback(partial.discard)
        file = kind(partial.made, kept, stated)
        stack.callback(file.discard)
        for count, trajectory in enumerate(trajectories, 1):
            name = f"trajectory {count - 1}"
            _check_derived(name, trajectory, derived, schema)
            file.add(name, {column.name: trajectory[column.name] for column in kept})
        if not count:
            raise DataError(
                str(dest),
                "must get at least one trajectory",
                0,
                "choose a table or split that holds trajectories",
            )
        file.close()
        for path in (*file.path.rglob("*"), file.path):
            sync(path)
        partial.publish()
    return count


def _check_derived(
    name: str, trajectory: Mapping[str, Any], derived: list[Column], schema: Schema
) -> None:
    reward = schema.role("reward")
    for column in derived:
        wanted: Any = _num_steps(trajectory, schema)
        if column.role == "return" and reward is not None:
            wanted = as_numbers(trajectory[reward.name], reward).astype(np.float64).sum()
        value = trajectory[column.name]
        if np.asarray(wanted, value.dtype).tobytes() != value.tobytes():
            raise DataError(
                f"{name}: column {column.name}",
                f"must be {wanted}, as gear ingest derives it",
                value.item(),
                "ingest the data set's own sources",
            )
