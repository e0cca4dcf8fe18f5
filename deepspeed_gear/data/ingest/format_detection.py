"""Opening a source: its format, by name or by its content, and the options of that format."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed_gear.arguments as arguments
from deepspeed_gear.config.schedules import imported
from deepspeed_gear.data.dataset_files import SCHEMA_FILE, check_no_pointer, described_folder
from deepspeed_gear.data.ingest.decoding.hdf5_arrays import hdf5_members
from deepspeed_gear.data.ingest.reader import ColumnSelection, Reader
from deepspeed_gear.data.ingest.readers import READERS
from deepspeed_gear.data.ingest.readers.tables import TableReader
from deepspeed_gear.data.ingest.readers.webdataset import (
    WebdatasetReader,
    is_pattern,
    pattern_shards,
)
from deepspeed_gear.data.ingest.source_checks import (
    MAX_EXPANSION,
    Expansion,
    check_source,
    files_in,
    first_bytes,
)
from deepspeed_gear.data.sources import is_address, source_path
from deepspeed_gear.data.sources.opened_files import is_hdf5
from deepspeed_gear.data.sources.remote_path import RemotePath
from deepspeed_gear.errors import DataError, near_name, undo_on_error

_MOST_FILES = 64  # of a folder that are looked at where its layout is unknown
_CHECK = "check the path and its permissions"
#: Options of columns that a reader may apply before names are judged.
NAMING = ("rename", "role")


def open_source(
    path: str | Path,
    format: str = "auto",
    columns: Sequence[str] | None = None,
    max_expansion: float = MAX_EXPANSION,
    show_progress: bool = False,
    **options: Any,
) -> Reader:
    """Check a source and open it, in the given format or in the one that its content shows.

    Args:
        path: A file or folder, or the address of a remote one: hf://, s3://, gs://, https://. For
            shards of WebDataset also a pattern, `part-{000..012}.tar`.
        format: A key of `READERS`, "module:Class" for a user's reader, or "auto".
        columns: Patterns of optional columns to keep; None keeps all.
        max_expansion: Most bytes of its arrays for each byte of its files, above 256 MiB.
        show_progress: Show the bytes that are fetched of a remote source on stderr.
        **options: Options of the format, `Reader.takes`; None means not given. `rename` and `role`,
            as in `Options`, count for every format, before names are judged.
    """
    opening = _Opening(ColumnSelection(columns), Expansion(max_expansion), options)
    if is_pattern(path, format) and (shards := pattern_shards(path, show_progress)):
        return _open_shards(path, shards, opening)
    if isinstance(path, str) and is_address(path):
        source = source_path(path, show_progress)
        with undo_on_error(source.source.close):
            return _open_path(source, format, opening)
    return _open_path(arguments.folder("source", path), format, opening)


def open_rows(
    rows: Any,
    columns: Sequence[str] | None = None,
    max_expansion: float = MAX_EXPANSION,
    **options: Any,
) -> Reader:
    """Open the rows of a program (see `Dataset.from_iterable`); arguments as in `open_source`."""
    opening = _Opening(ColumnSelection(columns), Expansion(max_expansion), options)
    name = type(rows).__name__
    if isinstance(rows, (str, os.PathLike)):
        raise DataError(
            "rows", "must be rows of a program", name, "open_source reads a file or folder"
        )
    # Without a schema, a table is read twice.
    is_read_twice = options.get("schema") is None
    held = list(rows) if isinstance(rows, Iterator) and is_read_twice else rows
    return opening.open(TableReader, Path(name), rows=held)


@dataclass(frozen=True)
class _Opening:
    """What a source is opened with; `options` are those of its format, None where not given."""

    select: ColumnSelection
    expansion: Expansion
    options: Mapping[str, Any]

    def open(self, kind: type[Reader], path: Path, **source: Any) -> Reader:
        """Return an open reader; DataError for an option that its format lacks.

        Args:
            source: What the reader reads where that is not the file or folder of `path`.
        """
        given = {name: value for name, value in self.options.items() if value is not None}
        for name in given.keys() - {*kind.takes, *NAMING}:
            having = [reader.format for reader in READERS.values() if name in reader.takes]
            if not having:
                raise TypeError(f"open_source() got an unexpected keyword argument '{name}'")
            raise DataError(
                f"{path}: --{name.replace('_', '-')}",
                f"must be for the format {' or '.join(having)}",
                kind.format,
                "leave it out for this format",
            )
        reader = kind(path, self.select, self.expansion, {**given, **source})
        with undo_on_error(reader.files.close):
            if isinstance(path, RemotePath):
                reader.files.callback(path.source.close)
                reader.description.update(url=path.source.url, revision=path.source.revision)
            reader.open()
            reader.select.check_used(path)
            reader.note("left out, as --columns does not name them: {}", reader.select.left_out)
        return reader


def _open_path(path: Path, format: str, opening: _Opening) -> Reader:
    with DataError.on(str(path), "must be readable", OSError, remedy=_CHECK):
        if not path.exists():
            remedy = "check the path of the source"
            if "{" in path.name:
                remedy = (
                    "give the folder, or the name without quotes: the shell expands braces; only "
                    "shards of WebDataset may be named by a pattern"
                )
            raise DataError(str(path), "must exist", None, remedy)
        if (path / SCHEMA_FILE).is_file():
            check_no_pointer(path / SCHEMA_FILE)
            raise DataError(
                str(path), "must not be a data set already", None, "train from it as it is"
            )
        folder = described_folder(path) if format == "auto" else None
        if folder is not None and (path.is_dir() or first_bytes(path, 64).lstrip()[:1] == b"{"):
            raise DataError(
                str(path),
                "must be a source, not what describes one",
                None,
                f"give its folder: {folder}",
            )
        check_source(path, opening.expansion)
        kind = _recognised(path) if format == "auto" else _named(format)
    return opening.open(kind, path)


def _open_shards(pattern: str | Path, shards: Sequence[Path], opening: _Opening) -> Reader:
    """Open the shards of a pattern as one source."""
    path = Path(pattern)
    with ExitStack() as stack:
        if isinstance(shards[0], RemotePath):
            path = RemotePath(shards[0].source, "")
            stack.callback(shards[0].source.close)
        for shard in shards:
            with DataError.on(str(shard), "must be readable", OSError, remedy=_CHECK):
                check_source(shard, opening.expansion)
        reader = opening.open(WebdatasetReader, path, shards=shards)
        stack.pop_all()
        return reader


def _first_that_recognises(path: Path) -> type[Reader] | None:
    return next((reader for reader in READERS.values() if reader.recognises(path)), None)


def _recognised(path: Path) -> type[Reader]:
    """Return the reader whose layout a source has; DataError if there is none."""
    kind = _first_that_recognises(path)
    if kind is not None:
        return kind
    files = list(islice(files_in(path), _MOST_FILES)) if path.is_dir() else []
    for file in files:
        check_no_pointer(file)
    known = [file for file in files if _is_source(file)]
    if known:
        remedy = f"give {'the file in it:' if len(known) == 1 else 'its files, such as'} {known[0]}"
    else:
        remedy = (
            f"known are {', '.join(READERS)}, and module:Class, a class of your own (--format); "
            "docs/how-to/formats.md has what each looks like"
        )
    raise DataError(str(path), "must have a known layout", _content(path), remedy)


def _is_source(file: Path) -> bool:
    """Return whether a file of a folder is a source by itself.

    A file named .json describes the data beside it, unless it holds an array.
    """
    kind = _first_that_recognises(file)
    is_json = kind is TableReader and file.suffix == ".json"
    return kind is not None and (not is_json or first_bytes(file, 64).lstrip()[:1] == b"[")


def _content(path: Path) -> str:
    """Return what a source of no known layout is, for its error."""
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        return f"a folder with {', '.join(names[:8]) or 'nothing'}"
    if not is_hdf5(path):
        return f"a file that is neither HDF5 nor a table, {path.name}"
    return f"HDF5 with {', '.join(sorted(hdf5_members(path))[:8]) or 'nothing'}"


def _named(format: str) -> type[Reader]:
    """Return the reader that `format` names, of the package or "module:Class"."""
    if ":" not in format:
        if format not in READERS:
            remedy = (
                near_name(format, ["auto", *READERS])
                or "docs/how-to/add-an-ingest-format.md adds one"
            )
            raise DataError(
                "format",
                f"must be one of auto, {', '.join(READERS)}, or module:Class",
                format,
                remedy,
            )
        return READERS[format]
    reader: Any = imported(format, "format")
    if not (isinstance(reader, type) and issubclass(reader, Reader)):
        raise DataError(
            "format",
            "must name a subclass of Reader",
            format,
            "derive the class from deepspeed_gear.data.ingest.reader.Reader",
        )
    return reader
