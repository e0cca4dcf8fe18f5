"""Reader of what `gear export` writes as Parquet, JSON lines or npz, with its schema."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.array_values import as_array
from deepspeed_gear.data.ingest.decoding.npz_entries import NPY, read_entry
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.source_checks import DAMAGED, first_bytes, pyarrow_for
from deepspeed_gear.data.ingest.source_columns import NEEDED
from deepspeed_gear.data.ingest.table_blocks import arrow_block, json_bytes, record_batches
from deepspeed_gear.data.sources.opened_files import arrow_file, is_zip, zip_file
from deepspeed_gear.errors import DataError, SchemaError
from deepspeed_gear.schema import Schema

SCHEMA_KEY = "gear_schema"
LENGTHS_KEY = "gear_lengths"
ROWS_FILE = "trajectories.jsonl"
_PARQUET = b"PAR1"
_WHOLE = "whole"
_MALFORMED = Exception  # what a malformed file can raise: any


class ExportedReader(Reader):
    """Reads files and folders of `gear export` with their exact columns.

    Dtypes, roles, shapes and opaque values are those of the exported data set.
    """

    format = "export"

    @classmethod
    def recognises(cls, path: Path) -> bool:
        with suppress(_MALFORMED):  # the reader of its layout raises the error
            return _written_schema(path) is not None
        return False

    def open(self) -> None:
        with DataError.on(
            str(self.path), "must be as gear export wrote it", _MALFORMED, remedy=DAMAGED
        ):
            stated = _written_schema(self.path)
        if stated is None:
            raise DataError(
                str(self.path),
                "must be a file or folder that gear export wrote, with its schema",
                None,
                "leave --format out",
            )
        schema, self.whole = read_schema(f"{self.path}: {SCHEMA_KEY}", stated)
        self.has_schema = True
        self.select.assign_groups({column.name: column.role for column in schema})
        self.columns = tuple(c for c in schema if c.role in NEEDED or self.select(c.name))

    def episodes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        read = (
            self._json if self.path.is_dir() else self._npz if _is_npz(self.path) else self._parquet
        )
        names = [column.name for column in self.columns]
        number = 0
        # In the data set, every text takes the size of its column's longest one.
        wide = sum(column.max_bytes for column in self.columns)
        file = self.path / ROWS_FILE if self.path.is_dir() else self.path
        self._file_bytes = file.stat().st_size
        with DataError.on(
            str(self.path), "must be as gear export wrote it", _MALFORMED, remedy=DAMAGED
        ):
            for block in read(names):
                for values in zip(*(block[name] for name in names), strict=True):
                    where = f"{self.path}: columns of texts and objects"
                    self.expansion.check(where, wide * (number + 1), self._file_bytes)
                    yield f"trajectory {number}", dict(zip(names, values, strict=True))
                    number += 1

    def _json(self, _: list[str]) -> Iterator[dict[str, Any]]:
        """Yield blocks of trajectories: the values of each column."""
        with (self.path / ROWS_FILE).open("rb") as file:
            for line in file:
                row = parse_json(line)
                values = [
                    row[c.name] if c.is_opaque else as_array(row[c.name]) for c in self.columns
                ]
                yield {c.name: [value] for c, value in zip(self.columns, values, strict=True)}

    def _npz(self, names: list[str]) -> Iterator[dict[str, Any]]:
        with zip_file(self.path) as archive:
            lengths = _array(self.path, archive, LENGTHS_KEY)
            block: dict[str, Any] = {name: _array(self.path, archive, name) for name in names}
        ends = {"T": np.cumsum(lengths), "T+1": np.cumsum(lengths + 1)}
        for column in self.columns:
            if column.rows != "1":
                block[column.name] = _divided(block[column.name], ends[column.rows])
        yield block

    def _parquet(self, names: list[str]) -> Iterator[dict[str, Any]]:
        for batch in record_batches(self.path, self.expansion, lambda _: names)[1]:
            block = arrow_block(batch, False, str(self.path))
            texts = [column.name for column in self.columns if column.dtype == "json"]
            yield block | {name: map(self._parsed, block[name]) for name in texts}

    def _parsed(self, text: str) -> Any:
        self.expansion.check(
            f"{self.path}: a JSON value", json_bytes(text.encode()), self._file_bytes
        )
        return parse_json(text)


def _divided(array: np.ndarray, ends: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows up to each end.

    A generator, since a file of a few bytes can state any number of ends.
    """
    for first, end in zip(chain((0,), ends), ends, strict=False):
        yield array[first:end]


def written_schema(kept: Schema, whole: Schema | None) -> dict[str, Any]:
    """Return the description of columns that an export carries, as JSON values.

    `read_schema` reverses it.

    Args:
        kept: Columns that the export holds.
        whole: Columns of its data set, including derived ones; None where ingest is to derive them.
    """
    return kept.to_json() | ({} if whole is None else {_WHOLE: whole.to_json()})


def read_schema(where: str, text: str) -> tuple[Schema, Schema | None]:
    """Return the columns that an export holds, and those of its data set."""
    with DataError.on(where, "must be a schema", SchemaError, ValueError, remedy=DAMAGED):
        stated = parse_json(text)
        schema = Schema.from_json(stated)
        whole = stated.get(_WHOLE)
        return schema, None if whole is None else Schema.from_json(whole)


def _is_npz(path: Path) -> bool:
    return path.is_file() and is_zip(path)


def _array(path: Path, archive: zipfile.ZipFile, name: str) -> Any:
    where = f"{path}: {name}"

    def refuse(_: bytes) -> Any:
        raise DataError(where, "must not be Python objects", None, DAMAGED)

    return read_entry(where, archive, archive.getinfo(name + NPY), refuse)


def _written_schema(path: Path) -> str | None:
    """Return the schema that a file or folder of `gear export` carries, or None."""
    if (path / f"{SCHEMA_KEY}.json").is_file() and (path / ROWS_FILE).is_file():
        return (path / f"{SCHEMA_KEY}.json").read_text("utf-8")
    if _is_npz(path):
        with zip_file(path) as archive:
            has_schema = SCHEMA_KEY + NPY in archive.namelist()
            return str(_array(path, archive, SCHEMA_KEY)) if has_schema else None
    if first_bytes(path, len(_PARQUET)) != _PARQUET:
        return None
    arrow = pyarrow_for(str(path), "needs pyarrow")
    metadata = arrow.parquet.read_schema(arrow_file(arrow, path)).metadata or {}
    return metadata[SCHEMA_KEY.encode()].decode() if SCHEMA_KEY.encode() in metadata else None
