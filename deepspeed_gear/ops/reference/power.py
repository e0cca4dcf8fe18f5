"""Powers in integer arithmetic, by int64 tensors: the same steps as common/power.h, so the same bits.

Logarithms are Q54 (2^54 is 1), factors and significands Q62. No floating-point operation takes part, because
the last bit of a `pow` depends on the machine, the library and the size of the tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..constants import ONE_Q62
from .integers import multiply_high, shift_right

_LOG_BITS = 54
# log2(1 + x) / x with alternating signs, and 2^x, both Q62, highest term first: common/power.h says how.
_LOG2 = (
    46074035101920,
    601762752287883,
    3748520696919467,
    14875519595685127,
    42451127503677666,
    93461211486349017,
    166850588777359461,
    251716735706291525,
    333435986357634187,
    402449507931877368,
    458080149688211217,
    505858848530958726,
    552756847791392746,
    604455224477465928,
    665254739087444757,
    739240508818029274,
    831655939030131688,
    950465128344776614,
    1108876086026533557,
    1330651309568268484,
    1663314137225261404,
    2217752182973985048,
    3326628274461080266,
    6653256548922161246,
)
_EXP2 = (
    8947357,
    109701852,
    2066648844,
    32514840606,
    469398239050,
    6094557713384,
    70340823270806,
    710362456341077,
    6149018368200791,
    44355791529051733,
    255967521894834213,
    1107849223398934274,
    3196577161300663916,
    4611686018427387904,
)


def _horner(coefficients: tuple[int, ...], x: Tensor, sign: int) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = coefficient + sign * multiply_high(x, value)
    return value


def highest_bit(x: Tensor) -> Tensor:
    """Return the position of the highest set bit. Rule: x > 0. [...], int64."""
    top = torch.zeros_like(x)
    for bits in (32, 16, 8, 4, 2, 1):
        is_above = (x >> bits) > 0
        top, x = top + bits * is_above, torch.where(is_above, x >> bits, x)
    return top


def log2(x: Tensor) -> Tensor:
    """Return binary logarithms, Q54; exact for powers of two. Rule: x > 0. [...], int64."""
    top = highest_bit(x)
    behind = x << (63 - top) << 1  # what follows the highest bit, Q64
    return (top << _LOG_BITS) + ((multiply_high(behind, _horner(_LOG2, behind, -1)) + 128) >> 8)


def scale(log: Tensor, factor: int) -> Tensor:
    """Multiply a logarithm by a factor in [0, 1], Q62, rounding towards zero. [...], int64."""
    magnitude, times = log.abs(), torch.full_like(log, factor)
    product = (multiply_high(magnitude, times) << 2) | shift_right(magnitude * times, 62)
    return torch.where(log < 0, -product, product)


def exp2(log: Tensor) -> tuple[Tensor, Tensor]:
    """Return 2^log as significand / 2^62 * 2^exponent, the significand in [1, 2). [...], int64 each."""
    return _horner(_EXP2, log << (64 - _LOG_BITS), 1), log >> _LOG_BITS


def power_of_priority(bits: Tensor, alpha: int) -> tuple[Tensor, Tensor]:
    """Raise priorities to alpha, Q62; exact for alpha 1.

    Args:
        bits: Of float32 that are finite and above 0. [...], int64.
        alpha: In [0, 2^62].
    Returns:
        Significand and exponent, as those of `exp2`.
    """
    biased, low = bits >> 23, bits & 0x7FFFFF
    mantissa, exponent = torch.where(biased > 0, low | 0x800000, low), biased.clamp(min=1) - 150
    if alpha == ONE_Q62:
        top = highest_bit(mantissa)
        return mantissa << (62 - top), top + exponent
    return exp2(scale(log2(mantissa) + (exponent << _LOG_BITS), alpha))


def float_bits(significand: Tensor, exponent: Tensor) -> Tensor:
    """Round powers to float32, ties to even; the largest one beyond the range, 0 below the normal ones.

    Returns:
        The bits. [...], int64.
    """
    drop, largest = 62 - 23, 0x7F7FFFFF
    kept, rest, half = significand >> drop, significand & ((1 << drop) - 1), 1 << (drop - 1)
    up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    bits = (((exponent + 126) << 23) + kept + up).clamp(max=largest)
    return torch.where(exponent < -126, 0, torch.where(exponent > 127, largest, bits))
