"""Values in rows of tables: numbers as arrays, the place of a null, and values as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from deepspeed_gear.data.ingest.decoding.arrow_sizes import NUMBER_BYTES
from deepspeed_gear.errors import DataError


def numeric(value: Any) -> np.ndarray | None:
    """Return numbers as an array; None for other values and for ragged lists."""
    try:
        array = np.asarray(value) if _is_numeric(value) or hasattr(value, "__array__") else None
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return array if array is not None and array.dtype.kind in "biuf" else None


def _is_numeric(value: Any) -> bool:
    """Return whether all leaves are numbers; of a list with one text NumPy would make texts."""
    if not isinstance(value, (list, tuple)):
        return isinstance(value, (bool, int, float, np.generic, np.ndarray))
    return set(map(type, value)) <= {bool, int, float} or all(map(_is_numeric, value))


def null_place(value: Any) -> str | None:
    """Return the place of the first null in nested lists, such as "[2][0]"; "" for null itself."""
    if value is None:
        return ""
    is_objects = isinstance(value, np.ndarray) and value.dtype.kind == "O"
    parts = value if is_objects or isinstance(value, (list, tuple)) else ()
    places = ((number, null_place(part)) for number, part in enumerate(parts))
    return next((f"[{number}]{place}" for number, place in places if place is not None), None)


def plain(where: str, value: Any) -> Any:
    """Return a value with its arrays as lists, as JSON holds it; DataError if nested too deeply."""
    with DataError.on(
        where, "must not be nested too deeply", RecursionError, remedy="flatten the row"
    ):
        return _plain(value)


def plain_bytes(value: Any) -> int:
    """Return the bytes of the numbers that `plain` makes of a value's arrays."""
    waiting = [value]
    num_bytes = 0
    while waiting:
        part = waiting.pop()
        if isinstance(part, np.ndarray):
            num_bytes += part.size * NUMBER_BYTES
        elif isinstance(part, (list, tuple, Mapping)):
            parts = part.values() if isinstance(part, Mapping) else part
            waiting += [one for one in parts if isinstance(one, (list, tuple, Mapping, np.ndarray))]
    return num_bytes


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value
