"""Rows of columns for C++ and torch: their addresses, forms and checks, and views as tensors."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import numpy as np
import torch

from deepspeed_gear.schema import Column

ROWS_CODES = {"T": 0, "T+1": 1, "1": 2}
_CHECKS = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}  # store/finite_checks.h


def form_of(native: ModuleType, column: Column) -> Any:
    """Return the RowForm of a column's rows, with the check of NaN and infinities that it needs."""
    dtype = column.numpy_dtype
    check = _CHECKS[column.dtype] if column.must_be_finite else 0
    return native.RowForm(dtype.kind, dtype.itemsize, check, column.shape)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def as_tensor(array: np.ndarray, dtype: str = "") -> torch.Tensor:
    """View stored values as a tensor, never to be written to; uint16 of "bfloat16" as such."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(np.asarray(array))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
