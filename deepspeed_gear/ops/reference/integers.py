"""Integer arithmetic on int64 tensors: unsigned words, and powers as in common/power.h.

PyTorch adds and multiplies int64 modulo 2^64, so its bits are those of unsigned integers too.
Logarithms are Q54 (2^54 is 1), factors and significands Q62. No floating-point operation takes
part, because the last bit of a `pow` depends on the machine, the library and the size of the
tensor.
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor

from deepspeed_gear.ops.constants import ONE_Q62

LOW_32 = 0xFFFFFFFF
_SIGN = -(1 << 63)
_LOG_BITS = 54
_TABLE_BITS = 6
# log2(1 + x) / x with alternating signs, and (2^x - 1) / x, Q62, highest term first: see
# common/power.h.
_LOG2 = (
    906295301149760215,
    1107936214076780330,
    1330641342918730110,
    1663314082862784279,
    2217752182832675559,
    3326628274460942658,
    6653256548922161223,
)
_EXP2 = (
    713668068253643,
    6148960213822094,
    44355792000417296,
    255967521893105676,
    1107849223398936668,
    3196577161300663914,
)


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
    a_low = a & LOW_32
    a_high = shift_right(a, 32)
    b_low = b & LOW_32
    b_high = shift_right(b, 32)
    cross_ab = a_low * b_high
    cross_ba = a_high * b_low
    middle = shift_right(a_low * b_low, 32) + (cross_ab & LOW_32) + (cross_ba & LOW_32)
    return (
        a_high * b_high
        + shift_right(cross_ab, 32)
        + shift_right(cross_ba, 32)
        + shift_right(middle, 32)
    )


def _inverse(entry: int) -> int:
    """Return 1 / (1 + entry / 64), Q63, rounded up."""
    return -(-(1 << 63 + _TABLE_BITS) // ((1 << _TABLE_BITS) + entry))


def _log_of_inverse(entry: int) -> int:
    """Return -log2 of an inverse, Q62, bit by bit: squaring a number doubles its logarithm."""
    precision = 192
    log = 0
    value = (1 << precision + 63) // _inverse(entry)
    for _ in range(63):
        value = value * value >> precision
        is_two = value >> precision + 1
        value >>= is_two
        log = 2 * log + is_two
    return (log + 1) >> 1


def _power(entry: int) -> int:
    """Return 2^(entry / 64), Q62, rounded down."""
    value = 1 << (62 << _TABLE_BITS) + entry
    for _ in range(_TABLE_BITS):
        value = isqrt(value)
    return value


_INVERSES, _LOGS, _POWERS = (
    torch.tensor([signed(of(entry)) for entry in range(1 << _TABLE_BITS)])
    for of in (_inverse, _log_of_inverse, _power)
)


def _horner(coefficients: tuple[int, ...], x: Tensor, sign: int) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = coefficient + sign * multiply_high(x, value)
    return value


def _multiply_q62(a: Tensor, b: Tensor) -> Tensor:
    """Return floor(a * b / 2^62) modulo 2^64. [...], int64."""
    return (multiply_high(a, b) << 2) | shift_right(a * b, 62)


def highest_bit(x: Tensor) -> Tensor:
    """Return the position of the highest set bit. Rule: x > 0. [...], int64."""
    # Bisection: of 0b10100 (20) the halves above 16 and 8 bits are 0, that above 4 bits is 1.
    top = torch.zeros_like(x)
    for bits in (32, 16, 8, 4, 2, 1):
        is_above = (x >> bits) > 0
        top = top + bits * is_above
        x = torch.where(is_above, x >> bits, x)
    return top


def log2(x: Tensor) -> Tensor:
    """Return binary logarithms, Q54; exact for powers of two. Rule: x > 0. [...], int64."""
    # x = 2^top * (1 + entry / 64) * (1 + rest): a table has the logarithm of the second factor, a
    # polynomial that of the third.
    top = highest_bit(x)
    significand = x << (63 - top)
    entry = shift_right(significand << 1, 64 - _TABLE_BITS)
    rest = _multiply_q62(significand, _INVERSES[entry])
    fraction = _LOGS[entry] + multiply_high(rest, _horner(_LOG2, rest, -1))
    return (top << _LOG_BITS) + shift_right(fraction + 128, 62 - _LOG_BITS)


def scale(log: Tensor, factor: int) -> Tensor:
    """Multiply a logarithm by a factor in [0, 1], Q62, rounding towards zero. [...], int64."""
    product = _multiply_q62(log.abs(), torch.full_like(log, factor))
    return torch.where(log < 0, -product, product)


def exp2(log: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2^log as (significand, exponent): significand / 2^62 * 2^exponent. [...], int64.

    The significand / 2^62 lies in [1, 2).
    """
    fraction = log << (64 - _LOG_BITS)
    power = _POWERS[shift_right(fraction, 64 - _TABLE_BITS)]
    rest = shift_right(fraction << _TABLE_BITS, _TABLE_BITS)
    significand = power + _multiply_q62(power, multiply_high(rest, _horner(_EXP2, rest, 1)))
    return significand, log >> _LOG_BITS


def power_of_priority(bits: Tensor, alpha: int) -> tuple[Tensor, Tensor]:
    """Raise priorities to the power alpha, as `exp2` returns powers; exact for alpha 1.

    Args:
        bits: Float32 bits of priorities above 0. [...], int64.
        alpha: Exponent in [0, 1], Q62.
    """
    biased = bits >> 23
    low = bits & 0x7FFFFF
    mantissa = torch.where(biased > 0, low | 0x800000, low)
    exponent = biased.clamp(min=1) - 150
    if alpha == ONE_Q62:
        top = highest_bit(mantissa)
        return mantissa << (62 - top), top + exponent
    return exp2(scale(log2(mantissa) + (exponent << _LOG_BITS), alpha))


def float_bits(significand: Tensor, exponent: Tensor) -> Tensor:
    """Round powers (`exp2`) to float32 bits, ties to even.

    Powers beyond the range become the largest float, those below the normal floats 0.
    """
    drop = 62 - 23  # bits of the significand that a float32 does not have
    largest = 0x7F7FFFFF
    is_odd = (significand >> drop) & 1
    below_half = (1 << (drop - 1)) - 1
    kept = shift_right(significand + below_half + is_odd, drop)
    bits = (((exponent + 126) << 23) + kept).clamp(max=largest)
    return torch.where(exponent < -126, 0, torch.where(exponent > 127, largest, bits))
