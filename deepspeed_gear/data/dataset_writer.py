"""Writing an on-disk data set, trajectory by trajectory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from array import array as packed
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import (
    EXTENTS_FILE,
    FORMAT,
    SCHEMA_FILE,
    STATS_FILE,
    ArrayFile,
    DatasetPart,
    FileRecord,
    column_file,
    fingerprint_of,
    write_json,
)
from deepspeed_gear.data.dataset_statistics import check_split, compute_statistics
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.trajectory_checks import check_finite, check_trajectory, split_episodes
from deepspeed_gear.errors import DataError
from deepspeed_gear.liveness import hold, release
from deepspeed_gear.schema import Schema

_LOCK_FILE = ".gear-partial"
_REPLACED = ".replaced"


class DatasetWriter:
    """Write a data set by streaming: no more than one trajectory is held in memory.

    Everything goes to DEST.partial, which becomes DEST in one rename when it is complete. A writer that is
    killed leaves a DEST.partial that the next one to the same place replaces; one that fails removes it. As
    a context manager it closes at the end of the block and discards on an exception. Not thread-safe; a
    lock excludes a second writer.
    """

    def __init__(
        self,
        dest: str | Path,
        schema: Schema,
        *,
        split: Mapping[str, float] | None = None,
        overwrite: bool = False,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        """Start a data set.

        Args:
            dest: The folder to make.
            schema: The columns of every trajectory.
            split: Share of each held-out part by name; the statistics are those of the rest.
            overwrite: Replace a data set that is there; anything else is never replaced.
            source: A JSON-able description of the source of the data.
        Raises:
            ConfigError: The split is malformed.
            DataError: `dest` exists, or cannot be written.
        """
        arguments.one_of("schema", schema, Schema, "a Schema")
        self.dest, self.schema = Path(os.path.abspath(arguments.folder("dest", dest))), schema
        self._split = check_split({} if split is None else arguments.mapping("split", split))
        self._source = dict(source or {})
        self._overwrite = overwrite
        self._lengths = packed("q")
        self._num_rows = 0
        self._files: dict[str, ArrayFile] = {}
        self._part: DatasetPart | None = None
        self._closed = False
        check_destination(self.dest, overwrite)
        self._partial = self.dest.with_name(self.dest.name + ".partial")
        try:
            self._lock = _claim(self._partial)
            (self._partial / "columns").mkdir()
            for column in schema:
                path = self._partial / column_file(column)
                self._files[column.name] = ArrayFile(path, column.numpy_dtype, column.shape)
        except OSError as error:
            if hasattr(self, "_lock"):
                self.discard()
            raise unwritable(self.dest, error) from error

    @overload
    def add(
        self, trajectory: Mapping[str, Any], name: str = "", *, split_by_flags: Literal[False] = False
    ) -> int: ...
    @overload
    def add(
        self,
        trajectory: Mapping[str, Any],
        name: str = "",
        *,
        split_by_flags: Literal[True],
        final: Mapping[str, Any] | None = None,
    ) -> list[int]: ...
    def add(
        self,
        trajectory: Mapping[str, Any],
        name: str = "",
        *,
        split_by_flags: bool = False,
        final: Mapping[str, Any] | None = None,
    ) -> int | list[int]:
        """Append a trajectory and return its id.

        Values are converted as by `Replay.add`.

        Args:
            trajectory: An array, tensor or nested list for every column of the schema: [T, *shape],
                [T+1, *shape] or, with one value per trajectory, [*shape]. T >= 1 is the same for all. Columns
                with dots in their names may come nested, as in `Replay.add`.
            name: Its name in errors; "trajectory <id>" unless given.
            split_by_flags: As `Replay.add`.
            final: As `Replay.add`.
        Returns:
            The ordinal of the trajectory in the data set; with `split_by_flags` those of the parts.
        Raises:
            DataError: A column is missing, unknown, of another shape or length, holds what its dtype cannot
                hold, NaN or an infinity without `allow_nan`, or an end flag before the last step; nothing is
                written.
        """
        if self._closed:
            raise DataError(str(self.dest), "must be open to be written", None, "make a new DatasetWriter")
        name = name or f"trajectory {len(self._lengths)}"
        trajectory = flatten(f"{name}: trajectory", trajectory, frozenset(self.schema.names))
        for column in self.schema.late_columns:  # nothing is filled in a data set later
            if column.name not in trajectory:
                raise DataError(f"{name}: column {column.name}", "must be in every trajectory")
        if split_by_flags:
            return [self.add(part, name) for part in split_episodes(name, self.schema, trajectory, final)]
        arrays, length = check_trajectory(name, self.schema, trajectory)
        check_finite(name, self.schema, arrays)
        try:
            for column in self.schema:
                is_shorter = column.rows == "T" and self.schema.has_final_row
                self._files[column.name].append(arrays[column.name], and_zero_row=is_shorter)
        except OSError as error:
            self.discard()
            raise unwritable(self.dest, error) from error
        self._lengths.append(length)
        self._num_rows += length + int(self.schema.has_final_row)
        return len(self._lengths) - 1

    def close(self) -> Dataset:
        """Complete the data set, compute its statistics and move it into place.

        Returns:
            The data set, opened.
        Raises:
            DataError: There are no trajectories, or none is left for training; no file remains.
        Cost: one pass over the columns for the statistics.
        """
        if self._closed:
            raise DataError(str(self.dest), "must be closed once only")
        try:
            if not self._lengths:
                rule, remedy = "must get at least one trajectory", "an empty data set is not written"
                raise DataError(str(self.dest), rule, 0, remedy)
            self._complete()
            self._publish()
        except BaseException as error:
            self.discard()
            if isinstance(error, OSError):
                raise unwritable(self.dest, error) from error
            raise
        return Dataset.open(self.dest)

    def _complete(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int64)
        ends = np.cumsum(lengths + int(self.schema.has_final_row))
        extents = np.stack([ends - lengths - int(self.schema.has_final_row), lengths], axis=1)
        file = ArrayFile(self._partial / EXTENTS_FILE, extents.dtype, (2,))
        file.append(extents)
        records: dict[str, FileRecord] = {EXTENTS_FILE: file.finish(len(extents), whole_probe=True)}
        for column in self.schema:
            rows = len(lengths) if column.rows == "1" else self._num_rows
            records[column_file(column)] = self._files[column.name].finish(rows)
        records[STATS_FILE] = self._write_statistics(extents)
        manifest = {
            "format": FORMAT,
            "num_trajectories": len(lengths),
            "num_steps": sum(self._lengths),
            "num_rows": self._num_rows,
            "split": self._split,
            "source": self._source,
            "fingerprint": fingerprint_of(self.schema, len(lengths), self._num_rows, records, self._part),
            "schema": self.schema.to_json(),
            "files": {name: asdict(record) for name, record in records.items()},
            **({} if self._part is None else {"part": self._part.to_json()}),
        }
        write_json(self._partial / SCHEMA_FILE, manifest)

    def _write_statistics(self, extents: NDArray[np.int64]) -> FileRecord:
        columns = {c.name: np.load(self._partial / column_file(c), mmap_mode="r") for c in self.schema}
        first_rows, lengths = (np.ascontiguousarray(extents[:, i]) for i in range(2))
        statistics = compute_statistics(self.schema, columns, first_rows, lengths, self._split)
        entries = {name: entry.to_json() for name, entry in statistics.items()}
        return write_json(self._partial / STATS_FILE, {"split": self._split, "columns": entries})

    def _publish(self) -> None:
        """Move the complete folder into place, in exchange for an old one, which is then removed."""
        check_destination(self.dest, self._overwrite)
        if self.dest.exists():
            self.dest.rename(self._partial / _REPLACED)
        self._partial.rename(self.dest)
        self._closed = True
        shutil.rmtree(self.dest / _REPLACED, ignore_errors=True)
        (self.dest / _LOCK_FILE).unlink()
        release(self._lock)

    def discard(self) -> None:
        """Stop and remove all files; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for file in self._files.values():
            file.discard()
        shutil.rmtree(self._partial, ignore_errors=True)
        release(self._lock)

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None:
            self.discard()
        elif not self._closed:
            self.close()


