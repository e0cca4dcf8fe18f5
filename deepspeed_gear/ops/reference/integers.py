"""Unsigned 64-bit integers as the bits of int64 tensors: PyTorch adds and multiplies them modulo 2^64."""

from __future__ import annotations

import torch
from torch import Tensor

LOW_32 = 0xFFFFFFFF
_SIGN = -(1 << 63)


def signed(value: int) -> int:
    """Return the Python integer whose int64 bits are those of `value` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift unsigned integers right. [...], int64; 0 < bits < 64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def less(a: Tensor, b: Tensor) -> Tensor:
    """Compare as unsigned integers. [...], bool."""
    return (a ^ _SIGN) < (b ^ _SIGN)


def multiply_high(a: Tensor, b: Tensor) -> Tensor:
    """Return the upper 64 of the 128 bits of an unsigned product, by 32-bit limbs. [...], int64."""
    a_low, a_high = a & LOW_32, shift_right(a, 32)
    b_low, b_high = b & LOW_32, shift_right(b, 32)
    cross_ab, cross_ba = a_low * b_high, a_high * b_low
    middle = shift_right(a_low * b_low, 32) + (cross_ab & LOW_32) + (cross_ba & LOW_32)
    return a_high * b_high + shift_right(cross_ab, 32) + shift_right(cross_ba, 32) + shift_right(middle, 32)


def as_tensor(value: int | Tensor, like: Tensor) -> Tensor:
    """Put an unsigned Python integer beside a tensor of them."""
    return value if isinstance(value, Tensor) else torch.tensor(signed(value), device=like.device)
