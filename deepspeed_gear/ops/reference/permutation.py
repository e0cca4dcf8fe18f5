"""Reference op of the order in which an epoch visits its items: a keyed permutation, place by place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.records import RandomPurpose

from .integers import shift_right, signed
from .select import philox

_FEISTEL_ROUNDS, _LEAST_BITS = 8, 8


def permute_(coordinates: Tensor, seed: int, stream: int, epoch: int, first: int, size: int) -> None:
    """Set coordinates[i] to the place of index first + i in the epoch's permutation of [0, size).

    A Feistel network over the next power of two (at least 2^8: fewer bits mix badly), walked along its cycles
    until it lands inside.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """
    if not 0 <= first <= size - len(coordinates):
        raise ShapeError("first", f"must keep {len(coordinates)} indices in [0, {size})", first)
    bits = max(_LEAST_BITS, (size - 1).bit_length())
    right_bits = bits - bits // 2
    keys = _permutation_keys(seed, stream, epoch)
    index = torch.arange(len(coordinates)) + first
    outside = torch.ones_like(index, dtype=torch.bool)
    while outside.any():
        index[outside] = _feistel(index[outside], bits // 2, right_bits, keys)
        outside = index >= size
    coordinates.copy_(index)


def _permutation_keys(seed: int, stream: int, epoch: int) -> list[int]:
    words = [
        philox(seed, torch.tensor(epoch), stream, RandomPurpose.PERMUTATION + (pair << 8))
        for pair in range(1, _FEISTEL_ROUNDS // 2 + 1)
    ]
    return [int(half) for word in words for half in word]


def _feistel(index: Tensor, left_bits: int, right_bits: int, keys: Sequence[int]) -> Tensor:
    left_mask, right_mask = (1 << left_bits) - 1, (1 << right_bits) - 1
    left, right = index >> right_bits, index & right_mask
    for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ (_mix(right + key_left) & left_mask)
        right = right ^ (_mix(left + key_right) & right_mask)
    return (left << right_bits) | right


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer. Source: Steele, Lea, Flood, "Fast splittable ...", OOPSLA 2014."""
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)
