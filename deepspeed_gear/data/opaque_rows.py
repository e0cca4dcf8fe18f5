"""Opaque values, which are byte strings and JSON, as rows of fixed size.

A row is [4 + max_bytes], uint8: the length of the content as a little-endian integer of 4 bytes,
the content, and zeros. With max_bytes = 3, b"hi" is the row [2, 0, 0, 0, 104, 105, 0]. The content
of JSON is UTF-8 text with sorted keys and without spaces, so equal values are equal bytes. A row of
zeros, as in a late column that has not been filled, is b"", or None in a JSON column.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from deepspeed_gear.arguments import parse_json
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import LENGTH_BYTES, Column


def encode(value: Any, column: Column, name: str) -> np.ndarray:
    """Encode a value as a row.

    Args:
        value: For a bytes column: bytes, bytearray, memoryview, or a str, which is stored as UTF-8.
            For a JSON column: None, bool, int, finite float, str, and lists and dicts (with strings
            as keys) of these; tuples are stored as lists. Or a row, as other parts of the package
            pass it on.
        name: Name of the table and column, for errors.
    """
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape == column.shape:
        decode(value, column, name)  # a remote writer is not trusted
        length = int.from_bytes(value[:LENGTH_BYTES].tobytes(), "little")
        if value[LENGTH_BYTES + length :].any():
            raise DataError(
                name, "must have zeros after its value", remedy="add values, not encoded rows"
            )
        return value
    content = json_text(value, name) if column.dtype == "json" else byte_string(value, name)
    if len(content) > column.max_bytes:
        raise DataError(
            name,
            f"must have at most max_bytes = {column.max_bytes} bytes",
            len(content),
            "raise it, or store less",
        )
    row = np.zeros(column.shape, np.uint8)
    content = len(content).to_bytes(LENGTH_BYTES, "little") + content
    row[: len(content)] = np.frombuffer(content, np.uint8)
    return row


def encode_rows(value: Any, column: Column, name: str, num_rows: int) -> np.ndarray:
    """Encode a list, tuple or array of `num_rows` values. [num_rows, 4 + max_bytes], uint8."""
    is_sequence = isinstance(value, (list, tuple)) or (
        isinstance(value, np.ndarray) and value.ndim > 0
    )
    if not is_sequence or len(value) != num_rows:
        given = len(value) if is_sequence else type(value).__name__
        raise DataError(
            name, f"must be a list of {num_rows} values", given, "give one value for each row"
        )
    rows = np.zeros((num_rows, *column.shape), np.uint8)
    for index, one in enumerate(value):
        rows[index] = encode(one, column, name)
    return rows


def decode(row: np.ndarray, column: Column, name: str) -> Any:
    """Return the value of a row; DataError if this column could not have encoded the row."""
    length = int.from_bytes(row[:LENGTH_BYTES].tobytes(), "little")
    if length > column.max_bytes:
        raise DataError(
            name,
            f"must hold a value of at most max_bytes = {column.max_bytes} bytes",
            length,
            "the row is not one that was written to this column",
        )
    content = row[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
    if column.dtype == "bytes":
        return content
    with DataError.on(
        name,
        "must hold JSON",
        ValueError,
        remedy="the row is not one that was written to this column",
    ):
        return parse_json(content) if content else None


def byte_string(value: Any, name: str) -> bytes:
    """Return the bytes of a bytes column's value; DataError if it is none."""
    if isinstance(value, str):
        with DataError.on(
            name,
            "must be a str that UTF-8 can hold",
            UnicodeEncodeError,
            remedy="give bytes, or replace lone surrogates",
        ):
            return value.encode()
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise DataError(
            name, "must be bytes or a str", type(value).__name__, "convert arrays by tobytes()"
        )
    return bytes(value)


def json_text(
    value: Any, name: str, remedy: str = "convert arrays and tensors by tolist()"
) -> bytes:
    """Return the JSON text of a JSON column's value; DataError if it is none."""
    with DataError.on(
        name, "must be a JSON value", TypeError, ValueError, RecursionError, remedy=remedy
    ):
        _check_keys(value, name)
        text = json.dumps(
            value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        )
        return text.encode()


def _check_keys(value: Any, name: str) -> None:
    """Raise if a key is no string, which `json.dumps` would convert silently."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise DataError(
                    name, "must have strings as keys", key, "convert the keys with str()"
                )
            _check_keys(inner, name)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_keys(inner, name)
