"""Reader of WebDataset: shards in tar files, in which files of one key are a sample."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.data.ingest.decoding.image_decoding import decode_images
from deepspeed_gear.data.ingest.decoding.npz_entries import NPY, read_entry, read_npy
from deepspeed_gear.data.ingest.readers.tables import TableReader, has_meaning, usual_name
from deepspeed_gear.data.ingest.source_checks import DAMAGED, Expansion, first_bytes
from deepspeed_gear.data.ingest.source_columns import column_name
from deepspeed_gear.data.ingest.table_blocks import Block, row_blocks
from deepspeed_gear.data.ingest.token_rows import may_be_read, take_rows
from deepspeed_gear.data.sources import is_address, pattern_paths, source_path
from deepspeed_gear.data.sources.brace_patterns import check_none_missing, expand
from deepspeed_gear.data.sources.opened_files import TAR, TAR_AT, is_tar
from deepspeed_gear.errors import DataError

_NAMES = (".tar", ".tar.gz", ".tgz")
_GZIP = b"\x1f\x8b"
_IMAGES = ("jpg", "jpeg", "png")
_TEXTS = ("txt", "text", "transcript")
_TEXT = "name it .txt if it is a text"
_LEFT_OUT = 0  # the value of a column that is not decoded
_NUMBERS = ("cls", "cls2", "index", "inx", "id")  # as in the package webdataset


class _FieldFile(NamedTuple):
    """A file of a shard: a field of the sample of a key."""

    name: str
    key: str
    field: str
    content: bytes


class WebdatasetReader(TableReader):
    """Reads a shard, or the shards of a folder sorted by name, one after the other.

    A sample is a row of a table: a step, an episode or a conversation (`TableReader`). Its files
    are `KEY.FIELD`, where FIELD is everything after the first dot of the name. `reward.npy` gives
    the column `reward`, and `npy` the column `npy`; the values of a JSON object and the arrays of
    an npz file are columns of their own names. Images and arrays that `--columns` leaves out are
    not decoded.
    """

    format = "webdataset"
    takes = (
        "episode_id",
        "episode_length",
        "tokenize",
        "last_step",
    )  # and "shards", the files of a pattern

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return bool(_shards(path))

    def _source_files(self) -> list[Path]:
        files = self.options.get("shards") or _shards(self.path)
        if not files:
            raise DataError(
                str(self.path),
                f"must be a file named {', '.join(_NAMES)}, or a folder of such files",
                None,
                "give the shards, or their folder",
            )
        return files

    def _given_blocks(self, is_nested: bool) -> Iterator[Block]:
        self._num_skipped = 0
        self._unknown = set[str]()
        self._takes_rows = take_rows(self._tokenize)
        for file in self._source_files():
            check_no_pointer(file)
            self.file = file
            yield from row_blocks(self._samples(file), str(file), is_nested)

    def open(self) -> None:
        super().open()
        self.reads_ahead = False  # images are decoded by Python
        if shards := self.options.get("shards"):
            self.notes.append(f"{len(shards)} shards, from {shards[0].name} to {shards[-1].name}")
        self.note("{} files without a key or a field: left out", self._num_skipped)
        self.note("files of unknown kinds, left out: {}", sorted(self._unknown))

    def _samples(self, shard: Path) -> Iterator[dict[str, Any]]:
        for key, files in groupby(self._fields(shard), lambda file: file.key):
            sample: dict[str, Any] = {}
            for file in files:
                where = f"{shard}: {file.name}"
                for column, value in self._decoded(where, file.field, file.content, shard):
                    if column in sample:
                        raise DataError(
                            where,
                            f"must give the sample {key} the column {column} once",
                            None,
                            "rename one of its files or keys",
                        )
                    sample[column] = value
            if sample:
                yield sample

    def _fields(self, shard: Path) -> Iterator[_FieldFile]:
        """Yield the files of samples in a shard."""
        for name, content in self._members(shard):
            folder, _, base = name.rpartition("/")
            stem, _, field = base.partition(".")
            if not stem or not field or base.startswith("__"):
                self._num_skipped += 1
                continue
            yield _FieldFile(name, f"{folder}/{stem}" if folder else stem, field.lower(), content)

    def _members(self, shard: Path) -> Iterator[tuple[str, bytes]]:
        """Yield the name and the content of each file of a shard, in one pass over it."""
        kinds = (OSError, EOFError, tarfile.TarError, ValueError, zlib.error)
        with (
            DataError.on(str(shard), "must be a readable tar file", *kinds, remedy=DAMAGED),
            shard.open("rb") as file,
            tarfile.open(fileobj=self._content(shard, file), mode="r|") as archive,
        ):
            while (member := archive.next()) is not None:
                archive.members.clear()  # type: ignore[attr-defined]  # else it keeps all
                where = f"{shard}: {member.name}"
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    rule = "must be a whole file, and no link"
                    raise DataError(
                        where,
                        rule,
                        f"type {member.type!r}",
                        "write the shard again, with copies in place of links",
                    )
                part = archive.extractfile(member)
                content = b"" if part is None else part.read()
                if len(content) != member.size:
                    rule = f"must have {member.size} bytes, as the shard states"
                    raise DataError(where, rule, len(content), DAMAGED)
                yield member.name, content

    def _content(self, shard: Path, file: Any) -> Any:
        if first_bytes(shard, len(_GZIP)) != _GZIP:
            return file
        return _Inflated(file, str(shard), self.expansion, shard.stat().st_size)

    def _decoded(
        self, where: str, field: str, content: bytes, shard: Path
    ) -> Iterator[tuple[str, Any]]:
        """Yield the names and values of the columns in a file."""
        name, _, kind = field.rpartition(".")
        column = name or kind
        if kind in ("npy", *_IMAGES) and self._is_left_out(column):
            yield column, _LEFT_OUT
        elif kind == "npy":
            yield column, _array(where, content)
        elif kind == "npz":
            yield from self._arrays(where, content, name)
        elif kind == "json":
            with DataError.on(where, "must be JSON", ValueError, RecursionError, remedy=DAMAGED):
                value = parse_json(content.decode())
            if isinstance(value, dict):
                head = f"{name}." if name else ""
                yield from ((f"{head}{key}", one) for key, one in value.items())
            else:
                yield column, value
        elif kind in _TEXTS or kind in _NUMBERS:
            with DataError.on(where, "must be a text in UTF-8", ValueError, remedy=DAMAGED):
                text = content.decode()
            if kind in _TEXTS:
                yield column, text
                return
            with DataError.on(
                where, "must be a whole number", ValueError, value=text[:80], remedy=_TEXT
            ):
                yield column, int(text)
        elif kind in _IMAGES:
            file_bytes = shard.stat().st_size
            yield column, decode_images(where, [content], self.expansion, file_bytes)[0]
        else:
            self._unknown.add(kind)

    def _arrays(self, where: str, content: bytes, name: str) -> Iterator[tuple[str, Any]]:
        """Yield the arrays of an npz file."""
        head = f"{name}." if name else ""
        # A malformed file can raise any exception.
        with (
            DataError.on(where, "must be a readable npz file", Exception, remedy=DAMAGED),
            zipfile.ZipFile(io.BytesIO(content)) as archive,
        ):
            entries = [
                (head + one.filename.removesuffix(NPY).replace("/", "."), one)
                for one in archive.infolist()
                if one.filename.endswith(NPY)
            ]
            read = [entry for column, entry in entries if not self._is_left_out(column)]
            self.expansion.check(where, sum(entry.file_size for entry in read), len(content))
            arrays = [
                read_entry(
                    f"{where}: {entry.filename}", archive, entry, partial(_refuse_objects, where)
                )
                if entry in read
                else np.asarray(_LEFT_OUT)
                for _, entry in entries
            ]
        for (column, _), array in zip(entries, arrays, strict=True):
            yield column, array if array.ndim else array[()]

    def _is_left_out(self, column: str) -> bool:
        """Return whether `--columns` leaves a column out, and nothing else needs its values.

        The names of a table's columns are known after its first rows only, so a column is decoded
        if any name that it may get is kept.
        """
        usual = usual_name(column, ())
        names = {column, usual, column_name(*column.split("."))}
        if self._takes_rows or any(map(self.select.keeps, names)):
            return False
        renamed = self.options.get("rename") or ()
        named = [*renamed, *self._tokenize, self.options.get("episode_id")]
        roles = self.options.get("role") or ()
        return not any(
            has_meaning(name)
            or may_be_read(name)
            or any(name == one or name.startswith(f"{one}.") for one in named)
            or any(fnmatchcase(name, pattern) for pattern in roles)
            for name in names
        )


class _Inflated(io.RawIOBase):
    """The content of a gzip file, up to the bound of its expansion.

    tarfile reads as many bytes as a header states, so members are not enough to check.
    """

    def __init__(self, file: Any, where: str, expansion: Expansion, file_bytes: int) -> None:
        self._file = gzip.GzipFile(fileobj=file)
        self._where = where
        self._expansion = expansion
        self._file_bytes = file_bytes
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self._num_bytes += len(content)
        self._expansion.check(self._where, self._num_bytes, self._file_bytes)
        return len(content)


def is_pattern(source: str | Path, format: str) -> bool:
    """Return whether a source's name has braces, as patterns of shards have: `part-{0..9}.tar`."""
    name = str(source).lower()
    if name.startswith(("http://", "https://")):
        name = urlsplit(name).path
    is_shards = format == "webdataset" or (format == "auto" and any(n in name for n in _NAMES))
    return is_shards and "{" in name


