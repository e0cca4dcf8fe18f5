"""Writer of an on-disk data set, new or appended to, by trajectories or blocks of them."""

from __future__ import annotations

import hashlib
import json
import os
from array import array as packed
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data import compressed_rows, dataset_files
from deepspeed_gear.data.array_file import (
    BLOCK_BYTES,
    LEAST_BLOCKS,
    MOST_BLOCKS,
    ArrayFile,
)
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import (
    REMAKE,
    SCHEMA_FILE,
    STATS_FILE,
    DatasetPart,
    FileEntry,
)
from deepspeed_gear.data.episode_split import split_episodes
from deepspeed_gear.data.file_threads import Workers
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.partial_folder import PartialFolder, check_destination, writing
from deepspeed_gear.data.splits import are_for_training, check_split
from deepspeed_gear.data.statistics.column_scan import SAMPLE_BYTES, ColumnScan
from deepspeed_gear.data.statistics.dataset_statistics import KeptRows, compute_statistics
from deepspeed_gear.data.stored_values import check_finite
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.data.trajectory_checks import check_trajectory, stored_block
from deepspeed_gear.errors import ConfigError, DataError, SchemaError, undo_on_error
from deepspeed_gear.file_system import sync
from deepspeed_gear.schema import SOURCE, Schema

_BLOCK_BYTES = 4 * 1024 * 1024
_MEMORY = 128 * 1024 * 1024  # for blocks of all columns, unless there are very many
_LEAST_BLOCK_BYTES = 256 * 1024
_IDS = 1024  # whose split is found at a time


