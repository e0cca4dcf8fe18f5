"""The on-disk data set: a folder of NumPy files, mapped read-only in place and watched
for changes.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset as MapDataset

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data import dataset_files
from deepspeed_gear.data.compressed_rows import CompressedRows, files_of
from deepspeed_gear.data.dataset_files import (
    REMAKE,
    SCHEMA_FILE,
    STATS_FILE,
    DatasetPart,
    FileEntry,
)
from deepspeed_gear.data.dataset_statistics import ColumnStatistics, compute_statistics
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.errors import DataError, SchemaError
from deepspeed_gear.schema import Column, Schema

CHECK_EVERY_S = 1.0
_ATTRIBUTES = {"device": "st_dev", "inode": "st_ino", "size": "st_size"}
_ATTRIBUTES["modification time (ns)"] = "st_mtime_ns"
_REMEDY = (
    "leave a data set unchanged while a run uses it; end the run, and copy it again or ingest it"
)


class Dataset(MapDataset[dict[str, Any]]):
    """A data set on disk: read-only and memory-mapped, so it may be larger than memory.

    It is a map-style data set of PyTorch: item i is trajectory i, as tensors. `trajectory` and
    `columns` are NumPy's views of the same bytes. It is pickled as its path and fingerprint, and
    opened again.

    Safe to share between threads; each process opens its own, and the pages are shared by the
    kernel.

    Attributes:
        path: The folder.
        schema: The columns.
        fingerprint: Identity of schema, extents and column bytes (and of a part's place), SHA-256
            in hex.
        part: Which part of a whole it is; None for a whole.
        first_id: Id of its first trajectory: 0 for a whole.
        num_trajectories_of_whole: Trajectories of the whole that it is, or is a part of.
        whole_fingerprint: Fingerprint of that whole.
        longest: Steps of the longest trajectory of that whole.
        split: Share of each held-out part that the statistics leave out.
        source: Source of the data, as the ingest recorded it.
        first_rows: First row of each trajectory. [n], int64.
        lengths: Steps of each trajectory. [n], int64.
        num_rows: Rows of every step column.
        num_steps: Transitions of all trajectories.
        num_bytes: Bytes of all files but the manifest.
        columns: The stored columns by name; bfloat16 as uint16. [num_rows or n, *shape].
        compressed: Those of them of which an index or a slice decodes rows.
        statistics: By column, over the training split only, of the whole; opaque columns have none.
        files: The mapped files, to detect changes of them.
        versions: Trajectories of the whole by fingerprint: of each data set that it has grown from,
            the oldest first, and of itself. Each is the first trajectories of the next.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Map a folder whose manifest has been read; use `open`."""
        self.path = path
        self.files = MappedFiles(path)
        self._entries = _check_manifest(path, manifest)
        self.fingerprint: str = manifest["fingerprint"]
        self.split: dict[str, float] = dict(manifest["split"])
        self.source: dict[str, Any] = dict(manifest["source"])
        self.num_rows: int = manifest["num_rows"]
        self.num_steps: int = manifest["num_steps"]
        self.num_bytes = sum(entry.bytes for entry in self._entries.values())
        name = str(path / SCHEMA_FILE)
        kinds = (SchemaError, AttributeError)
        with DataError.on(name, "must hold a valid schema", *kinds, remedy=REMAKE):
            self.schema = Schema.from_json(manifest["schema"])
        num_trajectories: int = manifest["num_trajectories"]
        self.part: DatasetPart | None = None
        if "part" in manifest:
            self.part = DatasetPart.from_json(f"{name}: part", manifest["part"], num_trajectories)
        extents = self._map(dataset_files.EXTENTS_FILE, np.dtype(np.int64), (num_trajectories, 2))
        self.first_rows = np.ascontiguousarray(extents[:, 0])
        self.lengths = np.ascontiguousarray(extents[:, 1])
        self._check_extents()
        if (part := self.part) is None:
            of_whole = 0, num_trajectories, self.fingerprint, int(self.lengths.max())
        else:
            of_whole = part.first, part.trajectories, part.whole, part.longest
        self.first_id, self.num_trajectories_of_whole, self.whole_fingerprint, self.longest = (
            of_whole
        )
        self.columns: dict[str, NDArray[Any]] = {}
        self.compressed: dict[str, CompressedRows] = {}
        self._digests: dict[str, str] = manifest.get(
            "compressed", {}
        )  # of the rows of compressed columns
        self._is_random = False
        for column in self.schema:
            rows = num_trajectories if column.rows == "1" else self.num_rows
            self.columns[column.name] = self._column(column, rows)
        self.statistics = self._read_statistics()
        grown_from = dict(manifest.get("grown_from", {}))
        self.versions: dict[str, int] = {
            **grown_from,
            self.whole_fingerprint: self.num_trajectories_of_whole,
        }
        if dataset_files.fingerprint_of(manifest) != self.fingerprint:
            raise DataError(name, "must match its own fingerprint", self.fingerprint, REMAKE)

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Open a data set and check it without reading it all.

        Checked are the manifest, header and size of every file, the first and last 64 KiB of every
        column, and the whole of the extents and statistics; `verify` checks every byte.

        Raises:
            DataError: The folder or a file of it is missing, truncated, foreign or changed; names
                it.
        Cost: 16 bytes per trajectory and 128 KiB per column read, for data of any size.
        """
        path = arguments.folder("path", path)
        if not path.is_dir():
            remedy = "make one with gear ingest SOURCE DEST"
            if path.with_name(path.name + ".partial").is_dir():
                remedy = "its ingest did not finish; run it again"
            raise DataError(str(path), "must be the folder of a data set", None, remedy)
        while True:
            folder = os.stat(path)
            try:
                return cls(path, dataset_files.read_json(path / SCHEMA_FILE))
            except DataError:
                if not path.exists() or os.path.samestat(folder, os.stat(path)):
                    raise  # else it has grown meanwhile: its files are others

    @classmethod
    def from_iterable(
        cls,
        iterable: Iterable[Any],
        dest: str | Path,
        *,
        schema: Schema | None = None,
        **options: Any,
    ) -> Dataset:
        """Write a data set of what a program has.

        Args:
            iterable: Mappings by column, one a trajectory, a step or a conversation, as the rows of
                a table (docs/how-to/formats.md); or a pandas frame, a data set of Hugging Face's
                `datasets`, or one of Minari. An iterator is read into memory first, unless there is
                a schema.
            dest: The folder to make.
            schema: The columns of the mappings, one a trajectory, as `DatasetWriter.add` takes
                them. By default they are found by a pass over the rows.
            **options: Of `ingest` and `open_rows`.
        Raises:
            DataError: A row does not fit, or `dest` cannot be written; `dest` is not made.
        """
        return _ingest_rows(iterable, dest, schema, options)

    def _entry(self, name: str) -> FileEntry:
        if name not in self._entries:
            raise DataError(
                str(self.path / SCHEMA_FILE), f"must describe the file {name}", None, REMAKE
            )
        return self._entries[name]

    def _map(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Map an array file after checks of its size, probe and header. Cost: at most
        128 KiB read.
        """
        path = self.path / name
        self.files.record(path)
        dataset_files.check_file(path, self._entry(name))
        with DataError.on(str(path), "must be a NumPy array", OSError, ValueError, remedy=REMAKE):
            array = np.lib.format.open_memmap(path, mode="r")
        order = "" if array.flags.c_contiguous else " in Fortran order"
        found, wanted = (
            f"{of.name}{list(s)}" for of, s in ((array.dtype, array.shape), (dtype, shape))
        )
        if (found, array.dtype, order) != (wanted, dtype, ""):
            raise DataError(str(path), f"must be {wanted} as in schema.json", found + order, REMAKE)
        self.files.add(path, array)
        return array

    def _column(self, column: Column, rows: int) -> Any:
        if column.name not in self._digests:
            return self._map(
                dataset_files.column_file(column), column.numpy_dtype, (rows, *column.shape)
            )
        frames_file, offsets_file = files_of(column)
        offsets = self._map(offsets_file, np.dtype(np.int64), (rows + 1,))
        frames = self._map(frames_file, np.dtype(np.uint8), (int(offsets[-1]),))
        found = CompressedRows(str(self.path / frames_file), column, frames, offsets)
        return self.compressed.setdefault(column.name, found)

    def read_at_random(self) -> None:
        """Have the kernel read only the pages that are asked for, and none ahead of them.

        For data that do not fit into memory: what was read ahead would be dropped before it is
        used.
        """
        self._is_random = True
        self.files.advise(mmap.MADV_RANDOM)

    def _check_extents(self) -> None:
        ends = self.first_rows + self.lengths + int(self.schema.has_final_row)
        consistent = (
            self.first_rows[0] == 0
            and bool((self.first_rows[1:] == ends[:-1]).all())
            and ends[-1] == self.num_rows
            and self.lengths.sum() == self.num_steps
            and self.lengths.min() >= 1
        )
        if not consistent:
            rule = f"must cover the {self.num_rows} rows without gaps or empty trajectories"
            raise DataError(str(self.path / dataset_files.EXTENTS_FILE), rule, None, REMAKE)

    def statistics_for(self, split: Mapping[str, float]) -> dict[str, ColumnStatistics]:
        """Compute the statistics over the training part of another split than the data set's own.

        Args:
            split: Share of each held-out part by name, as in `gear.data.split`.
        Raises:
            DataError: No trajectory is left for training, or this is a part: statistics are of the
                whole, which is not available.
        Cost: one pass over the data.
        """
        if self.part is not None:
            remedy = (
                f"use the split {self.split} that it was ingested with, or ingest with "
                f"the "
                f"other one "
            )
            remedy += "and run gear split again"
            rule = "must be a whole data set to compute the statistics of another split"
            raise DataError(str(self.path), rule, str(self.part), remedy)
        self.files.advise(mmap.MADV_NORMAL)
        found = compute_statistics(self.schema, self.columns, self.first_rows, self.lengths, split)
        if self._is_random:
            self.files.advise(mmap.MADV_RANDOM)
        return found

    def _read_statistics(self) -> dict[str, ColumnStatistics]:
        path = self.path / STATS_FILE
        dataset_files.check_file(path, self._entry(STATS_FILE))
        data = dataset_files.read_json(path)
        if data.get("split") != self.split:
            rule = f"must have been computed for the split {self.split}"
            raise DataError(str(path), rule, data.get("split"), REMAKE)
        rule = "must hold the statistics of every column"
        kinds = (KeyError, TypeError, ValueError)
        with DataError.on(str(path), rule, *kinds, remedy=REMAKE):
            entries = data["columns"]
            numeric = [column for column in self.schema if not column.is_opaque]
            return {c.name: ColumnStatistics.from_json(entries[c.name], c) for c in numeric}

    def verify(self) -> None:
        """Compare every byte with what was written.

        Raises:
            DataError: A file changed; names it.
        Cost: one pass over all files.
        """
        for name, entry in self._entries.items():
            path = self.path / name
            dataset_files.check_file(path, entry)
            offset = 0 if name == STATS_FILE else np.lib.format.open_memmap(path, mode="r").offset
            if dataset_files.payload_digest(path, offset) != entry.sha256:
                raise DataError(str(path), "must hold the bytes that were written", None, REMAKE)

    def row_of(self, i: int) -> int:
        """Return the first row of the i-th trajectory here; for i = len, the number of rows."""
        return self.num_rows if i == len(self) else int(self.first_rows[i])

    def digest_of(self, column: Column) -> str:
        """Return the SHA-256 of a column's bytes as they were written, in hex. Cost: none, it is
        recorded.
        """
        return (
            self._digests.get(column.name)
            or self._entries[dataset_files.column_file(column)].sha256
        )

    def trajectory(self, i: int) -> dict[str, Any]:
        """Return one trajectory's columns, as `DatasetWriter.add` takes them.

        Args:
            i: Its ordinal in the folder: the trajectory's id, less `first_id`.
        Returns:
            By column [T, *shape], [T+1, *shape] or, with one value per trajectory, [*shape]; views
            of the maps. Opaque values and compressed rows are decoded.
        Raises:
            DataError: There is no such trajectory.
        """
        if not 0 <= i < len(self):
            raise DataError("trajectory id", f"must be in [0, {len(self)})", i)
        first = int(self.first_rows[i])
        length = int(self.lengths[i])
        result: dict[str, Any] = {}
        for column in self.schema:
            end = first + length + int(column.rows == "T+1")
            rows = np.asarray(
                self.columns[column.name][i if column.rows == "1" else slice(first, end)]
            )
            name = f"{self.path}: column {column.name}"
            result[column.name] = decode(rows, column, name) if column.is_opaque else rows
        return result

    def __getitem__(self, i: int) -> dict[str, Any]:
        """Return copies of one trajectory's columns as tensors of their dtypes; opaque values
        decoded.

        Args:
            i: As of `trajectory`; negative from the end.
        Returns:
            By column [T, *shape], [T+1, *shape] or, with one value per trajectory, [*shape].
        Raises:
            IndexError: There is no such trajectory.
        """
        arrays = self.trajectory(range(len(self))[i])
        return {
            c.name: arrays[c.name]
            if c.is_opaque
            else torch.tensor(arrays[c.name]).view(c.torch_dtype)
            for c in self.schema
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return reopened, (self.path, self.fingerprint)

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"Dataset({str(self.path)!r}, {len(self)} trajectories, {self.num_steps} steps)"


def reopened(path: Path, fingerprint: str) -> Dataset:
    """Open a data set that this or another process had open; DataError: it has changed."""
    dataset = Dataset.open(path)
    if dataset.fingerprint != fingerprint:
        rule = f"must still have the fingerprint {fingerprint}"
        remedy = "open it again in this process too"
        raise DataError(str(path), rule, dataset.fingerprint, remedy)
    return dataset


def _check_manifest(path: Path, manifest: Mapping[str, Any]) -> dict[str, FileEntry]:
    name = str(path / SCHEMA_FILE)
    if "format" not in manifest or "schema" not in manifest:
        raise DataError(
            name, "must describe a gear data set", None, "make one with gear ingest SOURCE DEST"
        )
    if manifest["format"] != dataset_files.FORMAT:
        again = "or make the data set again with gear ingest"
        remedy = f"use the version of deepspeed_gear that wrote it, {again}"
        raise DataError(
            f"{name}: format", f"must be {dataset_files.FORMAT}", manifest["format"], remedy
        )
    numbers = dict.fromkeys(("num_trajectories", "num_steps", "num_rows"), int)
    kinds = {**numbers, "split": dict, "source": dict, "fingerprint": str, "files": dict}
    kinds |= {optional: dict for optional in ("grown_from", "compressed") if optional in manifest}
    dataset_files.check_types(f"{name}: ", manifest, kinds, REMAKE)
    if (count := manifest["num_trajectories"]) < 1:
        raise DataError(f"{name}: num_trajectories", "must be at least 1", count, REMAKE)
    return {
        file: FileEntry.from_json(f"{name}: files.{file}", entry)
        for file, entry in manifest["files"].items()
    }


class IngestRows(Protocol):
    """Writes a data set of a program's rows, as `ingest_rows` of `data/ingest`, which imports
    `Dataset`.
    """

    def __call__(
        self, rows: Any, dest: str | Path, schema: Schema | None, options: Mapping[str, Any]
    ) -> Dataset: ...


_ingest_rows: IngestRows


def register_ingest(ingest_rows: IngestRows) -> None:
    """Register what `Dataset.from_iterable` calls; `data/__init__.py` does when the package is
    imported.
    """
    global _ingest_rows
    _ingest_rows = ingest_rows


class MappedFiles:
    """Identities of a folder's files as they were before they were mapped, and their maps.

    A change of a file shows in its map or not, and a truncated file ends the process with SIGBUS,
    so a file whose device, inode, size or modification time has changed is a DataError that names
    it and what has changed. Where the folder as a whole is another one, as after `gear ingest
    --append`, the mapped files are checked through descriptors: they exist as long as they are
    mapped. Any thread may check.
    """

    def __init__(self, folder: Path) -> None:
        self._identities: dict[Path, os.stat_result] = {}
        self._maps: dict[Path, np.memmap] = {}
        self._checked_at = time.monotonic()
        self._folder = folder
        opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        # Descriptors of the folder and its files: none of their inodes is used again.
        self._opened: dict[Path, int] = {folder: opened}
        weakref.finalize(self, lambda opened: [*map(os.close, opened.values())], self._opened)

    def record(self, path: Path) -> None:
        """Record a file's identity before it is checked and mapped."""
        if not path.is_file():
            raise DataError(str(path), "must exist", None, "a file of the data set is missing")
        self._opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._identities[path] = os.fstat(self._opened[path])

    @property
    def is_replaced(self) -> bool:
        """Whether the folder as a whole is another one than that of the mapped files."""
        opened = os.fstat(self._opened[self._folder])
        return self._folder.exists() and not os.path.samestat(os.stat(self._folder), opened)

    def add(self, path: Path, array: np.memmap) -> None:
        """Add the map of a recorded file, unless the file has changed since."""
        _compare(path, self._identities[path], path)
        self._maps[path] = array

    def advise(self, option: int) -> None:
        """Tell the kernel how the maps are read: one of `mmap.MADV_*`."""
        for array in self._maps.values():
            array._mmap.madvise(option)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Compare all files with their recorded identities. Cost: one `stat` a file."""
        try:
            for path, known in self._identities.items():
                _compare(path, known, path)
        except DataError:
            if not self.is_replaced:
                raise
            for path, known in self._identities.items():
                _compare(path, known, self._opened[path])

    def check_at_times(self) -> None:
        """Call `check`, unless it was called within the last `CHECK_EVERY_S` seconds: that takes
        0.1 us.
        """
        now = time.monotonic()
        if now - self._checked_at >= CHECK_EVERY_S:
            self._checked_at = now
            self.check()

    def guard(self, native: ModuleType) -> None:
        """Install the SIGBUS handler that prints the file's name if an access to one of the maps
        fails.

        The handler writes one line to standard error and passes the signal on to the one that was
        installed before (faulthandler's, or the default action). A map that is closed is removed
        automatically.
        """
        for path, array in self._maps.items():
            memory = array._mmap  # type: ignore[attr-defined]
            address = np.frombuffer(memory, np.uint8, 1).ctypes.data
            entry = native.map_guard_add(address, len(memory), os.fsencode(path.absolute()))
            weakref.finalize(memory, native.map_guard_remove, entry).atexit = False


def _compare(path: Path, known: os.stat_result, file: Path | int) -> None:
    with DataError.on(str(path), "must exist while it is used", OSError, remedy=_REMEDY):
        status = os.stat(file)
    pairs = {
        what: (getattr(known, name), getattr(status, name)) for what, name in _ATTRIBUTES.items()
    }
    changed = [
        f"{what} {before} -> {now}" for what, (before, now) in pairs.items() if now != before
    ]
    if changed:
        raise DataError(
            str(path), "must not change while it is mapped", ", ".join(changed), _REMEDY
        )
