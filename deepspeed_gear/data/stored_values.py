"""Values in the stored dtype of a column: conversion, rounding, range, NaN and infinities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data import opaque_rows
from deepspeed_gear.data.array_values import holds_text
from deepspeed_gear.errors import DataError
from deepspeed_gear.ops.backends import existing_native
from deepspeed_gear.schema import DTYPES, FLOATING, Column

CORRECT = "correct it, or give the column a dtype that holds it"
_PLAIN = frozenset(DTYPES) - {"bfloat16"}  # dtypes that NumPy has


def as_stored(value: Any, column: Column, table: str, num_rows: int | None = None) -> np.ndarray:
    """Convert a value, or a list for an opaque column, to the stored dtype.

    Args:
        table: Start of the name in errors.
        num_rows: Rows that the value must have, in place of those that `column.rows` asks for.
    """
    if column.is_ragged:  # the table has the numbers of its items
        column = column.item_number
    single = column.rows == "1" and num_rows is None
    rank = len(column.shape) + (0 if single else 1)
    if isinstance(value, np.number) and column.dtype in _PLAIN:
        value = np.asarray(value)
    if type(value) is np.ndarray and value.dtype == column.numpy_dtype and column.dtype in _PLAIN:
        fits = value.ndim == rank and value.shape[rank - len(column.shape) :] == column.shape
        if fits and (num_rows is None or len(value) == num_rows):
            return value  # the usual case: nothing to convert
    name = f"{table}: column {column.name}"
    if column.is_opaque and num_rows is not None:
        return opaque_rows.encode_rows(value, column, name, num_rows)
    if column.is_opaque:
        return opaque_rows.encode(value, column, name)
    are_bits = False  # of bfloat16, which is stored as uint16
    if isinstance(value, torch.Tensor):
        value = arguments.dense(name, value).cpu()
        if value.dtype == torch.bfloat16:
            are_bits = column.dtype == "bfloat16"
            value = value.view(torch.uint16) if are_bits else value.float()
        array = value.numpy()
    else:
        if isinstance(value, (list, tuple)) and holds_text(value):
            raise DataError(
                name,
                f"must be convertible to {column.dtype}",
                "text",
                "give numbers, or store the text in a column of dtype json",
            )
        with DataError.on(
            name,
            "must be an array",
            ValueError,
            TypeError,
            RuntimeError,
            remedy="give an array, or nested lists of equal lengths",
        ):
            array = np.asarray(value)
        are_bits = array.dtype == np.uint16
    if array.dtype.kind not in "biuf":
        rule = f"must be convertible to {column.dtype}"
        remedy = "give numbers"
        if isinstance(value, Mapping):
            remedy = f"name the columns {column.name}.<key> to store its parts"
        raise DataError(name, rule, str(array.dtype), remedy)
    fits = array.ndim == rank and array.shape[rank - len(column.shape) :] == column.shape
    if not fits or (num_rows is not None and len(array) != num_rows):
        lead = column.rows if num_rows is None else num_rows
        shape = list(column.shape) if single else [lead, *column.shape]
        raise DataError(
            name,
            f"must have shape {shape}",
            list(array.shape),
            f"the schema has {column.dtype}{list(column.shape)}, rows {column.rows}",
        )
    if are_bits and column.dtype == "bfloat16":
        return np.asarray(array)
    return cast(array, column, name)


def cast(array: np.ndarray, column: Column, name: str, remedy: str = CORRECT) -> np.ndarray:
    """Convert real numbers to a column's stored dtype. Costs nothing if the array already has it.

    An integer or bool column keeps every bool, integer and whole number that it can hold exactly; a
    floating column rounds. Other values are a DataError, and so are finite values that would become
    infinite.
    """
    if array.dtype == column.numpy_dtype and column.dtype != "bfloat16":
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        if column.dtype == "bfloat16":
            single = torch.from_numpy(array.astype(np.float32, order="C"))
            stored = single.to(torch.bfloat16).view(torch.uint16).numpy()
        else:
            stored = array.astype(column.numpy_dtype)
    if column.is_floating:
        held = ~not_finite(stored, column) | ~np.isfinite(array)
    else:
        held = stored == array
        # Some machines convert 2^63 to the largest int64, which equals it as a float.
        if column.dtype == "int64" and array.dtype.kind == "f":
            held &= array.astype(np.float64) < 2.0**63
    if not held.all():
        value = array[~held].flat[0].item()
        raise DataError(name, f"must hold values that {column.dtype} can hold", value, remedy)
    return stored


def not_finite(stored: np.ndarray, column: Column) -> np.ndarray:
    """Return which stored values are NaN or infinite. A bool array of the shape of `stored`."""
    if column.dtype == "bfloat16":
        return np.asarray((stored & 0x7F80) == 0x7F80)  # all bits of the exponent are set
    return np.asarray(~np.isfinite(stored))


def are_finite(stored: np.ndarray, column: Column) -> bool:
    """Return whether no stored value of a floating column is NaN or infinite."""
    native = existing_native(stored.nbytes)
    if native is None or not stored.flags.c_contiguous:
        return not not_finite(stored, column).any()
    kind = FLOATING.index(column.dtype) + 1  # as in ops/csrc/store/finite_checks.h
    return bool(native.all_finite(stored.ctypes.data, stored.nbytes, kind))


def check_finite(
    name: str,
    columns: Iterable[Column],
    arrays: Mapping[str, np.ndarray],
    place: Callable[[int], str] = "step {}".format,
) -> None:
    """Raise DataError for NaN or an infinity in a column that does not allow them.

    Args:
        place: Describes a row by its number, for the error.
    """
    for column in columns:
        array = arrays.get(column.name)
        if array is None or not column.must_be_finite or are_finite(array, column):
            continue
        wrong = not_finite(array, column)
        if wrong.any():
            at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            value = as_numbers(array[at], column).item()
            shown = f"{value} at {place(int(at[0]))}" if array.ndim > len(column.shape) else value
            raise DataError(
                f"{name}: column {column.name}",
                "must be finite",
                shown,
                'correct it, or set "allow_nan" of the column (gear ingest: --allow-nan)',
            )


def as_numbers(values: np.ndarray, column: Column) -> np.ndarray:
    """Return stored values as numbers: bfloat16, stored as uint16, becomes float32."""
    array = np.asarray(values)
    if column.dtype != "bfloat16":
        return array
    return np.asarray(array.astype(np.uint32) << 16).view(np.float32)  # its upper half


@np.errstate(invalid="ignore")  # converting a signalling NaN raises the flag
def as_float64(values: np.ndarray, column: Column) -> np.ndarray:
    """Return stored values as float64."""
    return as_numbers(values, column).astype(np.float64)


def no_values(column: Column, num_steps: int) -> np.ndarray:
    """Return zeros in place of a late column that has not been filled."""
    rows = () if column.rows == "1" else (num_steps + int(column.rows == "T+1"),)
    return np.zeros((*rows, *column.shape), column.numpy_dtype)
