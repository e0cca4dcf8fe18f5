"""Ingest of other formats into the on-disk data set, with one reader per format."""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypedDict

from tqdm import tqdm
from typing_extensions import Unpack  # typing's from Python 3.11 on; pydantic needs it as well

import deepspeed_gear.arguments as arguments
from deepspeed_gear.config.schedules import imported
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import SCHEMA_FILE, check_no_pointer, described_folder
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.data.ingest.column_options import OutputColumns
from deepspeed_gear.data.ingest.d3rlpy import D3rlpyReader
from deepspeed_gear.data.ingest.episode_numbers import EpisodeNumbers
from deepspeed_gear.data.ingest.exported import ExportedReader
from deepspeed_gear.data.ingest.group_scope import GroupNumbers
from deepspeed_gear.data.ingest.hdf5 import D4rlReader, RobomimicReader
from deepspeed_gear.data.ingest.lerobot import LerobotReader
from deepspeed_gear.data.ingest.minari import MinariReader
from deepspeed_gear.data.ingest.npz import NpzReader, OgbenchReader, PickleReader
from deepspeed_gear.data.ingest.reader import ColumnSelection, Reader, hdf5_members
from deepspeed_gear.data.ingest.rlds import RldsReader
from deepspeed_gear.data.ingest.rllib import RllibReader
from deepspeed_gear.data.ingest.side_by_side import ReadBlock, SideBySide, without_surplus
from deepspeed_gear.data.ingest.source_checks import (
    MAX_EXPANSION,
    Expansion,
    check_source,
    files_in,
    first_bytes,
)
from deepspeed_gear.data.ingest.tables import TableReader
from deepspeed_gear.data.ingest.text_numbers import TEXTS, TextNumbers
from deepspeed_gear.data.ingest.webdataset import WebdatasetReader, is_pattern, pattern_shards
from deepspeed_gear.data.ingest.zarr import ZarrReader
from deepspeed_gear.data.partial_folder import check_destination
from deepspeed_gear.data.sources import check_local, is_address, source_path
from deepspeed_gear.data.sources.remote_path import RemotePath
from deepspeed_gear.errors import ConfigError, DataError, near_name, undo_on_error
from deepspeed_gear.schema import SOURCE, Column, Schema

# In the order in which "auto" tries them: a layout that others would recognise too comes first.
_CLASSES: tuple[type[Reader], ...] = (
    ExportedReader,
    D3rlpyReader,
    D4rlReader,
    MinariReader,
    RobomimicReader,
    LerobotReader,
    RldsReader,
    ZarrReader,
    OgbenchReader,
    NpzReader,
    PickleReader,
    RllibReader,
    WebdatasetReader,
    TableReader,
)
_MOST_FILES = 64  # of a folder that are looked at where its layout is unknown
READERS = {reader.format: reader for reader in _CLASSES}
_CHECK = "check the path and its permissions"
_NAMING = ("rename", "role")  # options of columns that a reader may apply before


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
    select = ColumnSelection(columns)
    expansion = Expansion(max_expansion)
    if is_pattern(path, format) and (shards := pattern_shards(path, show_progress)):
        return _open_shards(path, shards, select, expansion, options)
    if isinstance(path, str) and is_address(path):
        source = source_path(path, show_progress)
        with undo_on_error(source.source.close):
            return _open_path(source, format, select, expansion, options)
    return _open_path(arguments.folder("source", path), format, select, expansion, options)


def _open_path(
    path: Path,
    format: str,
    select: ColumnSelection,
    expansion: Expansion,
    options: Mapping[str, Any],
) -> Reader:
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
        check_source(path, expansion)
        kind = _recognised(path) if format == "auto" else _reader_class(format)
    return _opened(kind(path, select, expansion, _given(str(path), kind, options)))


