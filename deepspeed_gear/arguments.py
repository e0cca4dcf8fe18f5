"""Checks and conversions of the arguments of public calls.

Each function takes the argument's name for its error: a DataError for arrays and mappings, a
ConfigError for options. They run once a call, never once a sample.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from deepspeed_gear.errors import ConfigError, DataError

T = TypeVar("T")
_INT64 = np.iinfo(np.int64)


def mapping(name: str, value: object, remedy: str = "give a dict") -> Mapping[str, Any]:
    """Return a mapping with strings as keys."""
    if not isinstance(value, Mapping):
        raise DataError(name, "must be a mapping by name", type(value).__name__, remedy)
    odd = next((key for key in value if not isinstance(key, str)), None)
    if odd is not None:
        raise DataError(name, "must have strings as keys", odd, remedy)
    return value


def dense(name: str, tensor: object) -> torch.Tensor:
    """Return a strided tensor with values, detached from its graph.

    Raises:
        DataError: It is sparse, nested, quantized, on the meta device, or no tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise DataError(
            name, "must be a tensor", type(tensor).__name__, "convert it with torch.as_tensor"
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        raise DataError(
            name, "must be a dense tensor", str(tensor.layout), "give tensor.to_dense()"
        )
    if tensor.is_meta or tensor.is_quantized:
        form = "a meta tensor, which has no values" if tensor.is_meta else str(tensor.dtype)
        raise DataError(
            name,
            "must be a tensor of numbers",
            form,
            "give a tensor on a CPU or GPU with plain values",
        )
    values = tensor.detach() if tensor.requires_grad else tensor
    # The imaginary part of a conjugate has a mark in place of signs. A trace cannot ask for it.
    is_marked = torch.compiler.is_compiling() or values.is_neg()
    return values.resolve_neg() if is_marked else values


def array(name: str, value: object) -> np.ndarray:
    """Convert an array, a tensor or nested lists of real numbers to an array in host memory."""
    if isinstance(value, torch.Tensor):
        host = dense(name, value).cpu()
        numbers = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    else:
        # Called for each value of each step that is added: a context manager would cost 1 us.
        try:
            numbers = np.asarray(value)
        except (ValueError, TypeError, RuntimeError) as error:
            # Lists of unequal lengths, or with tensors on a GPU in them.
            raise DataError(name, "must be an array of numbers", None, str(error)) from error
    if numbers.dtype.kind not in "biuf":
        held = f"{type(value).__name__} of {numbers.dtype}"
        raise DataError(
            name, "must hold real numbers", held, "give bool, integer or floating-point values"
        )
    return numbers


def integers(name: str, value: object) -> np.ndarray:
    """Return integers as a flat array. [n], int64."""
    numbers = array(name, value)
    # NumPy makes an empty list float64, so the dtype of no numbers is meaningless.
    if numbers.size and numbers.dtype.kind not in "iu":
        raise DataError(name, "must be integers", str(numbers.dtype), "convert them to int64")
    if numbers.dtype == np.uint64 and numbers.size and int(numbers.max()) > _INT64.max:
        raise DataError(name, "must fit into int64", int(numbers.max()), "give values below 2^63")
    return numbers.astype(np.int64, copy=False).reshape(-1)


def tensor(name: str, value: object) -> torch.Tensor:
    """Return real numbers as a tensor; one that is a tensor already stays on its device."""
    if not isinstance(value, torch.Tensor):
        return torch.from_numpy(np.array(array(name, value)))
    numbers = dense(name, value)
    if numbers.is_complex():
        raise DataError(
            name,
            "must hold real numbers",
            str(numbers.dtype),
            "give the real and imaginary parts as two columns",
        )
    return numbers


def count(name: str, value: object, least: int = 1, remedy: str = "") -> int:
    """Return an integer of at least `least` that int64 holds; a bool is none."""
    try:
        number = None if isinstance(value, (bool, torch.Tensor)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= _INT64.max:
        shown = type(value).__name__ if number is None else number
        remedy = remedy or ("give an int" if number is None else "choose another number")
        raise ConfigError(name, f"must be an integer of at least {least}", shown, remedy)
    return number


def one_of(name: str, value: object, kind: type[T] | tuple[type[T], ...], what: str) -> T:
    """Return a value that is an instance of a type; `what` completes "must be" in the error."""
    if not isinstance(value, kind):
        raise ConfigError(name, f"must be {what}", type(value).__name__, "give one")
    return value


def tensors(name: str, value: object) -> Mapping[str, torch.Tensor]:
    """Return a mapping of dense tensors by column."""
    for column, given in mapping(name, value).items():
        dense(f"{name}: column {column}", given)
    return value  # type: ignore[return-value]


def function(name: str, value: object) -> Callable[..., Any]:
    """Return a value that can be called."""
    if not callable(value):
        raise ConfigError(
            name, "must be a function", type(value).__name__, "give something that can be called"
        )
    return value


def folder(name: str, value: object) -> Path:
    """Return a non-empty path."""
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(
            name, "must be a path", type(value).__name__, "give a str or a pathlib.Path"
        )
    if not os.fspath(value):
        raise ConfigError(name, "must not be empty", None, "the current folder is '.'")
    if "\0" in os.fsdecode(value):
        raise ConfigError(
            name, "must be a path without NUL characters", str(value)[:80], "remove them"
        )
    return Path(value)


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Parse JSON that the package need not have written.

    Raises:
        ValueError: The text is no JSON, or is nested deeper than Python's parser can go.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def device(name: str, value: object) -> torch.device:
    """Return the device that a name, a number or a device stands for."""
    try:
        return torch.device(value)  # type: ignore[call-overload, no-any-return]
    except (TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            name, "must be a device", repr(value)[:80], 'write "cpu" or "cuda:0"'
        ) from error


def check_usable(name: str, device: torch.device) -> None:
    """Raise a ConfigError unless torch can create a tensor on a device."""
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            name,
            "must be a device that torch can use here",
            str(device),
            str(error).splitlines()[0],
        ) from error
