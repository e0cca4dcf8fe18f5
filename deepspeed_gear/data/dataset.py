"""The on-disk data set: a folder of NumPy files, checked when it is opened, mapped read-only."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

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
from deepspeed_gear.data.dataset_sample import DatasetSample
from deepspeed_gear.data.file_threads import Workers
from deepspeed_gear.data.mapped_files import MappedFiles
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.data.splits import are_for_training, check_split
from deepspeed_gear.data.statistics.dataset_statistics import (
    ColumnStatistics,
    compute_statistics,
    statistics_of_groups,
)
from deepspeed_gear.errors import DataError, SchemaError, near_name, show_bytes
from deepspeed_gear.notebook_views import (
    histogram_svg,
    safe_view,
    show_range,
    table_html,
    view_html,
)
from deepspeed_gear.schema import Column, Schema

# Most trajectories and steps whose returns the view in a notebook reads.
_VIEW_TRAJECTORIES = 4096
_VIEW_STEPS = 1 << 20


class Dataset(MapDataset[dict[str, Any]]):
    """A data set on disk: read-only and memory-mapped, so it may be larger than memory.

    It is a map-style data set of PyTorch: item i is trajectory i, as tensors. `trajectory` and
    `columns` are NumPy views of the same bytes. Pickling stores its path and fingerprint, and
    unpickling opens it again. Threads may share it; each process opens its own, and the kernel
    shares the pages.

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
        split: Share of each held-out part; the statistics leave these parts out.
        source: Origin of the data, as ingest recorded it.
        first_rows: First row of each trajectory. [n], int64.
        lengths: Steps of each trajectory. [n], int64.
        num_rows: Rows of every step column.
        num_steps: Transitions of all trajectories.
        num_bytes: Bytes of all files but the manifest.
        columns: The stored columns by name; bfloat16 as uint16. [num_rows or n, *shape].
        compressed: The compressed columns among them; an index or a slice decodes rows.
        statistics: By column, over the training split of the whole; opaque columns have none.
        files: The mapped files, with the check that none has changed.
        versions: Number of trajectories by fingerprint, of each earlier state of the whole and
            of itself, oldest first. Each state is a prefix of the next.
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
        rule = "must hold a valid schema"
        with DataError.on(name, rule, SchemaError, AttributeError, remedy=REMAKE):
            self.schema = Schema.from_json(manifest["schema"])
        num_trajectories: int = manifest["num_trajectories"]
        self.part: DatasetPart | None = None
        if "part" in manifest:
            self.part = DatasetPart.from_json(f"{name}: part", manifest["part"], num_trajectories)
        extents = self._map(dataset_files.EXTENTS_FILE, np.dtype(np.int64), (num_trajectories, 2))
        self.first_rows = np.ascontiguousarray(extents[:, 0])
        self.lengths = np.ascontiguousarray(extents[:, 1])
        self._check_extents()
        part = self.part
        self.first_id = 0 if part is None else part.first
        self.num_trajectories_of_whole = num_trajectories if part is None else part.trajectories
        self.whole_fingerprint = self.fingerprint if part is None else part.whole
        self.longest = int(self.lengths.max()) if part is None else part.longest
        self.columns: dict[str, NDArray[Any]] = {}
        self.compressed: dict[str, CompressedRows] = {}
        # SHA-256 of the plain rows of each compressed column.
        self._digests: dict[str, str] = manifest.get("compressed", {})
        self._is_random = False
        for column in self.schema:
            rows = num_trajectories if column.rows == "1" else self.num_rows
            self.columns[column.name] = self._column(column, rows)
        self.statistics = self._read_statistics()
        self.versions: dict[str, int] = {
            **manifest.get("grown_from", {}),
            self.whole_fingerprint: self.num_trajectories_of_whole,
        }
        if dataset_files.fingerprint_of(manifest) != self.fingerprint:
            raise DataError(name, "must match its own fingerprint", self.fingerprint, REMAKE)

    @classmethod
    def open(cls, path: str | Path) -> Dataset:
        """Open a data set and check it without reading all of it.

        Checks the manifest, the header and size of every file, the first and last 64 KiB of every
        column, and all of the extents and statistics. `verify` checks every byte.

        Raises:
            DataError: The folder or one of its files is missing, truncated, foreign or changed.
        Cost: 16 bytes per trajectory and 128 KiB per column read, for data of any size.
        """
        path = arguments.folder("path", path)
        if not path.is_dir():
            is_there = path.exists()
            remedy = "check the path, or make a data set there with gear ingest SOURCE DEST"
            if is_there and (path.parent / SCHEMA_FILE).is_file():
                remedy = f"name the folder that it lies in: {path.parent}"
            elif is_there:
                source = dataset_files.described_folder(path) or path
                remedy = f"make one with gear ingest {source} DEST, and name DEST"
            elif path.with_name(path.name + ".partial").is_dir():
                remedy = "its ingest did not finish; run it again"
            given = "no folder" if is_there else "nothing at this path"
            rule = "must be the folder of a data set"
            raise DataError(str(path.absolute()), rule, given, remedy)
        while True:
            folder = os.stat(path)
            try:
                return cls(path, dataset_files.read_json(path / SCHEMA_FILE))
            except DataError:
                # Another folder is there if `gear ingest --append` has replaced it meanwhile; the
                # files that were read then belong to two data sets.
                if not path.exists() or os.path.samestat(folder, os.stat(path)):
                    raise

    @classmethod
    def from_iterable(
        cls,
        iterable: Iterable[Any],
        dest: str | Path,
        *,
        schema: Schema | None = None,
        **options: Any,
    ) -> Dataset:
        """Write a data set from the rows of a program.

        Args:
            iterable: Mappings by column, each a trajectory, a step or a conversation, as the rows
                of a table (docs/how-to/tables-and-chats.md); or a pandas frame, a data set of
                Hugging Face's `datasets`, or one of Minari. Without a schema, an iterator is read
                into memory first.
            dest: The folder to create.
            schema: Columns of the mappings, each a trajectory as `DatasetWriter.add` takes it. By
                default a pass over the rows finds the columns.
            **options: Options of `ingest` and `open_rows`.
        Raises:
            DataError: A row does not fit, or `dest` cannot be written; `dest` is not created.
        """
        return _ingest_rows(iterable, dest, schema, options)

    def _entry(self, name: str) -> FileEntry:
        if name not in self._entries:
            raise DataError(
                str(self.path / SCHEMA_FILE), f"must describe the file {name}", None, REMAKE
            )
        return self._entries[name]

    def _map(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Map an array file after checking its size, probe and header.

        Cost: at most 128 KiB read.
        """
        path = self.path / name
        self.files.record(path)
        dataset_files.check_file(path, self._entry(name))
        with DataError.on(str(path), "must be a NumPy array", OSError, ValueError, remedy=REMAKE):
            array = np.lib.format.open_memmap(path, mode="r")
        if (array.dtype, array.shape, array.flags.c_contiguous) != (dtype, shape, True):
            order = "" if array.flags.c_contiguous else " in Fortran order"
            raise DataError(
                str(path),
                f"must be {dtype.name}{list(shape)} as in schema.json",
                f"{array.dtype.name}{list(array.shape)}{order}",
                REMAKE,
            )
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
        name = str(self.path / frames_file)
        self.compressed[column.name] = CompressedRows(name, column, frames, offsets)
        return self.compressed[column.name]

    def read_at_random(self) -> None:
        """Turn off read-ahead, so that the kernel reads only the pages that are accessed.

        For data larger than memory, where pages read ahead would be evicted before they are used.
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
            raise DataError(
                str(self.path / dataset_files.EXTENTS_FILE),
                f"must cover the {self.num_rows} rows without gaps or empty trajectories",
                None,
                REMAKE,
            )

    def statistics_for(self, split: Mapping[str, float]) -> dict[str, ColumnStatistics]:
        """Compute the statistics over the training part of another split.

        Args:
            split: Share of each held-out part by name, as in `gear.data.split`.
        Raises:
            DataError: No trajectory is left for training, or this is a part: statistics are those
                of the whole, which is not available.
        Cost: one pass over the data.
        """
        if self.part is not None:
            raise DataError(
                str(self.path),
                "must be a whole data set to compute the statistics of another split",
                str(self.part),
                f"use the split {self.split} that it was ingested with, or ingest with the other "
                "one and run gear split again",
            )
        split = check_split(split)
        # The pass is sequential, so read-ahead pays.
        self.files.advise(mmap.MADV_NORMAL)
        with closing(Workers()) as workers:
            statistics = compute_statistics(
                self.schema,
                self.columns,
                self.first_rows,
                self.lengths,
                split,
                workers,
            )
        if self._is_random:
            self.files.advise(mmap.MADV_RANDOM)
        return statistics

    def statistics_by(self, name: str) -> dict[Any, dict[str, ColumnStatistics]]:
        """Compute the statistics over the training trajectories with each value of a column.

        Args:
            name: A column with one value per trajectory, such as `source` or `task`; or with one
                per step, such as `task_index`, that is the same in all steps of a trajectory.
        Returns:
            Statistics of each column by name, for each value: a number, bytes, or the text of a
            JSON value.
        Raises:
            DataError: There is no such column, or it has several values in a trajectory.
        Cost: one pass over the data for each value.
        """
        where = f"{self.path}: column {name}"
        if name not in self.schema:
            remedy = near_name(name, self.schema.names) or f"it has {', '.join(self.schema.names)}"
            raise DataError(where, "must be a column of the data set", None, remedy)
        column = self.schema[name]
        if column.shape and not column.is_opaque:
            remedy = "name a column of single values, such as source or task"
            raise DataError(where, "must have one value", list(column.shape), remedy)
        groups: dict[Any, NDArray[np.bool_]] = {}
        is_train = are_for_training(self.first_id, self.first_id + len(self), self.split)
        for number in np.flatnonzero(is_train).tolist():
            first = number if column.rows == "1" else int(self.first_rows[number])
            num_rows = 1 if column.rows == "1" else int(self.lengths[number])
            rows = self.columns[name][first : first + num_rows]
            if (rows != rows[0]).any():
                at = f"{where}, trajectory {number}"
                remedy = "name a column with one value for each trajectory"
                raise DataError(at, "must have one value in all steps", None, remedy)
            key = decode(rows[0], column, where) if column.is_opaque else rows[0].item()
            key = json.dumps(key) if column.dtype == "json" else key
            groups.setdefault(key, np.zeros(len(self), np.bool_))[number] = True
        return statistics_of_groups(
            self.schema, self.columns, self.first_rows, self.lengths, groups
        )

    def _read_statistics(self) -> dict[str, ColumnStatistics]:
        path = self.path / STATS_FILE
        dataset_files.check_file(path, self._entry(STATS_FILE))
        data = dataset_files.read_json(path)
        if data.get("split") != self.split:
            raise DataError(
                str(path),
                f"must have been computed for the split {self.split}",
                data.get("split"),
                REMAKE,
            )
        rule = "must hold the statistics of every column"
        with DataError.on(str(path), rule, KeyError, TypeError, ValueError, remedy=REMAKE):
            entries = data["columns"]
            numeric = [column for column in self.schema if not column.is_opaque]
            return {c.name: ColumnStatistics.from_json(entries[c.name], c) for c in numeric}

    def verify(self) -> None:
        """Check every byte against the digests in the manifest.

        Raises:
            DataError: A file has changed; names it.
        Cost: one pass over all files.
        """
        for name, entry in self._entries.items():
            path = self.path / name
            dataset_files.check_file(path, entry)
            offset = 0 if name == STATS_FILE else np.lib.format.open_memmap(path, mode="r").offset
            if dataset_files.payload_digest(path, offset) != entry.sha256:
                raise DataError(str(path), "must hold the bytes that were written", None, REMAKE)

    def row_of(self, i: int) -> int:
        """Return the first row of trajectory i of this folder; for i = len, the number of rows."""
        return self.num_rows if i == len(self) else int(self.first_rows[i])

    def digest_of(self, column: Column) -> str:
        """Return the recorded SHA-256 of a column's bytes before compression, in hex."""
        return (
            self._digests.get(column.name)
            or self._entries[dataset_files.column_file(column)].sha256
        )

    def trajectory(self, i: int) -> dict[str, Any]:
        """Return one trajectory's columns, as `DatasetWriter.add` takes them.

        Args:
            i: Its index in the folder: the trajectory's id minus `first_id`.
        Returns:
            By column [T, *shape], [T+1, *shape] or, with one value per trajectory, [*shape]; views
            of the maps. Opaque values and compressed rows are decoded.
        Raises:
            DataError: There is no such trajectory.
        """
        if not 0 <= i < len(self):
            raise DataError(
                "trajectory id",
                f"must be in [0, {len(self)})",
                i,
                f"the data set holds {len(self)} trajectories",
            )
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
        """Return copies of one trajectory's columns as tensors; opaque values are decoded.

        Args:
            i: Its index in the folder; a negative one counts from the end.
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

    def _repr_html_(self) -> str:
        """Return a table of the columns, with pictures of lengths and returns, for notebooks.

        Ranges are those of the statistics.

        Cost: reads the rewards, or returns, of at most 4,096 trajectories and 2^20 steps.
        """
        return safe_view(self, self._view)

    def _view(self) -> str:
        self.files.check()
        facts = {
            "trajectories": f"{len(self):,}",
            "steps": f"{self.num_steps:,}",
            "size": show_bytes(self.num_bytes),
        }
        if self.part is not None:
            facts["part"] = f"{self.part.index} of {self.part.count}"
        if self.split:
            facts["held out"] = ", ".join(f"{name} {one:.0%}" for name, one in self.split.items())
        returns = DatasetSample(self, most_rows=_VIEW_TRAJECTORIES).returns(_VIEW_STEPS)
        pictures = [histogram_svg("steps of a trajectory", self.lengths)]
        if returns is not None:
            some = "" if len(returns) == len(self) else f" ({len(returns):,} of {len(self):,})"
            pictures.append(histogram_svg(f"return of a trajectory{some}", returns))
        heads = ["column", "dtype", "shape", "rows", "role", "range", "mean", "not finite", "size"]
        rows = [[*self._view_cells(column)] for column in self.schema]
        table = table_html(heads, rows)
        return view_html(f"Dataset {self.path}", facts, pictures, table)

    def _view_cells(self, column: Column) -> Iterator[str]:
        """Yield the cells of a column's row in the table for notebooks."""
        yield column.name
        yield column.dtype
        yield f"max_bytes {column.max_bytes}" if column.is_opaque else str(list(column.shape))
        yield column.rows
        yield column.role
        statistics = self.statistics.get(column.name)
        if statistics is None or not np.isfinite(statistics.min).any():
            yield from ("", "")
        else:
            yield show_range(float(np.nanmin(statistics.min)), float(np.nanmax(statistics.max)))
            means = statistics.mean[np.isfinite(statistics.mean)]
            yield f"{means.mean():.4g}" if len(means) else "overflows"
        yield f"{statistics.non_finite:,}" if statistics is not None and column.is_floating else ""
        yield show_bytes(self.columns[column.name].nbytes)


def reopened(path: Path, fingerprint: str) -> Dataset:
    """Open a data set that this or another process had open; DataError if it has changed."""
    dataset = Dataset.open(path)
    if dataset.fingerprint != fingerprint:
        raise DataError(
            str(path),
            f"must still have the fingerprint {fingerprint}",
            dataset.fingerprint,
            "open it again in this process too",
        )
    return dataset


def _check_manifest(path: Path, manifest: Mapping[str, Any]) -> dict[str, FileEntry]:
    name = str(path / SCHEMA_FILE)
    if "format" not in manifest or "schema" not in manifest:
        raise DataError(
            name, "must describe a gear data set", None, "make one with gear ingest SOURCE DEST"
        )
    if manifest["format"] != dataset_files.FORMAT:
        raise DataError(
            f"{name}: format",
            f"must be {dataset_files.FORMAT}",
            manifest["format"],
            "use the version of deepspeed_gear that wrote it, or make the data set again with gear "
            "ingest",
        )
    kinds: dict[str, type] = dict.fromkeys(("num_trajectories", "num_steps", "num_rows"), int)
    kinds |= {"split": dict, "source": dict, "fingerprint": str, "files": dict}
    kinds |= {optional: dict for optional in ("grown_from", "compressed") if optional in manifest}
    dataset_files.check_types(f"{name}: ", manifest, kinds, REMAKE)
    if (count := manifest["num_trajectories"]) < 1:
        raise DataError(f"{name}: num_trajectories", "must be at least 1", count, REMAKE)
    return {
        file: FileEntry.from_json(f"{name}: files.{file}", entry)
        for file, entry in manifest["files"].items()
    }


# `ingest_rows` of `data/ingest`, which imports `Dataset` and is registered here.
IngestRows = Callable[[Any, str | Path, Schema | None, Mapping[str, Any]], Dataset]
_ingest_rows: IngestRows


def register_ingest(ingest_rows: IngestRows) -> None:
    """Register the function that `Dataset.from_iterable` calls.

    `data/__init__.py` does so when the package is imported.
    """
    global _ingest_rows
    _ingest_rows = ingest_rows
