"""Conversion of elements while they are gathered: (x - shift) * gain in float64.

Each operation rounds once. A copied value keeps its bits; a NaN that is converted becomes the one
quiet NaN of its type, because processors differ in its payload.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError

_WIDE = (torch.float64, torch.int64, torch.int32)
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_QUIET_NAN = {torch.float16: 0x7E00, torch.bfloat16: 0x7FC0}
_WIDENING = {
    torch.int64: (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32),
    torch.int32: (torch.bool, torch.uint8, torch.int8, torch.int16),
}


def arithmetic_dtype(source: torch.dtype, target: torch.dtype) -> torch.dtype:
    """Return the type through which a dtype is converted: float64 if float32 would lose bits."""
    return torch.float64 if source in _WIDE or target in _WIDE else torch.float32


def is_allowed(source: torch.dtype, target: torch.dtype, scaled: bool = False) -> bool:
    """Return whether a conversion exists: to any floating type, a wider integer, or the same."""
    if target in _FLOATING:
        return True
    return not scaled and (source == target or source in _WIDENING.get(target, ()))


def convert(
    x: Tensor, target: torch.dtype, shift: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    """Convert elements to a dtype that `is_allowed` admits, with shift and gain or neither.

    Args:
        x: [..., elements].
        target: The dtype.
        shift, gain: [elements], float64, or both None.
    """
    if not is_allowed(x.dtype, target, gain is not None):
        raise ShapeError(
            "dtype",
            f"must be one that {x.dtype} can be converted to",
            target,
            "choose another dtype of the field",
        )
    if x.dtype == target and gain is None:
        return x
    if shift is not None and gain is not None:
        return narrow((widen(x, torch.float64) - shift) * gain, target)
    return narrow(widen(x, arithmetic_dtype(x.dtype, target)), target)


def widen(x: Tensor, target: torch.dtype) -> Tensor:
    """Convert to float32 or float64: exact, except for int64 beyond 2^53. A bool is its byte."""
    return (x.view(torch.uint8) if x.dtype == torch.bool else x).to(target)


def narrow(x: Tensor, target: torch.dtype) -> Tensor:
    """Round float32 or float64 to nearest, ties to even; to 16 bits through float32."""
    if target in _QUIET_NAN:
        x = x.to(torch.float32)
        quiet = torch.tensor(_QUIET_NAN[target], dtype=torch.int16, device=x.device)
        return torch.where(x.isnan(), quiet, x.to(target).view(torch.int16)).view(target)
    y = x.to(target)
    return torch.where(y.isnan(), torch.nan, y) if target.is_floating_point else y
