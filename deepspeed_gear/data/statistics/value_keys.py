"""Keys: unsigned integers in the order of a column's values (ops/csrc/statistics/value_keys.h)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.statistics.running_moments import Float64
from deepspeed_gear.data.stored_values import as_float64
from deepspeed_gear.schema import Column


def keys_of(rows: NDArray[np.generic], column: Column) -> NDArray[np.uint64]:
    """Return the key of each value: its bits with the sign first, and reversed below 0.

    Keys of infinities and NaN are outside of those of the finite values.
    """
    kind = np.dtype(f"u{column.numpy_dtype.itemsize}")
    bits = np.ascontiguousarray(rows).view(kind)
    sign = kind.type(1 << (8 * kind.itemsize - 1))
    if column.is_floating:
        bits = np.where(bits & sign, ~bits, bits | sign)
    elif column.numpy_dtype.kind == "i":
        bits = bits ^ sign
    return np.asarray(bits.astype(np.uint64))


def values_of(keys: NDArray[np.uint64], column: Column) -> Float64:
    """Return the values of keys."""
    kind = np.dtype(f"u{column.numpy_dtype.itemsize}")
    bits = keys.astype(kind)
    sign = kind.type(1 << (8 * kind.itemsize - 1))
    if column.is_floating:
        bits = np.where(bits & sign, bits & ~sign, ~bits)
    elif column.numpy_dtype.kind == "i":
        bits = bits ^ sign
    return np.asarray(as_float64(bits.view(column.numpy_dtype), column))
