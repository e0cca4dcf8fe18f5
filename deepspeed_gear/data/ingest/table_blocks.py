"""Blocks of table rows: from Parquet, Arrow, CSV and JSON files, and from a program's tables.

A block maps a dotted column name to the values of its rows: an array [n, ...] where all rows have
one shape, or a list of n values. Structs and nested objects are divided into columns, unless they
are to stay.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.data.arrow_messages import decompressed_bytes
from deepspeed_gear.data.dataset_files import check_no_pointer
from deepspeed_gear.data.ingest.decoding.arrow_sizes import ROW_BYTES, ArrowSizes
from deepspeed_gear.data.ingest.decoding.parquet_pages import column_pages, value_width
from deepspeed_gear.data.ingest.source_checks import (
    DAMAGED,
    FLOOR_BYTES,
    Expansion,
    optional,
    pyarrow_for,
)
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.sources.opened_files import arrow_file, file_content
from deepspeed_gear.data.sources.remote_path import RemotePath
from deepspeed_gear.errors import DataError

Block = dict[str, Any]
_FIRST_ROWS = 16  # of the first block, which is read to recognise a table
BLOCK_ROWS = 1024
BLOCK_BYTES = 16 << 20
_MOST_COLUMNS = 4096
_JSON_VALUE = 64  # bytes of a JSON value in memory, about
_JSON_OBJECT = 192  # bytes of a JSON object in memory, about
# Errors of pyarrow for values that Python does not have, such as times in the year 10000.
_UNKNOWN = ValueError, TypeError, KeyError, ArithmeticError, NotImplementedError, RecursionError
_OFFSET_BYTES = 4  # of each text in Arrow
_LEVEL_BYTES = 4  # of each value in lists, while it is decoded
_MOST_TYPE = 80  # characters of a type in an error
_SUFFIXES = {  # of files, without that of a compression
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc", ".arrows"), "arrow"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".csv": "csv",
}
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_PARQUET = b"PAR1"
_ARROW_FILE = b"ARROW1\0\0"
_MINARI_FIELDS = ("observations", "actions", "rewards", "terminations", "truncations", "infos")


def table_form(path: Path) -> str | None:
    """Return "parquet", "arrow", "csv" or "json" by the name of a file; None for others."""
    stem = path.with_suffix("") if path.suffix in _COMPRESSED else path
    form = _SUFFIXES.get(stem.suffix.lower())
    return form if stem is path or form in ("csv", "json") else None


def table_files(path: Path) -> list[Path]:
    """Return the file of a table, or the files of a folder sorted by name, all of one form."""
    if not path.is_dir():
        return [path] if table_form(path) else []
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and table_form(file)]
    forms = {form for form in map(table_form, files) if form != "json"}
    forms = forms - {"csv"} or forms  # beside other tables they describe these
    if len(forms) > 1:
        raise DataError(
            str(path),
            "must hold tables of one form",
            ", ".join(sorted(filter(None, forms))),
            "give the files of one of them",
        )
    # In a folder, files named .json describe the data beside them.
    return [
        file
        for file in files
        if ".json" not in file.suffixes and (not forms or table_form(file) in forms)
    ]


def file_blocks(files: list[Path], expansion: Expansion, is_nested: bool) -> Iterator[Block]:
    """Yield the blocks of files; with `is_nested`, structs and objects stay as they are."""
    for file in files:
        if table_form(file) == "json":
            yield from row_blocks(_json_rows(file, expansion), str(file), is_nested)
            continue
        if table_form(file) == "csv":
            yield from _csv_blocks(file, expansion)
            continue
        with readable(file):
            for batch in record_batches(file, expansion, are_objects=_stays if is_nested else None)[
                1
            ]:
                yield arrow_block(batch, is_nested, str(file))


def object_blocks(source: Any, where: str, is_nested: bool) -> Iterator[Block]:
    """Yield the blocks of a program's table or mappings.

    Tables of Minari, pandas and HF datasets are recognised by their methods.
    """
    if hasattr(source, "iterate_episodes"):
        rows = (
            {name: getattr(one, name) for name in _MINARI_FIELDS}
            for one in source.iterate_episodes()
        )
        filled = (
            {name: of for name, of in row.items() if of is not None and len(of)} for row in rows
        )
        yield from row_blocks(filled, where, is_nested)
    elif hasattr(source, "iloc"):
        arrays = {str(name): source[name].to_numpy() for name in source.columns}
        yield {
            name: [*map(_none_if_missing, rows.tolist())] if rows.dtype == object else rows
            for name, rows in arrays.items()
        }
    elif hasattr(source, "with_format") and hasattr(source, "features"):
        pyarrow_for(where)
        for table in source.with_format("arrow").iter(batch_size=BLOCK_ROWS):
            for batch in table.combine_chunks().to_batches():
                yield arrow_block(batch, is_nested, where)
    else:
        yield from row_blocks(source, where, is_nested)


def _none_if_missing(value: Any) -> Any:
    """Return None for a missing value of a pandas frame (None, NA, NaT, NaN), else the value."""
    is_missing = type(value).__name__ in ("NAType", "NaTType") or (
        isinstance(value, float) and value != value
    )
    return None if is_missing else value


def row_blocks(rows: Iterable[Any], where: str, is_nested: bool) -> Iterator[Block]:
    """Yield blocks of mappings; a row has None for a name that only others of its block have."""
    numbered = enumerate(rows)
    size = _FIRST_ROWS
    while block := list(islice(numbered, size)):
        size = BLOCK_ROWS
        flat = []
        for number, row in block:
            at = f"{where}: row {number}"
            if not isinstance(row, Mapping):
                raise DataError(
                    at, "must be a mapping by column", type(row).__name__, "give each row as a dict"
                )
            firsts = {n: v[0] if isinstance(v, list) and v else v for n, v in row.items()}
            whole = {
                n
                for n, first in firsts.items()
                if is_nested or not isinstance(first, (Mapping, tuple))
            }
            flat.append(flatten(at, dict(row), whole))
        names = dict.fromkeys(chain.from_iterable(flat))
        if len(names) > _MOST_COLUMNS:
            raise DataError(
                f"{where}: row {block[0][0]} and the next",
                f"must have at most {_MOST_COLUMNS} columns",
                len(names),
                "store vectors as one column of lists, not as one column for each element",
            )
        yield {name: [row.get(name) for row in flat] for name in names}


def _csv_blocks(path: Path, expansion: Expansion) -> Iterator[Block]:
    """Yield the blocks of a CSV file with names in its first line.

    Values are numbers, true or false, or texts, by the first block of the file. Empty fields of
    numbers are nulls.
    """
    csv = optional(str(path), "must be read with pyarrow", "pyarrow", "pyarrow.csv")
    file_bytes = path.stat().st_size
    num_bytes = 0
    options = csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    with readable(path), _opened(path) as file:
        reader = csv.open_csv(file, read_options=options)
        names = reader.schema.names
        if len({*names}) < len(names) or "" in names:
            raise DataError(
                str(path),
                "must have a different name for each column in its first line",
                ", ".join(names),
                "add a line of names",
            )
        for batch in reader:
            num_bytes += batch.nbytes
            expansion.check(str(path), num_bytes, file_bytes)
            yield arrow_block(batch, False, str(path))


def _json_rows(path: Path, expansion: Expansion) -> Iterator[Any]:
    """Yield the objects of JSON lines, or of one array."""
    file_bytes = path.stat().st_size
    num_bytes = 0
    number = 0
    rule = "must hold a JSON object per line, or an array of objects"
    with (
        DataError.on(str(path), "must be readable", OSError, remedy=DAMAGED),
        _opened(path) as file,
    ):
        while line := file.readline(FLOOR_BYTES):
            number += 1
            where = f"{path}: line {number}"
            is_array = number == 1 and line.lstrip()[:1] == b"["
            line += file.read(FLOOR_BYTES) if is_array else b""
            num_bytes += json_bytes(line)
            expansion.check(str(path), num_bytes, file_bytes)
            if len(line) >= FLOOR_BYTES:
                raise DataError(
                    where,
                    f"must have less than {FLOOR_BYTES} bytes",
                    None,
                    "write an object per line",
                )
            with DataError.on(where, rule, ValueError, remedy="correct the line"):
                rows = parse_json(line) if line.strip() else []
            yield from rows if is_array or not line.strip() else [rows]


def json_bytes(text: bytes) -> int:
    """Return about how many bytes a JSON text and the objects made of it take.

    That is at most 100 per byte of text, so only compressed texts can be too large for their file.
    """
    return (
        len(text)
        + _JSON_VALUE * (text.count(b",") + text.count(b"["))
        + _JSON_OBJECT * text.count(b"{")
    )


def _opened(path: Path) -> Any:
    check_no_pointer(path)
    if path.suffix not in _COMPRESSED:
        return path.open("rb")
    arrow = pyarrow_for(str(path))
    if isinstance(path, RemotePath):
        form = arrow.Codec.detect(path.name).name
        return io.BufferedReader(arrow.CompressedInputStream(arrow_file(arrow, path), form))
    return io.BufferedReader(arrow.input_stream(str(path), compression="detect"))


def record_batches(
    path: Path,
    expansion: Expansion,
    choose: Callable[[list[str]], list[str]] | None = None,
    are_objects: Callable[[Any], bool] | None = None,
) -> tuple[Any, Iterator[Any]]:
    """Return a file's schema, and its record batches, checked and within the bound of its memory.

    The sizes that the file states are checked before anything is decompressed, and those of the
    values that a batch declares before it is converted. Parquet is read in small batches, because a
    repeated value takes no bytes there.

    Args:
        choose: Returns the columns to read from those of a Parquet file.
        are_objects: Returns whether the numbers of a field become Python objects, as texts do,
            rather than an array.
    """
    check_no_pointer(path)
    arrow = pyarrow_for(str(path))
    file_bytes = path.stat().st_size
    source = arrow_file(arrow, path)
    head = source.read(len(_ARROW_FILE))
    if table_form(path) != "arrow" or head.startswith(_PARQUET):
        schema, batches = _parquet_batches(path, expansion, choose)
    else:
        is_file = head == _ARROW_FILE
        source.seek(len(_ARROW_FILE) if is_file else 0)
        messages = arrow.ipc.MessageReader.open_stream(source)
        stated = sum(
            decompressed_bytes(message) or 0
            for message in messages
            if message.type in ("record batch", "dictionary")
        )
        expansion.check(str(path), stated, file_bytes)
        source.seek(0)
        file = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        schema = file.schema
        batches = file
        if is_file:
            batches = map(file.get_batch, range(file.num_record_batches))

    def sizes(where: str, before: int) -> ArrowSizes:
        return ArrowSizes(lambda more: expansion.check(where, before + more, file_bytes))

    def checked() -> Iterator[Any]:
        num_bytes = 0
        for batch in batches:
            num_bytes += batch.num_rows * ROW_BYTES
            expansion.check(f"{path}: {batch.num_rows} rows", num_bytes, file_bytes)
            batch.validate()  # of sizes alone: all values could be many
            for field, column in zip(batch.schema, batch.columns, strict=True):
                where = f"{path}: column {field.name} of {str(field.type)[:_MOST_TYPE]}"
                is_object = are_objects is not None and are_objects(field)
                num_bytes += sizes(where, num_bytes).column_bytes(arrow, column, is_object)
            batch.validate(full=True)
            yield batch

    return schema, checked()


def _parquet_batches(
    path: Path, expansion: Expansion, choose: Callable[[list[str]], list[str]] | None
) -> tuple[Any, Iterator[Any]]:
    """Return the schema of a Parquet file, and batches of bounded size.

    A text that repeats takes its whole size in a batch each time, so a long text in a column's
    dictionary means fewer rows per batch. In lists that sets no bound: where they could be too
    large, their texts stay in dictionaries.
    """
    arrow = pyarrow_for(str(path))
    file_bytes = path.stat().st_size
    file = arrow.parquet.ParquetFile(arrow_file(arrow, path))
    metadata = file.metadata
    names = file.schema_arrow.names
    chosen = choose(names) if choose else names
    most = expansion.most_bytes(file_bytes)
    stated = 0
    rows = BLOCK_ROWS
    in_lists: list[str] = []
    content = file_content(arrow, path)
    for number in range(metadata.num_columns):
        column = metadata.schema.column(number)
        if not any(column.path == name or column.path.startswith(f"{name}.") for name in chosen):
            continue
        where = f"{path}: column {column.path}"
        width = value_width(column)
        longest = 0
        decoded = 0
        least = (width or _OFFSET_BYTES) + (_LEVEL_BYTES if column.max_repetition_level else 0)
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            with DataError.on(where, "must have readable pages", ValueError, remedy=DAMAGED):
                pages = column_pages(arrow, content, group.column(number), width, most)
            stated += max(pages.num_values * least, pages.stored_bytes)
            expansion.check(where, stated, file_bytes)
            longest = max(longest, pages.longest)
            decoded += pages.decoded_bytes
        rows = min(rows, max(1, most // max(1, longest)))
        if not width and decoded > most and column.max_repetition_level:
            in_lists.append(column.path)
    wide = BLOCK_BYTES // max(1, stated // max(1, metadata.num_rows))
    if in_lists:
        file = arrow.parquet.ParquetFile(arrow_file(arrow, path), read_dictionary=in_lists)
    batches = file.iter_batches(min(max(2, wide), rows), columns=chosen if choose else None)
    return file.schema_arrow, batches


def read_table(
    path: Path,
    expansion: Expansion,
    choose: Callable[[list[str]], list[str]] | None = None,
    are_objects: Callable[[Any], bool] | None = None,
) -> Any:
    """Read a whole file as a pyarrow.Table; arguments and errors as in `record_batches`."""
    with readable(path):
        schema, batches = record_batches(path, expansion, choose, are_objects)
        read = list(batches)
        return pyarrow_for(str(path)).Table.from_batches(read, read[0].schema if read else schema)


def readable(path: Path) -> AbstractContextManager[None]:
    """Raise errors of pyarrow and of the file system as DataErrors of a file."""
    kinds = (pyarrow_for(str(path)).ArrowException, OSError)
    form = table_form(path)
    return DataError.on(str(path), f"must be a readable {form} file", *kinds, remedy=DAMAGED)


def arrow_block(batch: Any, is_nested: bool, where: str) -> Block:
    """Convert a record batch; lists become arrays where all rows have one shape."""
    arrow = pyarrow_for("batch")
    block = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        with DataError.on(
            f"{where}: column {field.name}",
            "must hold values that Python can represent",
            *_UNKNOWN,
            remedy="write the file without it",
        ):
            if is_nested and _stays(field):
                block[field.name] = _objects(arrow, column)
            else:
                block.update(_leaves(arrow, field.name, column))
    return block


def _stays(field: Any) -> bool:
    """Return whether `is_nested` leaves a field undivided, because it holds objects."""
    return "struct<" in str(field.type)


def _leaves(arrow: Any, name: str, array: Any) -> Block:
    """Return the values of a column, or of its fields by dotted name."""
    kind = array.type
    types = arrow.types
    if isinstance(kind, arrow.FixedShapeTensorType) and not array.null_count:
        return {name: array.to_numpy_ndarray()}
    if isinstance(kind, arrow.BaseExtensionType):
        return _leaves(arrow, name, array.storage)
    if types.is_dictionary(kind):
        _check_inside(arrow, kind)
        return _leaves(arrow, name, array.dictionary_decode())
    if types.is_struct(kind):
        divided: Block = {}
        for number, field in enumerate(kind):
            inner = f"{name}.{field.name}"
            if array.null_count and _has_no_nulls(arrow, field.type):
                values = zip(
                    _objects(arrow, array.field(number)), array.is_valid().to_pylist(), strict=True
                )
                divided[inner] = [value if is_valid else None for value, is_valid in values]
            else:
                divided.update(_leaves(arrow, inner, arrow.compute.struct_field(array, number)))
        return divided
    if array.null_count:
        return {name: _objects(arrow, array)}
    if types.is_list(kind) or types.is_large_list(kind):
        offsets = np.asarray(array.offsets)
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    elif types.is_fixed_size_list(kind):
        offsets = np.arange(len(array) + 1) * kind.list_size
        values = array.flatten()
    else:
        is_number = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
        return {name: array.to_numpy(zero_copy_only=False) if is_number else _objects(arrow, array)}
    return {
        key: _nested(rows, offsets - offsets[0])
        for key, rows in _leaves(arrow, name, values).items()
    }


def _has_no_nulls(arrow: Any, kind: Any) -> bool:
    """Return whether a type has no validity bitmap of its own.

    For such a field, pyarrow ends the process when the nulls of its struct are added to it.
    """
    while isinstance(kind, arrow.BaseExtensionType):
        kind = kind.storage_type
    return bool(arrow.types.is_union(kind) or arrow.types.is_run_end_encoded(kind))


def _objects(arrow: Any, array: Any) -> list[Any]:
    """Return a column as Python objects."""
    _check_inside(arrow, array.type)
    values: list[Any] = array.to_pylist()
    return values


def _check_inside(arrow: Any, kind: Any) -> None:
    """Raise if a type contains an extension type, for which pyarrow ends the process in places."""
    waiting = [kind]
    while waiting:
        part = waiting.pop()
        if isinstance(part, arrow.BaseExtensionType):
            raise TypeError(f"the extension type {part} inside {str(kind)[:_MOST_TYPE]}")
        waiting += [part.field(i).type for i in range(part.num_fields)]
        waiting += [part.value_type] if arrow.types.is_dictionary(part) else []


def _nested(values: Any, offsets: np.ndarray) -> Any:
    """Return a list column's rows: for offsets [0, 2, 4] an array [2, 2], for [0, 1, 4] views."""
    lengths = np.diff(offsets)
    if isinstance(values, np.ndarray) and len(lengths) and (lengths == lengths[0]).all():
        return values.reshape(len(lengths), lengths[0], *values.shape[1:])
    return [values[low:high] for low, high in pairwise(offsets.tolist())]
