"""Sets of slots and owners.

`numpy.unique` and `numpy.isin` import `numpy.ma` when they are first called: 15 to 100 ms, for a writer
that holds the store's lock. Code that runs there uses these functions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def distinct(values: np.ndarray) -> np.ndarray:
    """Return each value once, ascending. [n] -> [m]."""
    ordered = np.sort(values)
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def is_among(values: np.ndarray, few: Sequence[int]) -> np.ndarray:
    """Return which values are among a few. [n] -> [n], bool."""
    return np.asarray((values[:, None] == np.asarray(few, values.dtype)).any(-1))
