"""What `gear export` writes as Parquet, JSON lines or npz: a trajectory a row, and the schema."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.source_checks import DAMAGED
from deepspeed_gear.errors import DataError, SchemaError
from deepspeed_gear.schema import Column, Schema

SCHEMA_KEY, LENGTHS_KEY, ROWS_FILE = "gear_schema", "gear_lengths", "trajectories.jsonl"
_PARQUET = b"PAR1"


class ExportedReader(Reader):
    """Reads files of `gear export` with their exact columns: dtypes, roles, shapes and opaque values."""

    format = "export"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        try:
            return _written_schema(path) is not None
        except (
            OSError,
            ValueError,
            KeyError,
            zipfile.BadZipFile,
        ):  # the reader of its layout says how
            return False

    def open(self) -> None:
        found = _written_schema(self.path)
        if found is None:
            rule = "must be a file or folder that gear export wrote, with its schema"
            raise DataError(str(self.path), rule, None, "leave --format out")
        try:
            schema = Schema.from_json(parse_json(found))
        except (SchemaError, ValueError) as error:
            raise DataError(f"{self.path}: {SCHEMA_KEY}", "must be a schema", str(error), DAMAGED) from error
        flags = ("reward", "terminated", "truncated")
        self.columns = tuple(c for c in schema if c.role in flags or self.select(c.name))

    def episodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        read = self._json if self.path.is_dir() else self._npz if _is_npz(self.path) else self._parquet
        try:
            for number, row in enumerate(read()):
                yield f"trajectory {number}", row
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                str(self.path), "must be as gear export wrote it", repr(error), DAMAGED
            ) from error

    def _json(self) -> Iterator[dict[str, Any]]:
        with (self.path / ROWS_FILE).open("rb") as file:
            for line in file:
                row = parse_json(line)
                yield {c.name: row[c.name] if c.is_opaque else np.asarray(row[c.name]) for c in self.columns}

    def _npz(self) -> Iterator[dict[str, Any]]:
        with zipfile.ZipFile(self.path) as archive:
            num_bytes = sum(entry.file_size for entry in archive.infolist())
        self.expansion.check(str(self.path), num_bytes, self.path.stat().st_size)
        with np.load(self.path, allow_pickle=False) as arrays:
            lengths = arrays[LENGTHS_KEY]
            columns = {column: arrays[column.name] for column in self.columns}
        ones = np.ones_like(lengths)
        ends = {
            rows: np.cumsum(n).tolist() for rows, n in (("T", lengths), ("T+1", lengths + 1), ("1", ones))
        }
        for i in range(len(lengths)):
            row = {}
            for c, array in columns.items():
                end = i + 1 if c.rows == "1" else int(ends[c.rows][i])
                row[c.name] = array[i] if c.rows == "1" else array[end - lengths[i] - (c.rows == "T+1") : end]
            yield row

    def _parquet(self) -> Iterator[dict[str, Any]]:
        file = pyarrow_for(str(self.path)).parquet.ParquetFile(self.path)
        groups = range(file.num_row_groups)
        stated = sum(max(0, file.metadata.row_group(group).total_byte_size) for group in groups)
        self.expansion.check(str(self.path), stated, self.path.stat().st_size)
        for group in groups:
            table = file.read_row_group(group, [column.name for column in self.columns]).combine_chunks()
            rows = [_rows(c, table.column(c.name).chunk(0)) for c in self.columns]
            for values in zip(*rows, strict=True):
                yield dict(zip((c.name for c in self.columns), values, strict=True))


def _rows(column: Column, array: Any) -> Any:
    """Return the values of a column of a row group, an array for each trajectory."""
    if column.is_opaque:
        texts = array.to_pylist()
        return texts if column.dtype == "bytes" else map(parse_json, texts)
    offsets, values = None, array
    if column.rows != "1":
        offsets, values = array.offsets.to_numpy(), array.values
    for _ in column.shape:
        values = values.flatten()
    steps = values.to_numpy(zero_copy_only=False).reshape(-1, *column.shape)
    return steps if offsets is None else [steps[first:end] for first, end in pairwise(offsets.tolist())]


def _is_npz(path: Path) -> bool:
    return path.is_file() and zipfile.is_zipfile(path)


def _written_schema(path: Path) -> str | None:
    """Return the schema in a file or folder of `gear export`, as JSON; None in others."""
    if (path / f"{SCHEMA_KEY}.json").is_file() and (path / ROWS_FILE).is_file():
        return (path / f"{SCHEMA_KEY}.json").read_text("utf-8")
    if _is_npz(path):
        with np.load(path, allow_pickle=False) as arrays:
            return str(arrays[SCHEMA_KEY]) if SCHEMA_KEY in arrays.files else None
    if not path.is_file() or path.open("rb").read(4) != _PARQUET:
        return None
    found = pyarrow_for(str(path)).parquet.read_schema(path).metadata or {}
    return found[SCHEMA_KEY.encode()].decode() if SCHEMA_KEY.encode() in found else None


def pyarrow_for(where: str) -> Any:
    """Import pyarrow; a DataError of a source or a destination where it is absent."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(where, "needs pyarrow", None, "pip install pyarrow") from None
    return pyarrow
