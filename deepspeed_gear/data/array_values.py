"""Conversion of nested lists to arrays: texts become objects, so that arrays stay small."""

from __future__ import annotations

from typing import Any

import numpy as np

_TEXTS = (str, bytes, bytearray)
_TEXT_KINDS = "SU"


def as_array(value: Any) -> np.ndarray:
    """Convert a value as `np.asarray` does, but lists that hold texts to an array of objects.

    NumPy gives each element of an array of texts the length of the longest: 20,000 letters and one
    text of 40,000 characters take 3 GiB. An array of texts becomes one of objects as well, since
    concatenating it with another would give both the length of the longest text.
    """
    if not holds_text(value):
        return np.asarray(value)
    length = len(value) if isinstance(value, (list, tuple)) or np.ndim(value) else None
    made = np.empty(() if length is None else length, object)
    made[...] = value if length is None else None
    return made


def holds_text(value: Any) -> bool:
    """Return whether a value is a text, an array of texts, or a nested list that holds one.

    Cost: one visit of each list, even of one that occurs in others many times.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, _TEXTS):
            return True
        if isinstance(part, np.ndarray) and part.dtype.kind in _TEXT_KINDS:
            return True
        if not isinstance(part, (list, tuple)) or id(part) in seen:
            continue
        seen.add(id(part))
        if set(map(type, part)) <= {bool, int, float}:
            continue
        waiting += [one for one in part if isinstance(one, (*_TEXTS, list, tuple, np.ndarray))]
    return False