def _open_shards(
    pattern: str | Path,
    shards: Sequence[Path],
    select: ColumnSelection,
    expansion: Expansion,
    options: Mapping[str, Any],
) -> Reader:
    """Open the shards of a pattern as one source."""
    path = Path(pattern)
    with ExitStack() as stack:
        if isinstance(shards[0], RemotePath):
            path = RemotePath(shards[0].source, "")
            stack.callback(shards[0].source.close)
        for shard in shards:
            with DataError.on(str(shard), "must be readable", OSError, remedy=_CHECK):
                check_source(shard, expansion)
        given = _given(str(path), WebdatasetReader, options)
        reader = WebdatasetReader(path, select, expansion, {**given, "shards": shards})
        stack.pop_all()
        return _opened(reader)


def open_rows(
    rows: Any,
    columns: Sequence[str] | None = None,
    max_expansion: float = MAX_EXPANSION,
    **options: Any,
) -> Reader:
    """Open the rows of a program (see `Dataset.from_iterable`); arguments as in `open_source`."""
    select = ColumnSelection(columns)
    expansion = Expansion(max_expansion)
    name = type(rows).__name__
    if isinstance(rows, (str, os.PathLike)):
        raise DataError(
            "rows", "must be rows of a program", name, "open_source reads a file or folder"
        )
    given = _given(name, TableReader, options)
    held = list(rows) if isinstance(rows, Iterator) and "schema" not in given else rows
    return _opened(TableReader(Path(name), select, expansion, {**given, "rows": held}))


