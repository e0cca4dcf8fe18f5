"""Nested columns by dotted names: mappings and tuples, such as gymnasium's observations."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import DataError


def flatten(name: str, given: Mapping[str, Any], names: Set[str]) -> Mapping[str, Any]:
    """Return nested columns by their dotted names; `Batch.tree` is the reverse.

    A value whose name is no column is divided if it is a mapping, a tuple (parts `0`, `1`, ...), or
    a list or array of such objects, one per row, with None for a row without one: `{"observation":
    {"a": x, "b": (y, z)}}` gives `observation.a`, `observation.b.0` and `observation.b.1`. Values
    of columns stay as they are, and so do values that cannot be divided.

    Args:
        name: Name of `given`, for errors.
        names: Names of the columns. `given` itself is returned if it has no others.
    Raises:
        DataError: A key is no string, a column occurs twice, or some rows lack a part that others
            have.
    """
    if isinstance(given, dict) and given.keys() <= names:
        return given
    flat: dict[str, Any] = {}
    _divide(flat, name, "", arguments.mapping(name, given, "column -> rows"), names)
    return flat


def _divide(
    flat: dict[str, Any], name: str, prefix: str, given: Mapping[Any, Any], names: Set[str]
) -> None:
    for key, value in given.items():
        if not isinstance(key, str):
            owner = f"{name}: column {prefix[:-1]}" if prefix else name
            raise DataError(owner, "must have strings as keys", key, "name the values by strings")
        column = prefix + key
        parts = {} if column in names else _parts(f"{name}: column {column}", value)
        if parts:
            _divide(flat, name, f"{column}.", parts, names)
        elif column in flat:
            raise DataError(
                f"{name}: column {column}", "must be given once", None, "by its name, or nested"
            )
        else:
            flat[column] = value


def _parts(where: str, value: Any) -> Mapping[Any, Any]:
    """Return the parts of a value by key or index, none if it has none; `where` is for errors."""
    if isinstance(value, tuple):
        return {str(index): part for index, part in enumerate(value)}
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object):
        rows = [None if row is None else _parts(where, row) for row in value]
        keys = next((row for row in rows if row is not None), {}).keys()
        for number, row in enumerate(rows):
            if row is not None and row.keys() != keys:
                odd = next(key for key in (*keys, *row) if (key in keys) != (key in row))
                shown = f"{'one' if odd in row else 'none'} in row {number}"
                raise DataError(
                    f"{where}.{odd}",
                    "must be in every row or in none",
                    shown,
                    "give the key in every row; a mask column can mark missing values",
                )
        return {key: [None if row is None else row[key] for row in rows] for key in keys}
    return value if isinstance(value, (dict, Mapping)) else {}