class DatasetWriter:
    """Writer of a data set, which holds one trajectory and a few MiB of each column in memory.

    Threads write, digest and scan what was added. The data set does not depend on their number.

    It writes to DEST.partial, and renames that to DEST once it is complete; a DEST that is replaced
    or appended to is swapped with it in the same rename. A writer that is killed leaves a
    DEST.partial, which the next writer to the same place replaces; one that fails removes it. As a
    context manager it closes at the end of the block, and discards on an exception. Not
    thread-safe; a lock excludes a second writer.
    """

    def __init__(
        self,
        dest: str | Path,
        schema: Schema,
        *,
        split: Mapping[str, float] | None = None,
        overwrite: bool = False,
        append: bool = False,
        source: Mapping[str, Any] | None = None,
        compress: Collection[str] | None = None,
        threads: int | None = None,
    ) -> None:
        """Start a new data set, or one that begins with the trajectories of another.

        Args:
            dest: The folder to create.
            split: Share of each held-out part by name; the statistics are those of the rest. None:
                no part, or the parts of the data set that is appended to.
            overwrite: Replace a data set at `dest`; anything else there is never replaced.
            append: Begin with the trajectories of the data set at `dest`, and take its place. It
                must have this schema; where it lacks the column `SOURCE`, its trajectories get 0.
            source: A JSON-able description of the data's origin; its `sources` are listed after
                those of the data set that is appended to.
            compress: Columns to store as one zstd frame per row; their rows must have several
                values. None: no column, or those of the data set that is appended to.
            threads: Threads that digest rows and compute statistics; with 1, `add` does it itself.
                None: one for each core of this process, at most 8.
        Raises:
            ConfigError: The split or the number of threads is malformed.
            SchemaError: There is no such column to compress.
            DataError: `dest` exists, cannot be appended to, or cannot be written.
        Cost: with `append`, the existing bytes are read and written once, a few MiB at a time.
        """
        arguments.one_of("schema", schema, Schema, "a Schema")
        if (media := schema.role("media")) is not None:
            raise SchemaError(
                f"column {media.name}",
                "must not have the role media in a data set",
                None,
                "only tables with a capacity hold media",
            )
        for ragged in schema.ragged_columns:
            raise SchemaError(
                f"column {ragged.name}",
                "must not be ragged in a data set",
                None,
                'give it a "shape" and pad its rows: only tables with a capacity have such columns',
            )
        self.dest = Path(os.path.abspath(arguments.folder("dest", dest)))
        self.schema = schema
        self._split = check_split({} if split is None else arguments.mapping("split", split))
        self._source = dict(source or {})
        if threads is not None and (type(threads) is not int or threads < 1):
            raise ConfigError(
                "threads", "must be at least 1", threads, "leave it out for all cores"
            )
        with DataError.on(
            "source",
            "must be JSON, without NaN and infinities",
            TypeError,
            ValueError,
            remedy="keep strings, finite numbers, lists and dicts in it",
        ):
            json.dumps(self._source, allow_nan=False)
        self._overwrite = overwrite or append
        self._grown_from: dict[str, int] = {}
        #: Sources of the data set that is appended to.
        self.num_sources_before = 0
        self._lengths = packed("q")
        self._num_rows = 0
        self._files: dict[str, ArrayFile] = {}
        sample_bytes = min(SAMPLE_BYTES, _MEMORY // len(schema))
        self._scans = {c.name: ColumnScan(c, sample_bytes) for c in schema if not c.is_opaque}
        self._kept_ids = range(0)  # for which `_kept` states whether they are for training
        self._kept: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._part: DatasetPart | None = None
        self._statistics: dict[str, Any] | None = None  # of the whole, where this is a part
        self._closed = False
        self._partial = PartialFolder(self.dest)
        self._made = self._partial.made
        with undo_on_error(self.discard), writing(self.dest):
            check_destination(self.dest, self._overwrite)
            (self._made / "columns").mkdir(parents=True)
            self._workers = Workers(threads)
            memory = _MEMORY // len(schema)
            block_bytes = max(_LEAST_BLOCK_BYTES, min(BLOCK_BYTES, memory // LEAST_BLOCKS))
            most_blocks = max(LEAST_BLOCKS, min(MOST_BLOCKS, memory // block_bytes))
            for column in schema:
                self._files[column.name] = ArrayFile(
                    self._made / dataset_files.column_file(column),
                    column.numpy_dtype,
                    column.shape,
                    self._workers,
                    self._scans.get(column.name),
                    block_bytes,
                    column.is_opaque,
                    most_blocks,
                )
            known = Dataset.open(self.dest) if append else None
            if compress is None:
                compress = () if known is None else known.compressed
            # They are compressed at the end, with a dictionary trained on rows of the whole column.
            self._compress = [schema[name] for name in dict.fromkeys(compress)]
            for column in self._compress:
                compressed_rows.zstandard_for("compress", column)
            if known is not None:
                self._split = known.split if split is None else self._split
                self._begin_with(known)

    @overload
    def add(
        self,
        trajectory: Mapping[str, Any],
        name: str = "",
        *,
        split_by_flags: Literal[False] = False,
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
                [T+1, *shape] or, with one value per trajectory, [*shape]. T >= 1 is the same for
                all. Columns with dots in their names may be nested, as in `Replay.add`.
            name: Its name in errors; "trajectory <id>" by default.
            split_by_flags: As in `Replay.add`.
            final: As in `Replay.add`.
        Returns:
            The index of the trajectory in the data set; with `split_by_flags` those of the parts.
        Raises:
            DataError: A column is missing, unknown, or of another shape or length; or it holds a
                value outside its dtype, NaN or an infinity without `allow_nan`, or an end flag
                before the last step. Nothing is written.
        """
        if self._closed:
            raise DataError(
                str(self.dest), "must be open to be written", None, "make a new DatasetWriter"
            )
        name = name or f"trajectory {len(self._lengths)}"
        trajectory = flatten(f"{name}: trajectory", trajectory, frozenset(self.schema.names))
        if split_by_flags:
            return [
                self.add(part, name)
                for part in split_episodes(name, self.schema, trajectory, final)
            ]
        arrays, length = check_trajectory(
            name, self.schema, trajectory, late_remedy="a data set is not filled later"
        )
        check_finite(name, self.schema, arrays)
        keep = self._is_kept(len(self._lengths))
        with undo_on_error(self.discard), writing(self.dest):
            for column in self.schema:
                is_shorter = column.rows == "T" and self.schema.has_final_row
                self._files[column.name].append(arrays[column.name], is_shorter, keep)
        self._lengths.append(length)
        self._num_rows += length + int(self.schema.has_final_row)
        return len(self._lengths) - 1

    def add_block(self, block: TrajectoryBlock, *, split_by_flags: bool = False) -> None:
        """Append the trajectories of a block; the data set is that of adding them one by one.

        Args:
            split_by_flags: As in `add`.
        Raises:
            DataError: As `add`, for the first trajectory that is wrong. Those before it are
                written.
        Cost: of several trajectories, a few operations for each column. A block whose arrays are
            not plain rows of the schema is divided.
        """
        arrays = None
        if not (block.is_single or split_by_flags or self._closed):
            arrays = stored_block(self.schema, block)
        if arrays is None:
            for one in block.divided():
                if split_by_flags:
                    self.add(one.arrays, one.name_of(0), split_by_flags=True)
                else:
                    self.add(one.arrays, one.name_of(0))
            return
        first = len(self._lengths)
        kept = are_for_training(first, first + len(block), self._split)
        with undo_on_error(self.discard), writing(self.dest):
            for column in self.schema:
                keep = block.mask(column, kept)
                self._files[column.name].append(arrays[column.name], keep=keep)
        self._lengths.frombytes(block.lengths.tobytes())
        self._num_rows += block.num_rows

    def _is_kept(self, number: int) -> bool:
        """Return whether a trajectory is for training, which statistics cover."""
        if number not in self._kept_ids:
            self._kept_ids = range(number, number + _IDS)
            self._kept = are_for_training(number, number + _IDS, self._split)
        return bool(self._kept[number - self._kept_ids.start])

    def copy_part(self, whole: Dataset, part: DatasetPart, digests: Mapping[str, Any]) -> None:
        """Make this a part of a data set by copying its rows.

        Args:
            digests: SHA-256 objects by column of the whole, to which the copied bytes are added.
        """
        self._part = part
        self._statistics = dataset_files.read_json(whole.path / STATS_FILE)
        self._grown_from = {
            name: n for name, n in whole.versions.items() if name != whole.fingerprint
        }
        for file in self._files.values():
            file.leave_out_scan()
        self._copy(whole, part.first, part.end, digests)

    def _begin_with(self, known: Dataset) -> None:
        columns = [
            column for column in self.schema if column != SOURCE or column in known.schema.columns
        ]
        if known.part is not None:
            raise DataError(
                f"{known.path}: part",
                "must not be appended to",
                str(known.part),
                "append to the whole, and split it again",
            )
        if known.schema.columns != tuple(columns):
            raise DataError(
                f"{known.path}: schema",
                f"must equal the schema of the appended trajectories, {self.schema}",
                str(known.schema),
                "make a data set of its own",
            )
        digests = {column.name: hashlib.sha256() for column in known.schema}
        self._copy(known, 0, len(known), digests)
        check_copied(known, digests)
        if len(columns) < len(self.schema):
            sources = np.zeros(len(known), SOURCE.numpy_dtype)
            keep = are_for_training(0, len(known), self._split)
            self._files[SOURCE.name].append(sources, keep=keep)
        self._grown_from = known.versions
        # A source that a program has described by itself has no list; it is a list of one.
        before, own = (
            of if "sources" in of else {"sources": [of]} for of in (known.source, self._source)
        )
        self._source = {**before, **own, "sources": [*before["sources"], *own["sources"]]}
        self.num_sources_before = len(before["sources"])

    def _copy(self, whole: Dataset, begin: int, stop: int, digests: Mapping[str, Any]) -> None:
        """Copy trajectories [begin, stop) of a data set, and add their bytes to the digests."""
        first = whole.row_of(begin)
        end = whole.row_of(stop)
        is_train = are_for_training(0, len(whole), self._split)
        kept = KeptRows(whole.first_rows, whole.lengths, is_train, whole.schema.has_final_row)
        for column in whole.schema:
            low, high = (begin, stop) if column.rows == "1" else (first, end)
            rows = max(1, _BLOCK_BYTES // max(1, column.row_bytes))
            for at in range(low, high, rows):
                block = whole.columns[column.name][at : min(at + rows, high)]
                keep = kept.mask(column, at, at + len(block))
                self._files[column.name].append(block, keep=keep)
                digests[column.name].update(
                    np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
                )
        self._lengths.extend(whole.lengths[begin:stop].tolist())
        self._num_rows = end - first

    def close(self) -> Dataset:
        """Complete the data set, finish its statistics and move it into place.

        Returns:
            The data set, opened.
        Raises:
            DataError: There are no trajectories, or none is left for training; no file remains.
        Cost: the rows that quantiles come from are read, while the last rows go to the disk.
        """
        if self._closed:
            raise DataError(
                str(self.dest),
                "must be closed once only",
                remedy="make a new DatasetWriter for another data set",
            )
        with undo_on_error(self.discard), writing(self.dest):
            if not self._lengths:
                raise DataError(
                    str(self.dest),
                    "must get at least one trajectory",
                    0,
                    "an empty data set is not written",
                )
            self._complete()
            check_destination(self.dest, self._overwrite)
            # Files are on the disk since they were finished. Their names must be there before the
            # folder gets the name DEST, so that a crash leaves no DEST without its files.
            for folder in (self._made / "columns", self._made):
                sync(folder)
            self._partial.publish()
        self.discard()
        return Dataset.open(self.dest)

    def _complete(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.int64)
        file_of = dataset_files.column_file
        # Lengths 2 and 3 are the extents [[0, 2], [2, 3]], with final rows [[0, 2], [3, 3]].
        ends = np.cumsum(lengths + int(self.schema.has_final_row))
        extents = np.stack([ends - lengths - int(self.schema.has_final_row), lengths], axis=1)
        file = ArrayFile(self._made / dataset_files.EXTENTS_FILE, extents.dtype, (2,))
        file.append(extents)
        files: dict[str, FileEntry] = {dataset_files.EXTENTS_FILE: file.finish()}
        for array_file in self._files.values():
            array_file.flush()
        for array_file in self._files.values():
            array_file.wait()
        columns = {name: array_file.memory_map() for name, array_file in self._files.items()}
        # The disk takes the last rows while quantiles are found in the page cache.
        entries = {
            column: self._workers.start_one(self._files[column.name].finish)
            for column in self.schema
        }
        statistics = self._statistics
        if statistics is None:
            first_rows = np.ascontiguousarray(extents[:, 0])
            computed = compute_statistics(
                self.schema,
                columns,
                first_rows,
                lengths,
                self._split,
                self._workers,
                self._scans,
            )
            statistics = {
                "split": self._split,
                "columns": {name: entry.to_json() for name, entry in computed.items()},
            }
        for column, entry in entries.items():
            files[file_of(column)] = entry()
        digests = {column.name: files.pop(file_of(column)).sha256 for column in self._compress}
        for column in self._compress:
            files |= compressed_rows.compress(self._made, column)
        files[STATS_FILE] = dataset_files.write_json(self._made / STATS_FILE, statistics)
        manifest: dict[str, Any] = {
            "format": dataset_files.FORMAT,
            "num_trajectories": len(lengths),
            "num_steps": sum(self._lengths),
            "num_rows": self._num_rows,
            "split": self._split,
            "source": self._source,
            "schema": self.schema.to_json(),
            "files": {name: asdict(entry) for name, entry in files.items()},
            **({} if self._part is None else {"part": self._part.to_json()}),
            **({} if not self._grown_from else {"grown_from": self._grown_from}),
            **({} if not digests else {"compressed": digests}),
        }
        manifest["fingerprint"] = dataset_files.fingerprint_of(manifest)
        dataset_files.write_json(self._made / SCHEMA_FILE, manifest)

    def discard(self) -> None:
        """Remove all files that were written so far; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for file in self._files.values():
            file.stop()
        if self._files:
            self._workers.close()
        for file in self._files.values():
            file.discard()
        self._partial.discard()

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None:
            self.discard()
        elif not self._closed:
            self.close()


def check_copied(dataset: Dataset, digests: Mapping[str, Any]) -> None:
    """Raise DataError unless the copied bytes of each column match its recorded digest."""
    for column in dataset.schema:
        if digests[column.name].hexdigest() != dataset.digest_of(column):
            raise DataError(
                f"{dataset.path}: column {column.name}",
                "must hold the bytes that were written",
                None,
                REMAKE,
            )
