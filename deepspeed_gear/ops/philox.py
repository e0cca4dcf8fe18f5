"""Philox random words in NumPy: the definition for ops, and for the few draws without one."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64).reshape(2, 1, 1)
#: Four quarters of random words, the highest first. [..., n] each, uint64.
Words = tuple[np.ndarray, ...]


def philox(seed: int, numbers: np.ndarray, stream: int, purposes: np.ndarray) -> Words:
    """Make a random word of 128 bits for each number and purpose.

    Args:
        numbers: [n], uint64.
        purposes: [p, 1], uint64.
    Returns:
        Quarters of the words, the highest first. [p, n] each.
    """
    shape = np.broadcast_shapes(numbers.shape, purposes.shape)
    # The words 0 and 2 of the counter, and its words 1 and 3, of 32 bits each. A round multiplies
    # the even words; the lower halves become the odd words, crosswise, and the upper halves, with
    # the odd words and the key, the even ones.
    even = np.empty((2, *shape), np.uint64)
    odd = np.empty((2, *shape), np.uint64)
    even[0] = numbers & _LOW
    even[1] = stream & 0xFFFFFFFF
    odd[0] = numbers >> _SHIFT
    odd[1] = purposes
    for keys in _round_keys(seed):
        product = even * _MULTIPLIERS
        even = (product >> _SHIFT)[::-1] ^ odd
        even ^= keys
        odd = product[::-1] & _LOW
    return odd[0], even[0], odd[1], even[1]


def philox_words(seed: int, numbers: Tensor, stream: int, purpose: int) -> tuple[Tensor, Tensor]:
    """Make the upper and lower 64 bits of a random word per sample number (Philox4x32-10).

    The counter is the number, 32 bits of `stream` and 32 of `purpose`; the key is `seed`.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
    """
    flat = numbers.reshape(-1).numpy().view(np.uint64)
    quarters = philox(seed, flat, stream, np.array([[purpose]], np.uint64))
    a, b, c, d = (torch.from_numpy(one.view(np.int64)).reshape(numbers.shape) for one in quarters)
    return (a << 32) | b, (c << 32) | d


def word(seed: int, number: int, stream: int, purpose: int) -> int:
    """Return the random word of one number, of 128 bits: that of `philox` in plain integers.

    For single draws, for which NumPy takes ten times as long.
    """
    mask = 0xFFFFFFFF
    key = [seed & mask, seed >> 32 & mask]
    even = [number & mask, stream & mask]
    odd = [number >> 32 & mask, purpose]
    for _ in range(10):
        first = 0xD2511F53 * even[0]
        second = 0xCD9E8D57 * even[1]
        even = [second >> 32 ^ odd[0] ^ key[0], first >> 32 ^ odd[1] ^ key[1]]
        odd = [second & mask, first & mask]
        key = [key[0] + 0x9E3779B9 & mask, key[1] + 0xBB67AE85 & mask]
    return odd[0] << 96 | even[0] << 64 | odd[1] << 32 | even[1]


@lru_cache(maxsize=8)
def _round_keys(seed: int) -> list[np.ndarray]:
    """Return the two key words of each of the 10 rounds. [2, 1, 1] each, uint64."""
    steps = np.array([0x9E3779B9, 0xBB67AE85], np.uint64).reshape(2, 1, 1)
    first = np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint64).reshape(2, 1, 1)
    return [(first + np.uint64(i) * steps) & _LOW for i in range(10)]


def below(words: Words, totals: np.ndarray) -> np.ndarray:
    """Return floor(word * total / 2^128), [n], int64, for totals below 2^32.

    It is uniform up to 2^-96 relative.
    """
    total = totals.astype(np.uint64)
    # Long multiplication from the lowest quarter up: only the carry out of the highest is kept.
    carry = np.zeros(len(totals), np.uint64)
    for quarter in reversed(words):
        carry = (quarter * total + carry) >> _SHIFT
    return carry.astype(np.int64)