def pattern_shards(pattern: str | Path, show_progress: bool = False) -> list[Path]:
    """Return the shards that a pattern of braces names, in its order; none if it is a file's name.

    Raises:
        DataError: The pattern is wrong, or shards are missing.
    """
    if isinstance(pattern, str) and is_address(pattern):
        try:
            source_path(pattern).source.close()
        except DataError:
            return [*pattern_paths(pattern, show_progress)]
        return []
    if os.path.exists(pattern):
        return []
    names = expand(str(pattern))
    check_none_missing([name for name in names if not os.path.isfile(name)])
    return [Path(name) for name in names]


def _array(where: str, content: bytes) -> Any:
    file = io.BytesIO(content)
    # A malformed file can raise any exception.
    with DataError.on(where, "must be a readable npy file", Exception, remedy=DAMAGED):
        array = read_npy(where, file, len(content), partial(_refuse_objects, where))
    return array if array.ndim else array[()]


def _refuse_objects(where: str, content: bytes) -> NoReturn:
    raise DataError(
        where,
        "must not be Python objects",
        "object",
        "write numbers, or a JSON file in place of it",
    )


def _shards(path: Path) -> list[Path]:
    if not path.is_dir():
        is_named = path.name.lower().endswith(_NAMES)
        head = first_bytes(path, TAR_AT + len(TAR))
        return [path] if is_named or is_tar(head) else []
    return [file for file in sorted(path.iterdir()) if file.name.lower().endswith(_NAMES)]