def check_destination(dest: Path, overwrite: bool) -> None:
    """Raise DataError if `dest` exists, unless it is a data set that may be replaced."""
    if not dest.exists() and not dest.is_symlink():
        return
    if not overwrite:
        remedy = "choose another DEST or overwrite it (--overwrite)"
        raise DataError(str(dest), "must not exist yet", None, remedy)
    empty = dest.is_dir() and not dest.is_symlink() and not any(dest.iterdir())
    if not empty and (dest.is_symlink() or not (dest / SCHEMA_FILE).is_file()):
        raise DataError(str(dest), "must be a gear data set to be overwritten", None, "choose another DEST")


def _claim(partial: Path) -> int:
    """Make an empty DEST.partial that this process holds a lock on, and return the lock's descriptor."""
    foreign = partial.exists() and not (partial.is_dir() and not any(partial.iterdir()))
    if foreign and not (partial / _LOCK_FILE).is_file():
        rule = "must not exist, or be what an interrupted ingest left"
        raise DataError(str(partial), rule, None, "move it away")
    partial.mkdir(parents=True, exist_ok=True)
    lock = hold(os.open(partial / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        release(lock)
        rule = "must not be written by two at once"
        raise DataError(str(partial), rule, None, "wait for the other ingest") from None
    for entry in partial.iterdir():
        if entry.name == _LOCK_FILE:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return lock


def unwritable(dest: Path, error: OSError) -> DataError:
    """Return the error of a destination that cannot be written."""
    remedy = "free some space" if error.errno == errno.ENOSPC else "check the path and its permissions"
    return DataError(str(dest), "must be writable", error.strerror or str(error), remedy)
