"""What the public wrappers of the ops refuse; every function raises `ShapeError`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ShapeError


def check_key(seed: int, stream: int) -> None:
    """Refuse a seed outside [0, 2^63) and a stream outside [0, 2^32)."""
    check_range("seed", seed, 0, 1 << 63)
    check_range("stream", stream, 0, 1 << 32)


def check_range(name: str, value: int, low: int, end: int) -> int:
    """Refuse a value outside [low, end); give it back otherwise."""
    if not low <= value < end:
        raise ShapeError(name, f"must be in [{low}, {end})", value)
    return value


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype | None, shape: Sequence[int | None]) -> None:
    """Check dtype (None: any), shape (None: any size) and memory order."""
    if dtype is not None and tensor.dtype != dtype:
        raise ShapeError(name, f"must be {dtype}", tensor.dtype)
    expected = [m if n is None else n for n, m in zip(shape, tensor.shape, strict=False)]
    if tensor.dim() != len(shape) or list(tensor.shape) != expected:
        sizes = ", ".join("*" if n is None else str(n) for n in shape)
        raise ShapeError(name, f"must have shape [{sizes}]", list(tensor.shape))
    if not tensor.is_contiguous():
        raise ShapeError(name, "must be contiguous", tensor.stride(), "call .contiguous() on it")
