"""Rows of columns as C++ sees them: addresses in memory that the caller keeps mapped, and their form."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from deepspeed_gear.schema import Column

ROWS_CODES = {"T": 0, "T+1": 1, "1": 2}
_CHECKS = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}  # store/finite.h


def form_of(native: ModuleType, column: Column) -> Any:
    """Return the RowForm of a column's rows.

    Buffers are compared with its kind, size and shape; its check refuses NaN and infinities.
    """
    dtype = column.numpy_dtype
    check = _CHECKS[column.dtype] if column.must_be_finite else 0
    return native.RowForm(dtype.kind, dtype.itemsize, check, column.shape)


def address(array: np.ndarray) -> int:
    """Return the address of an array."""
    return int(array.ctypes.data)