def _given(where: str, kind: type[Reader], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None; raise for an option that the format lacks."""
    given = {name: value for name, value in options.items() if value is not None}
    for name in given.keys() - {*kind.takes, *_NAMING}:
        having = [reader.format for reader in READERS.values() if name in reader.takes]
        if not having:
            raise TypeError(f"open_source() got an unexpected keyword argument '{name}'")
        option = f"--{name.replace('_', '-')}"
        raise DataError(
            f"{where}: {option}",
            f"must be for the format {' or '.join(having)}",
            kind.format,
            "leave it out for this format",
        )
    return given


def _opened(reader: Reader) -> Reader:
    with undo_on_error(reader.files.close):
        if isinstance(reader.path, RemotePath):
            source = reader.path.source
            reader.files.callback(source.close)
            reader.description.update(url=source.url, revision=source.revision)
        reader.open()
        reader.select.check_used(reader.path)
        if reader.select.left_out:
            left_out = ", ".join(reader.select.left_out)
            reader.notes.append(f"left out, as --columns does not name them: {left_out}")
    return reader


def _recognised(path: Path) -> type[Reader]:
    """Return the reader whose layout a source has; DataError if there is none."""
    kind = next((reader for reader in READERS.values() if reader.recognises(path)), None)
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
    kind = next((reader for reader in READERS.values() if reader.recognises(file)), None)
    is_json = kind is TableReader and file.suffix == ".json"
    return kind is not None and (not is_json or first_bytes(file, 64).lstrip()[:1] == b"[")


def _reader_class(format: str) -> type[Reader]:
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


def _content(path: Path) -> str:
    import h5py

    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        return f"a folder with {', '.join(names[:8]) or 'nothing'}"
    if not h5py.is_hdf5(path):
        return f"a file that is neither HDF5 nor a table, {path.name}"
    return f"HDF5 with {', '.join(sorted(hdf5_members(path))[:8]) or 'nothing'}"


class Options(TypedDict, total=False):
    """Changes of the columns of all sources, and permissions for sources that would be refused.

    Args:
        dtype: Stored dtype by column or shell pattern: {"observation": "float32"}. Values must fit.
        rename: New name by the reader's, or by the source's own where the new one has a meaning:
            {"state": "observation"}. `dtype` and `role` use the new names, `columns` the reader's.
        role: Role by column or shell pattern: {"score": "reward"}.
        reward: Rule for sources without a column of role reward: "none" (no such column, no
            returns), "last=1.0" (that value at the last step, 0 before) or "each=-1" (at every
            step). It must be given unless the source has rewards, or tokens.
        allow_nan: Allow NaN and infinities in every floating column, and record it in the schema.
        split_by_flags: Divide episodes after each step with an end flag, as `DatasetWriter.add`
            does. An episode that is truncated inside is refused where it has columns of T+1 rows:
            its last state is unknown.
        compress: Columns to store compressed, as in `DatasetWriter`.
        group_scope: What equal group numbers (`prompt_id`) in several files mean: "file", different
            groups, which get different numbers; "all", the same group. It must be given where
            numbers repeat over files.
        threads: Threads that write, as in `DatasetWriter`, and sources that are read at the same
            time, ahead of the one that is written. With 1, nothing is read ahead. The data set does
            not depend on the number.
    """

    dtype: Mapping[str, str]
    rename: Mapping[str, str]
    role: Mapping[str, str]
    reward: str | None
    allow_nan: bool
    split_by_flags: bool
    compress: Sequence[str] | None
    group_scope: str | None
    threads: int | None


def ingest(
    sources: Sequence[str | Path | Reader] | str | Path | Reader,
    dest: str | Path,
    *,
    format: str = "auto",
    split: Mapping[str, float] | None = None,
    columns: Sequence[str] | None = None,
    overwrite: bool = False,
    append: bool = False,
    progress: bool = False,
    **options: Unpack[Options],
) -> Dataset:
    """Convert one or more sources into a data set.

    Ids are the indices of the episodes: first those of the first source, then those of the second.
    With several sources the per-trajectory column `source` holds the number of an episode's source.
    Equal sources give equal bytes.

    Args:
        sources: Files, folders or addresses with the same columns; or readers from `open_source`,
            for its other options. Readers are closed.
        dest: The folder to create.
        format: Format of all sources; "auto" detects it for each by its content.
        split: Share of each held-out part by name; the statistics are those of the rest.
        columns: Patterns of optional columns to keep; None keeps all.
        overwrite: Replace a data set at `dest`.
        append: Add to the data set at `dest`, as if these sources had been ingested after its own:
            the result has the same columns, statistics and fingerprint. It takes the place of the
            old one in one rename.
        progress: Show bytes, rate, time left and notes on stderr.
        **options: Changes of columns, and permissions: see `Options`.
    Raises:
        DataError: A source is malformed or differs from the first, or `dest` cannot be written;
            `dest` is not created, or not changed.
    Cost: two passes over the sources' observations, one over the rest; memory for one episode and a
    few blocks, and with threads for 256 MiB of episodes that are read ahead. Of npz files and
    pickles, the largest ones that are read at the same time and 1 GiB of others are in memory as a
    whole. With `append` also a copy of the existing data, and the statistics of all.
    """
    for name in options.keys() - Options.__annotations__.keys():
        raise TypeError(f"ingest() got an unexpected keyword argument '{name}'")
    check_local("dest", dest)
    dest = arguments.folder("dest", dest)
    if not sources and not isinstance(sources, str):
        raise DataError(
            "sources",
            "must name at least one file or folder",
            remedy="name the files or folders to read",
        )
    sources = [sources] if isinstance(sources, (str, os.PathLike, Reader)) else sources
    if (columns is not None or format != "auto") and any(
        isinstance(one, Reader) for one in sources
    ):
        raise ConfigError(
            "columns and format",
            "must be given to open_source, which has opened a source",
            remedy="give them to open_source(..., columns=..., format=...)",
        )
    check_destination(dest, overwrite or append)
    known = Dataset.open(dest) if append else None
    with ExitStack() as stack:
        naming: dict[str, Any] = {name: options.get(name) for name in _NAMING}
        opened = (
            s
            if isinstance(s, Reader)
            else open_source(s, format, columns, show_progress=progress, **naming)
            for s in sources
        )
        readers = [stack.enter_context(reader) for reader in without_surplus(opened)]
        outputs = [OutputColumns(reader, options) for reader in readers]
        schema = _common_schema(outputs, known)
        if options.get("allow_nan"):
            schema = schema.allowing_nan()
        groups = GroupNumbers(options.get("group_scope"), outputs, known)
        texts = TextNumbers(outputs, known)
        numbers = EpisodeNumbers(outputs, known)
        for output in outputs[known is None :]:  # the first source of all counts as it likes
            output.reader.notes.extend(
                f"{name} counts anew in each source: the column source distinguishes equal numbers"
                for name in output.reader.counted
                if not numbers.has(output, name)
            )
        if progress:
            for reader in readers:
                for note in (f"read as format {reader.format}", *reader.notes):
                    print(f"{reader.path}: {note}", file=sys.stderr)
        # The lists of notes are shared, so that notes of groups, which are known at the end only,
        # are recorded as well.
        source: dict[str, Any] = {
            "sources": [{**reader.description, "notes": reader.notes} for reader in readers]
        }
        changes = {
            name: options.get(name) for name in ("dtype", "rename", "role", "reward", "group_scope")
        }
        if changed := {name: value for name, value in changes.items() if value}:
            source["options"] = changed
        if texts.texts:
            source[TEXTS] = texts.texts
        bar = stack.enter_context(_progress_bar(readers, schema, progress))
        num_steps = 0
        divides = bool(options.get("split_by_flags"))
        with DatasetWriter(
            dest,
            schema,
            split=split,
            overwrite=overwrite,
            append=append,
            source=source,
            compress=options.get("compress"),
            threads=options.get("threads"),
        ) as writer:
            side_by_side = stack.enter_context(
                SideBySide(outputs, options.get("threads"), _may_read_ahead)
            )
            for index, output in enumerate(outputs):
                blocks = side_by_side.blocks(index)
                if groups.has(output) or texts.has(output) or numbers.has_any(output):
                    blocks = _renumbered(blocks, output, groups, texts, numbers)
                for block, _ in blocks:
                    if SOURCE.name in schema and SOURCE.name not in block.arrays:
                        block = block.with_number(SOURCE, writer.num_sources_before + index)
                    writer.add_block(block, split_by_flags=divides)
                    steps = int(block.lengths.sum())
                    num_steps += steps
                    bar.set_postfix_str(f"{num_steps:,} steps", refresh=False)
                    bar.update(steps * schema.row_bytes)
                output.reader.release()
            for note in (*groups.notes(), *numbers.notes()):
                readers[-1].notes.append(note)
                if progress:
                    bar.write(f"{readers[-1].path}: {note}", file=sys.stderr)
            for reader in readers if progress else ():
                if isinstance(reader.path, RemotePath):
                    bar.write(f"{reader.path}: {reader.path.source.traffic}", file=sys.stderr)
            return writer.close()


def _renumbered(
    blocks: Iterable[ReadBlock],
    output: OutputColumns,
    groups: GroupNumbers,
    texts: TextNumbers,
    numbers: EpisodeNumbers,
) -> Iterator[ReadBlock]:
    """Yield the episodes one by one, with the numbers of the data set in place of the source's."""
    for block, file in blocks:
        for one in block.divided():
            name = one.name_of(0)
            groups.set_in(output, name, file, one.arrays)
            texts.set_in(output, name, one.arrays)
            numbers.set_in(output, name, one.arrays)
            yield ReadBlock(one, file)


def _may_read_ahead(reader: Reader) -> bool:
    """Return whether a thread may read a source: never by a class from outside."""
    return reader.reads_ahead and type(reader) in _CLASSES


def _progress_bar(readers: Sequence[Reader], schema: Schema, is_shown: bool) -> tqdm[Any]:
    """Return a bar of the bytes of steps, with the time left where all readers know their steps."""
    is_known = all(reader.num_steps for reader in readers)
    total = sum(reader.num_steps for reader in readers) * schema.row_bytes if is_known else None
    return tqdm(
        total=total,
        desc="ingest",
        unit="B",
        unit_scale=True,
        disable=not is_shown,
        dynamic_ncols=True,
    )


def ingest_rows(
    rows: Any, dest: str | Path, schema: Schema | None, options: Mapping[str, Any]
) -> Dataset:
    """Convert the rows of a program into a data set; see `Dataset.from_iterable`."""
    of_ingest = {"split", "overwrite", "append", "progress", *Options.__annotations__}
    of_reader = {name: v for name, v in options.items() if name not in of_ingest - {*_NAMING}}
    written: dict[str, Any] = {name: value for name, value in options.items() if name in of_ingest}
    if schema is not None:
        arguments.one_of("schema", schema, Schema, "a Schema")
    return ingest([open_rows(rows, schema=schema, **of_reader)], dest, **written)


def _common_schema(outputs: Sequence[OutputColumns], known: Dataset | None) -> Schema:
    """Return the schema of all sources; DataError for a column in which two differ."""
    first, *others = outputs
    pairs = [(first.reader.path, first.columns, other) for other in others]
    if known is not None:
        pairs.append((known.path, tuple(c for c in known.schema if c != SOURCE), first))
    for path, columns, other in pairs:
        here, there = ({c.name: _without_bounds(c) for c in of} for of in (columns, other.columns))
        for name in {**here, **there}:
            if here.get(name) != there.get(name):
                raise DataError(
                    f"{other.reader.path}: column {name}",
                    f"must be as in {path}, {_describe(here.get(name))}",
                    _describe(there.get(name)),
                    "choose the common columns with --columns, or make a data set of each",
                )
    has_several = known is not None or len(outputs) > 1
    if has_several and any(c.name == SOURCE.name for c in first.columns):
        raise DataError(
            f"{first.reader.path}: {SOURCE.name}",
            "must not have the name of a derived column",
            None,
            "leave it out with --columns, or give it another name with --rename",
        )
    given = [c for output in outputs for c in output.columns] if known is None else [*known.schema]
    ordered = first.columns if known is None else [c for c in known.schema if c != SOURCE]
    widest = [
        max((c for c in given if c.name == one.name), key=lambda c: c.max_bytes) for one in ordered
    ]
    return Schema([*widest, *((SOURCE,) if has_several else ())])


def _without_bounds(column: Column) -> Column:
    """Return a column without the options in which sources may differ.

    These are `allow_nan` and the size of the longest opaque value.
    """
    if column.is_opaque:
        return Column(column.name, column.dtype, rows="1", max_bytes=1)
    return replace(column, allow_nan=False)


def _describe(column: Column | None) -> str:
    if column is None:
        return "absent"
    return f"{column.dtype}{list(column.shape)} with rows {column.rows}"


def ingested(path: str | Path) -> Dataset:
    """Open a data set, or ingest a file of a known format beside itself once and open that.

    The data set is a hidden folder named by the file's size and time of change, so a file that has
    changed is ingested again. Other processes wait for the first one, where the file system has
    locks.

    Raises:
        DataError: As `ingest`, or the folder cannot be written.
    """
    check_local("a data set", path)
    source = Path(path)
    if not source.is_file():
        return Dataset.open(path)
    remedy = f"gear ingest {source} FOLDER, and name that folder"
    writable = DataError.on(
        str(source), "must lie in a folder that can be written", OSError, remedy=remedy
    )
    facts = source.stat()
    key = hashlib.sha256(f"{facts.st_size} {facts.st_mtime_ns}".encode()).hexdigest()[:12]
    dest = source.with_name(f".{source.name}.gear-{key}")
    if not (dest / SCHEMA_FILE).is_file():
        # The lock has a file of its own: NFS grants it only on one that is open for writing.
        with writable, source.with_name(f".{source.name}.gear-lock").open("a") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if not (dest / SCHEMA_FILE).is_file():
                ingest([source], dest, overwrite=True)  # of a process that began without a lock
    return Dataset.open(dest)
