"""Checks and conversions of arguments of public calls, never per sample; an error names the
argument. Arrays raise DataError, options raise ConfigError.
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


def mapping(name: str, value: object, remedy: str = "") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(name, "must be a mapping by name", type(value).__name__, remedy)
    odd = next((key for key in value if not isinstance(key, str)), None)
    if odd is not None:
        raise DataError(name, "must have strings as keys", odd, remedy)
    return value


def dense(name: str, tensor: object) -> torch.Tensor:
    """Return a dense tensor with values, detached from its graph: not sparse, nested, quantized or
    meta.
    """
    if not isinstance(tensor, torch.Tensor):
        raise DataError(name, "must be a tensor", type(tensor).__name__)
    if tensor.is_nested or tensor.layout != torch.strided:
        raise DataError(
            name, "must be a dense tensor", str(tensor.layout), "give tensor.to_dense()"
        )
    if tensor.is_meta or tensor.is_quantized:
        form = "a meta tensor, which has no values" if tensor.is_meta else str(tensor.dtype)
        raise DataError(name, "must be a tensor of numbers", form)
    return tensor.detach() if tensor.requires_grad else tensor


def array(name: str, value: object) -> np.ndarray:
    """Return an array, a tensor or nested lists of real numbers as an array in host memory."""
    if isinstance(value, torch.Tensor):
        host = dense(name, value).cpu()
        found = (host.float() if host.dtype == torch.bfloat16 else host).numpy()
    else:
        try:
            found = np.asarray(value)
        except (
            ValueError,
            TypeError,
            RuntimeError,
        ) as error:  # lists of unequal lengths, tensors in them
            raise DataError(name, "must be an array of numbers", None, str(error)) from error
    if found.dtype.kind not in "biuf":
        raise DataError(name, "must hold real numbers", f"{type(value).__name__} of {found.dtype}")
    return found


def integers(name: str, value: object) -> np.ndarray:
    found = array(name, value)
    if found.size and found.dtype.kind not in "iu":
        raise DataError(name, "must be integers", str(found.dtype))
    if found.dtype == np.uint64 and found.size and int(found.max()) > _INT64.max:
        raise DataError(name, "must fit into int64", int(found.max()))
    return found.astype(np.int64, copy=False).reshape(-1)


def tensor(name: str, value: object) -> torch.Tensor:
    """Return real numbers as a tensor, on the device where they are."""
    if not isinstance(value, torch.Tensor):
        return torch.from_numpy(np.array(array(name, value)))
    found = dense(name, value)
    if found.is_complex():
        raise DataError(name, "must hold real numbers", str(found.dtype))
    return found


def count(name: str, value: object, least: int = 1, remedy: str = "") -> int:
    try:
        number = None if isinstance(value, (bool, torch.Tensor)) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not least <= number <= _INT64.max:
        shown = type(value).__name__ if number is None else number
        raise ConfigError(name, f"must be an integer of at least {least}", shown, remedy)
    return number


def one_of(name: str, value: object, kind: type[T] | tuple[type[T], ...], what: str) -> T:
    if not isinstance(value, kind):
        raise ConfigError(name, f"must be {what}", type(value).__name__)
    return value


def tensors(name: str, value: object) -> Mapping[str, torch.Tensor]:
    for column, given in mapping(name, value).items():
        dense(f"{name}: column {column}", given)
    return value  # type: ignore[return-value]


def function(name: str, value: object) -> Callable[..., Any]:
    if not callable(value):
        raise ConfigError(name, "must be a function", type(value).__name__)
    return value


def folder(name: str, value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ConfigError(name, "must be a path", type(value).__name__)
    if not os.fspath(value):
        raise ConfigError(name, "must not be empty", None, "the current folder is '.'")
    if "\0" in os.fsdecode(value):
        raise ConfigError(name, "must be a path without NUL characters", str(value)[:80])
    return Path(value)


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of a JSON text from anywhere; ValueError also where it is nested
    too deeply.
    """
    try:
        return json.loads(text, **options)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def device(name: str, value: object) -> torch.device:
    try:
        found: torch.device = torch.device(value)  # type: ignore[call-overload]
        return found
    except (TypeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            name, "must be a device", repr(value)[:80], 'write "cpu" or "cuda:0"'
        ) from error


def usable_device(name: str, value: object) -> torch.device:
    """Return a device on which this process can make tensors."""
    found = device(name, value)
    try:
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        rule = "must be a device that torch can use here"
        raise ConfigError(name, rule, str(found), str(error).splitlines()[0]) from error
    return found
