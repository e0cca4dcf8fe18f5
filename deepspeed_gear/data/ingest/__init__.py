"""Ingest: conversion of sources of other formats, on this machine or others, into a data set.

`readers/` has one class per format, `decoding/` turns files into arrays, and the other modules are
shared by the readers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

from tqdm import tqdm
from typing_extensions import Unpack  # typing's from Python 3.11 on; pydantic needs it as well

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import SCHEMA_FILE
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.data.ingest.format_detection import NAMING, open_rows, open_source
from deepspeed_gear.data.ingest.output_columns import OutputColumns
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.readers import READERS
from deepspeed_gear.data.ingest.renumbering import (
    TEXTS,
    EpisodeNumbers,
    GroupNumbers,
    Renumbering,
    TextNumbers,
)
from deepspeed_gear.data.ingest.side_by_side import ReadBlock, SideBySide, without_surplus
from deepspeed_gear.data.partial_folder import check_destination
from deepspeed_gear.data.sources import check_local
from deepspeed_gear.data.sources.remote_path import RemotePath
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.schema import SOURCE, Column, Schema

__all__ = ["READERS", "Options", "ingest", "ingest_rows", "ingested", "open_source"]


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
        naming: dict[str, Any] = {name: options.get(name) for name in NAMING}
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
        episodes = EpisodeNumbers(outputs, known)
        renumberings = (groups, texts, episodes)
        for output in outputs[known is None :]:  # the first source of all counts as it likes
            output.reader.notes.extend(
                f"{name} counts anew in each source: the column source distinguishes equal numbers"
                for name in episodes.left_as_they_are(output)
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
            side_by_side = stack.enter_context(SideBySide(outputs, options.get("threads")))
            for index, output in enumerate(outputs):
                blocks = side_by_side.blocks(index)
                if own := [one for one in renumberings if one.has(output)]:
                    blocks = _renumbered(blocks, output, own)
                for block, _ in blocks:
                    if SOURCE.name in schema and SOURCE.name not in block.arrays:
                        block = block.with_number(SOURCE, writer.num_sources_before + index)
                    writer.add_block(block, split_by_flags=bool(options.get("split_by_flags")))
                    steps = int(block.lengths.sum())
                    num_steps += steps
                    bar.set_postfix_str(f"{num_steps:,} steps", refresh=False)
                    bar.update(steps * schema.row_bytes)
                output.reader.release()
            for note in chain.from_iterable(one.notes() for one in renumberings):
                readers[-1].notes.append(note)
                if progress:
                    bar.write(f"{readers[-1].path}: {note}", file=sys.stderr)
            for reader in readers if progress else ():
                if isinstance(reader.path, RemotePath):
                    bar.write(f"{reader.path}: {reader.path.source.traffic}", file=sys.stderr)
            return writer.close()


def _renumbered(
    blocks: Iterable[ReadBlock], output: OutputColumns, renumberings: Sequence[Renumbering]
) -> Iterator[ReadBlock]:
    """Yield the episodes one by one, with the numbers of the data set in place of the source's."""
    for block, file in blocks:
        for one in block.divided():
            for renumbering in renumberings:
                renumbering.set_in(output, one.name_of(0), file, one.arrays)
            yield ReadBlock(one, file)


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
    of_reader = {name: v for name, v in options.items() if name not in of_ingest - {*NAMING}}
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
