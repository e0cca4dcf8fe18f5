"""Columns of a data set for the arrays of a source: names, dtypes, and conversion of values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.stored_values import CORRECT, cast
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import DTYPES, Column, Rows

_WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
LEAVE_OUT = "leave it out with --columns"
CONVERT = "store it as numbers, in rows of one shape"  # where a data set needs the column
FLAGS = tuple(Column(role, "bool", role=role) for role in ("terminated", "truncated"))
_ORDER = ("observation", "action", "reward", "terminated", "truncated")
SCALARS = ("reward", "terminated", "truncated")  # roles of one value a step
NEEDED = (*SCALARS, "token", "loss_mask")  # roles of columns that are not optional


def column_name(*parts: str) -> str:
    """Join the parts of a source's key to a column name; illegal characters become `_`."""
    return ".".join("".join(c if c.isalnum() or c in "_-" else "_" for c in part) for part in parts)


def end_episode(arrays: dict[str, NDArray[Any]]) -> None:
    """Set the truncated flag of the last step where it has no flag."""
    if len(arrays["terminated"]) and not (arrays["terminated"][-1] or arrays["truncated"][-1]):
        arrays["truncated"] = arrays["truncated"].copy()
        arrays["truncated"][-1] = True


def stored_dtype(where: str, dtype: np.dtype[Any], remedy: str = CONVERT) -> str:
    """Return the stored dtype of a source's dtype; uint16, 32 and 64 become signed and wider."""
    name = str(dtype.name)
    name = _WIDER.get(name, name)
    if name not in DTYPES:
        raise DataError(
            where, "must be numeric (bool, integer or float up to 64 bits)", str(dtype), remedy
        )
    return name


def make_column(
    where: str,
    name: str,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    role: str = "other",
    rows: Rows = "T",
) -> Column:
    """Describe a source's array as a stored column.

    Scalar integer actions become int64, integer rewards float64 and flags bool. Rewards and flags
    have the shape ().
    """
    remedy = LEAVE_OUT if "." in name or role == "other" else CONVERT
    stored = stored_dtype(where, dtype, remedy)
    shape = () if role in SCALARS else shape
    if any(n < 1 for n in shape):
        raise DataError(where, "must have rows with at least one value", list(shape), remedy)
    if role in ("terminated", "truncated"):
        stored = "bool"
    elif role == "reward" and dtype.kind != "f":
        stored = "float64"
    elif role == "action" and not shape and dtype.kind in "iu":
        stored = "int64"
    return Column(name, stored, shape, role, rows)


def in_order_of_roles(columns: Iterable[Column]) -> tuple[Column, ...]:
    """Return columns sorted by role: observations, actions, rewards, flags, then all others."""
    return tuple(sorted(columns, key=lambda column: (*_ORDER, column.role).index(column.role)))


def convert(where: str, array: NDArray[Any], column: Column) -> NDArray[Any]:
    """Convert a source's array to the dtype of its column, as `stored_values.cast` does.

    Rewards and flags lose axes of one value.
    """
    stored_dtype(where, array.dtype, LEAVE_OUT)
    if column.role in SCALARS and array.size == len(array):
        array = array.reshape(-1)
    return cast(array, column, where, LEAVE_OUT if column.role == "other" else CORRECT)
