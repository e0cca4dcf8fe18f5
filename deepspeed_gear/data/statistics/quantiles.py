"""Quantiles of a column: which ones are kept, and their interpolation, as in `np.quantile`.

Three searches find these values, with equal results. Which one is used is decided in
`dataset_statistics.py`:

- `quantile_brackets.py`: one pass over the rows; needs a sample of them.
- `quantile_bins.py`: three or four passes over an array in memory or in a file.
- `quantile_digits.py`: several passes over blocks of rows, in little memory for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.statistics.running_moments import Float64

Bool = NDArray[np.bool_]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

#: Quantiles that the statistics of a column keep. `normalize` of a field reads two of them.
QUANTILES = ("0.01", "0.1", "0.25", "0.5", "0.75", "0.9", "0.99")
LEVELS = np.array([float(level) for level in QUANTILES])


def no_values(levels: Float64, num_elements: int) -> Float64:
    """Return the result of a search that has found nothing.

    Returns:
        The number of finite values of each element, then the lower value by level, then the higher
        one. [1 + 2 * levels, elements], NaN.
    """
    return np.full((1 + 2 * len(levels), num_elements), np.nan)


def ranks_around(levels: Float64, num_finite: Int64) -> Int64:
    """Return the ranks of the values around quantiles, among finite values in ascending order.

    Of 11 values and the level 0.25 they are 2 and 3: the quantile lies in the middle of the two.

    Args:
        num_finite: Finite values of each element. [elements]
    Returns:
        The rank of the lower value by level, then of the higher one. [2 * levels, elements].
    """
    last = np.maximum(num_finite - 1, 0)
    low = np.floor(last * levels[:, None]).astype(np.int64)
    return np.concatenate([low, np.minimum(low + 1, last)])


def interpolated(found: Float64, levels: Float64) -> Float64:
    """Return the quantiles, interpolated linearly between the values around them.

    Args:
        found: The result of a search, as in `no_values`.
    Returns:
        [levels, elements].
    """
    low = found[1 : 1 + len(levels)]
    high = found[1 + len(levels) :]
    place = (np.maximum(found[0], 1) - 1) * levels[:, None]
    share = place - np.floor(place)
    with np.errstate(over="ignore", invalid="ignore"):
        spread = high - low
        values = np.where(share < 0.5, low + spread * share, high - spread * (1 - share))
    return np.asarray(values)


def divided(
    find: Callable[[int, int], None], num_elements: int, num_tasks: int
) -> list[Callable[[], None]]:
    """Return tasks that call `find(first, end)` for equal parts of a column's elements."""
    bounds = [num_elements * i // num_tasks for i in range(num_tasks + 1)]
    return [partial(find, *bound) for bound in pairwise(bounds)]
