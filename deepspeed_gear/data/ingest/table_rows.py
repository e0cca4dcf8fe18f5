"""Rows of tables in blocks: Parquet, Arrow and JSON files, and tables and iterables of a program.

A block is a mapping from a dotted column name to the values of its rows: an array [n, ...] where all rows
have one shape, or a list of n values. Structs and nested objects are divided, unless they are to stay.
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
from deepspeed_gear.data.ingest.source_checks import (
    DAMAGED,
    FLOOR_BYTES,
    Expansion,
    check_no_pointer,
    pyarrow_for,
)
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.errors import DataError

Block = dict[str, Any]
_FIRST_ROWS, _BLOCK_ROWS = 16, 1024  # the first block is read to recognise a table
_BLOCK_BYTES = 16 << 20
_MOST_COLUMNS = 4096
_SUFFIXES = {  # of files, without that of a compression
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc", ".arrows"), "arrow"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
}
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_PARQUET, _ARROW_FILE = b"PAR1", b"ARROW1\0\0"
_MINARI_FIELDS = ("observations", "actions", "rewards", "terminations", "truncations", "infos")


def table_form(path: Path) -> str | None:
    """Return "parquet", "arrow" or "json" by the name of a file; None for others."""
    stem = path.with_suffix("") if path.suffix in _COMPRESSED else path
    form = _SUFFIXES.get(stem.suffix.lower())
    return form if stem is path or form == "json" else None


def table_files(path: Path) -> list[Path]:
    """Return a file of a table, or those of a folder in the order of their names; of one form only."""
    if not path.is_dir():
        return [path] if table_form(path) else []
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and table_form(file)]
    forms = {form for form in map(table_form, files) if form != "json"}
    lines = [file for file in files if ".json" not in file.suffixes]  # beside data, .json describes them
    if len(forms) > 1:
        rule, remedy = "must hold tables of one form", "give the files of one of them"
        raise DataError(str(path), rule, ", ".join(sorted(filter(None, forms))), remedy)
    return [file for file in lines if not forms or table_form(file) in forms]


def file_blocks(files: list[Path], expansion: Expansion, is_nested: bool) -> Iterator[Block]:
    """Yield the blocks of files; `is_nested`: structs and objects stay as they are."""
    for file in files:
        if table_form(file) == "json":
            yield from row_blocks(_json_rows(file, expansion), str(file), is_nested)
            continue
        with readable(file):
            for batch in record_batches(file, expansion)[1]:
                yield arrow_block(batch, is_nested)


def object_blocks(source: Any, where: str, is_nested: bool) -> Iterator[Block]:
    """Yield the blocks of a table of Minari, pandas or HF datasets, known by its methods, or of mappings."""
    if hasattr(source, "iterate_episodes"):
        rows = ({name: getattr(one, name) for name in _MINARI_FIELDS} for one in source.iterate_episodes())
        filled = ({name: of for name, of in row.items() if of is not None and len(of)} for row in rows)
        yield from row_blocks(filled, where, is_nested)
    elif hasattr(source, "iloc"):
        arrays = {str(name): source[name].to_numpy() for name in source.columns}
        yield {name: rows.tolist() if rows.dtype == object else rows for name, rows in arrays.items()}
    elif hasattr(source, "with_format") and hasattr(source, "features"):
        pyarrow_for(where)
        for table in source.with_format("arrow").iter(batch_size=_BLOCK_ROWS):
            for batch in table.combine_chunks().to_batches():
                yield arrow_block(batch, is_nested)
    else:
        yield from row_blocks(source, where, is_nested)


def row_blocks(rows: Iterable[Any], where: str, is_nested: bool) -> Iterator[Block]:
    """Yield blocks of mappings; a row that lacks a name of its block has the value None."""
    numbered, size = enumerate(rows), _FIRST_ROWS
    while block := list(islice(numbered, size)):
        size = _BLOCK_ROWS
        flat = []
        for number, row in block:
            at = f"{where}: row {number}"
            if not isinstance(row, Mapping):
                raise DataError(at, "must be a mapping by column", type(row).__name__)
            firsts = {n: v[0] if isinstance(v, list) and v else v for n, v in row.items()}
            whole = {n for n, first in firsts.items() if is_nested or not isinstance(first, (Mapping, tuple))}
            flat.append(flatten(at, dict(row), whole))
        names = dict.fromkeys(chain.from_iterable(flat))
        if len(names) > _MOST_COLUMNS:
            rule = f"must have at most {_MOST_COLUMNS} columns"
            raise DataError(f"{where}: row {block[0][0]} and the next", rule, len(names))
        yield {name: [row.get(name) for row in flat] for name in names}


def _json_rows(path: Path, expansion: Expansion) -> Iterator[Any]:
    """Yield the objects of JSON lines, or of one array."""
    file_bytes, num_bytes, number = path.stat().st_size, 0, 0
    rule = "must hold a JSON object per line, or an array of objects"
    with DataError.on(str(path), "must be readable", OSError, remedy=DAMAGED), _opened(path) as file:
        while line := file.readline(FLOOR_BYTES):
            number += 1
            where = f"{path}: line {number}"
            is_array = number == 1 and line.lstrip()[:1] == b"["
            line += file.read(FLOOR_BYTES) if is_array else b""
            num_bytes += len(line)
            expansion.check(str(path), num_bytes, file_bytes)
            if len(line) >= FLOOR_BYTES:
                most, remedy = f"must have less than {FLOOR_BYTES} bytes", "write an object per line"
                raise DataError(where, most, None, remedy)
            with DataError.on(where, rule, ValueError, remedy="correct the line"):
                found = parse_json(line) if line.strip() else []
            yield from found if is_array or not line.strip() else [found]


def _opened(path: Path) -> Any:
    check_no_pointer(path)
    if path.suffix not in _COMPRESSED:
        return path.open("rb")
    return io.BufferedReader(pyarrow_for(str(path)).input_stream(str(path), compression="detect"))


def record_batches(
    path: Path, expansion: Expansion, choose: Callable[[list[str]], list[str]] | None = None
) -> tuple[Any, Iterator[Any]]:
    """Return the schema of a file, and its record batches: valid, and not too large for the file.

    Sizes that the file states are checked before anything is decompressed. Parquet is read in small batches,
    as a value that is repeated takes no bytes there.
    `choose` returns the columns of Parquet to read, of those that there are.
    """
    check_no_pointer(path)
    arrow, file_bytes = pyarrow_for(str(path)), path.stat().st_size
    source = arrow.memory_map(str(path))
    head = source.read(len(_ARROW_FILE))
    if table_form(path) != "arrow" or head.startswith(_PARQUET):
        file = arrow.parquet.ParquetFile(source)
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        stated = sum(max(0, group.total_byte_size) for group in groups)
        expansion.check(str(path), stated, file_bytes)
        rows = _BLOCK_BYTES // max(1, stated // max(1, file.metadata.num_rows))
        columns = choose(file.schema_arrow.names) if choose else None
        schema = file.schema_arrow
        batches = file.iter_batches(min(max(2, rows), _BLOCK_ROWS), columns=columns)
    else:
        is_file = head == _ARROW_FILE
        source.seek(len(_ARROW_FILE) if is_file else 0)
        messages = arrow.ipc.MessageReader.open_stream(source)
        kinds = ("record batch", "dictionary")
        stated = sum(decompressed_bytes(message) or 0 for message in messages if message.type in kinds)
        expansion.check(str(path), stated, file_bytes)
        source.seek(0)
        file = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        schema, batches = file.schema, file
        if is_file:
            batches = map(file.get_batch, range(file.num_record_batches))

    def checked() -> Iterator[Any]:
        num_bytes = 0
        for batch in batches:
            num_bytes += batch.nbytes
            expansion.check(str(path), num_bytes, file_bytes)
            batch.validate(full=True)
            yield batch

    return schema, checked()


def read_table(
    path: Path, expansion: Expansion, choose: Callable[[list[str]], list[str]] | None = None
) -> Any:
    """Read a file whole, as a pyarrow.Table; arguments as of `record_batches`. DataError: it is damaged."""
    with readable(path):
        schema, batches = record_batches(path, expansion, choose)
        read = list(batches)
        return pyarrow_for(str(path)).Table.from_batches(read, read[0].schema if read else schema)


def readable(path: Path) -> AbstractContextManager[None]:
    """Raise errors of pyarrow and of the file system as DataErrors of a file."""
    kinds, form = (pyarrow_for(str(path)).ArrowException, OSError), table_form(path)
    return DataError.on(str(path), f"must be a readable {form} file", *kinds, remedy=DAMAGED)


def arrow_block(batch: Any, is_nested: bool) -> Block:
    """Return the columns of a record batch; lists as arrays where all rows have one shape."""
    arrow, block = pyarrow_for("batch"), {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        if is_nested and "struct<" in str(field.type):
            block[field.name] = column.to_pylist()
        else:
            block.update(_leaves(arrow, field.name, column))
    return block


def _leaves(arrow: Any, name: str, array: Any) -> Block:
    """Return the values of a column, or those of its fields by dotted name."""
    kind, types = array.type, arrow.types
    if isinstance(kind, arrow.FixedShapeTensorType) and not array.null_count:
        return {name: array.to_numpy_ndarray()}
    if isinstance(kind, arrow.BaseExtensionType):
        return _leaves(arrow, name, array.storage)
    if types.is_dictionary(kind):
        return _leaves(arrow, name, array.dictionary_decode())
    if types.is_struct(kind):
        divided: Block = {}
        for field, one in zip(kind, array.flatten(), strict=True):
            divided.update(_leaves(arrow, f"{name}.{field.name}", one))
        return divided
    if array.null_count:
        return {name: array.to_pylist()}
    if types.is_list(kind) or types.is_large_list(kind):
        offsets = np.asarray(array.offsets)
        values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    elif types.is_fixed_size_list(kind):
        offsets, values = np.arange(len(array) + 1) * kind.list_size, array.flatten()
    else:
        is_number = types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind)
        return {name: array.to_numpy(zero_copy_only=False) if is_number else array.to_pylist()}
    return {key: _nested(rows, offsets - offsets[0]) for key, rows in _leaves(arrow, name, values).items()}


def _nested(values: Any, offsets: np.ndarray) -> Any:
    """Return the rows of a list column: of [0, 2, 4] an array [2, 2, ...], of [0, 1, 4] two views."""
    lengths = np.diff(offsets)
    if isinstance(values, np.ndarray) and len(lengths) and (lengths == lengths[0]).all():
        return values.reshape(len(lengths), lengths[0], *values.shape[1:])
    return [values[low:high] for low, high in pairwise(offsets.tolist())]


def numeric(value: Any) -> np.ndarray | None:
    """Return numbers as an array; None for other values, and for lists whose inner lengths differ."""
    try:
        array = np.asarray(value) if _is_numeric(value) or hasattr(value, "__array__") else None
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return array if array is not None and array.dtype.kind in "biuf" else None


def _is_numeric(value: Any) -> bool:
    """Return whether all leaves are numbers: NumPy would make texts of a list that holds one."""
    if not isinstance(value, (list, tuple)):
        return isinstance(value, (bool, int, float, np.generic, np.ndarray))
    return set(map(type, value)) <= {bool, int, float} or all(map(_is_numeric, value))


def plain(where: str, value: Any) -> Any:
    """Return a value with arrays as lists, as JSON holds it; a DataError if it is nested too deeply."""
    with DataError.on(where, "must not be nested too deeply", RecursionError, remedy=""):
        return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value
