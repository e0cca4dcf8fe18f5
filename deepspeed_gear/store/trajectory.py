"""A trajectory that a program hands over, against a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema


def check_trajectory(
    name: str, schema: Schema, trajectory: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], int]:
    """Check a trajectory against a schema.

    Args:
        name: Of the table, for error texts.
        schema: Of the table.
        trajectory: Column -> array, tensor or nested list.
    Returns:
        Its columns as arrays of the stored dtypes, late ones that are missing as zeros, and its number of
        steps.
    Raises:
        DataError: A column is missing, unknown, or has a wrong shape, dtype or length.
    """
    unknown = sorted(set(trajectory) - set(schema.names))
    if unknown:
        raise DataError(
            f"{name}: column {unknown[0]}",
            "must be in the schema",
            None,
            f"known are {schema.names}",
        )
    arrays: dict[str, np.ndarray] = {}
    num_steps: int | None = None
    for column in schema:
        if column.name not in trajectory and column.late:
            continue
        if column.name not in trajectory:
            raise DataError(f"{name}: column {column.name}", "must be in every trajectory")
        array = as_stored(trajectory[column.name], column, name)
        arrays[column.name] = array
        if column.rows == "1":
            continue
        steps = len(array) - (1 if column.rows == "T+1" else 0)
        if num_steps is not None and steps != num_steps:
            raise DataError(
                f"{name}: column {column.name}", f"must have the rows of {num_steps} steps", len(array)
            )
        num_steps = steps
    assert num_steps is not None
    if num_steps < 1:
        raise DataError(f"{name}: trajectory", "must have at least one step", num_steps)
    for column in schema.late_columns:
        if column.name not in arrays:
            arrays[column.name] = no_values(column, num_steps)
    return arrays, num_steps


def no_values(column: Column, num_steps: int) -> np.ndarray:
    """Return zeros in place of a column that comes later."""
    rows = () if column.rows == "1" else (num_steps + int(column.rows == "T+1"),)
    return np.zeros((*rows, *column.shape), column.numpy_dtype)


def as_stored(value: Any, column: Column, table: str, num_rows: int | None = None) -> np.ndarray:
    """Return a value as an array of the column's stored dtype and row shape.

    Args:
        value: Array, tensor or nested list.
        column: The column.
        table: What it is a column of, for error texts.
        num_rows: So many rows, whatever `column.rows` says; None: as it says.
    Raises:
        DataError: It cannot be that.
    """
    name = f"{table}: column {column.name}"
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if column.dtype == "bfloat16":
            value = value.to(torch.bfloat16).view(torch.uint16)
        elif value.dtype == torch.bfloat16:
            value = value.float()
        array = value.numpy()
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:
            raise DataError(name, "must be an array", None, str(error)) from error
    # Lists have no dtype of their own; of them, and of what "same_kind" admits, `_cast` checks the values.
    suits = np.can_cast(array.dtype, column.numpy_dtype, "same_kind") or column.dtype == "bfloat16"
    if array.dtype.kind not in "biuf" or not (suits or isinstance(value, (list, tuple, int, float, bool))):
        raise DataError(name, f"must be convertible to {column.dtype}", str(array.dtype))
    if column.dtype == "bfloat16" and array.dtype != np.uint16:
        rounded = torch.from_numpy(array.astype(np.float32, order="C")).to(torch.bfloat16)
        array = rounded.view(torch.uint16).numpy()
    single = column.rows == "1" and num_rows is None
    rank = len(column.shape) + (0 if single else 1)
    wrong = array.ndim != rank or tuple(array.shape[array.ndim - len(column.shape) :]) != column.shape
    if wrong or (num_rows is not None and len(array) != num_rows):
        lead = column.rows if num_rows is None else num_rows
        shape = list(column.shape) if single else [lead, *column.shape]
        raise DataError(name, f"must have shape {shape}", list(array.shape))
    return _cast(np.asarray(array), column, name)


def _cast(array: np.ndarray, column: Column, name: str) -> np.ndarray:
    """Convert to the stored dtype; a value that it cannot hold is refused, a fraction may be rounded."""
    if array.dtype == column.numpy_dtype:
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        stored = array.astype(column.numpy_dtype)
    held = np.isfinite(stored) | ~np.isfinite(array) if column.is_floating else stored == array
    if not held.all():
        raise DataError(name, f"must hold values that {column.dtype} can hold", array[~held].flat[0].item())
    return stored


def as_numbers(values: np.ndarray, column: Column) -> np.ndarray:
    """Return a column's stored values as numbers: bfloat16, which is stored as uint16, as float32."""
    array = np.asarray(values)
    if column.dtype != "bfloat16":
        return array
    return torch.from_numpy(np.ascontiguousarray(array)).view(torch.bfloat16).float().numpy()
