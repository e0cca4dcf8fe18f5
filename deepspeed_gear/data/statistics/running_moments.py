"""Running moments of columns' elements: count, mean, squared deviations, least and greatest.

They are arrays of float64, `[Moment.NUM_WORDS, elements]`, with the elements of all normalised
columns one after the other. The statistics of a data set use them for one pass; a store keeps them
over all rows that were ever added to a table (ops/csrc/store/moments.h), and all ranks compute with
the copy that a selection holds.

Means and squared deviations are merged, so no difference of two large sums is taken. Both are those
of the distances from an element's first value: the values themselves, such as time stamps, would
lose the bits in which they differ.

Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances", 1979, equation 1.5b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.schema import Column

Float64 = NDArray[np.float64]
_PARTS = 8
_MOST_DIVIDED = 32  # elements of the widest rows that are summed in parts


class Moment:
    """Rows of a moments array; an element without a finite value is 0 in all of them.

    The header with the same layout is ops/csrc/store/moments.h.
    """

    COUNT: Final = 0  # number of finite values
    FIRST: Final = 1  # the first value, from which distances are taken
    MEAN: Final = 2  # mean distance from the first value
    SQUARES: Final = 3  # sum of squared deviations from the mean
    LEAST: Final = 4
    GREATEST: Final = 5
    NUM_WORDS: Final = 6


def moments_size(columns: Sequence[Column]) -> int:
    """Return the number of elements of all columns together."""
    return sum(column.num_elements for column in columns)


@np.errstate(over="ignore", invalid="ignore")
def merge(parts: Sequence[Float64]) -> Float64:
    """Merge moments, [6, elements], in order; a part without rows changes no bit of the result."""
    total = np.array(parts[0])
    for part in parts[1:]:
        known = total[Moment.COUNT]
        added = part[Moment.COUNT]
        share = added / np.maximum(known + added, 1.0)
        # Distance of the two means. Differences of first values and of mean distances are taken
        # apart, so that the large values themselves are never added to small distances.
        away = (part[Moment.FIRST] - total[Moment.FIRST]) + (part[Moment.MEAN] - total[Moment.MEAN])
        mean = total[Moment.MEAN] + away * share
        squares = total[Moment.SQUARES] + (part[Moment.SQUARES] + away * away * (known * share))
        least = np.minimum(total[Moment.LEAST], part[Moment.LEAST])
        greatest = np.maximum(total[Moment.GREATEST], part[Moment.GREATEST])
        both = np.stack([known + added, total[Moment.FIRST], mean, squares, least, greatest])
        total = np.where(added == 0, total, np.where(known == 0, part, both))
    return total


@np.errstate(over="ignore", invalid="ignore")
def add_rows(moments: Float64, rows: Float64) -> Float64:
    """Return moments merged with those of the finite values in rows, [r, elements], r >= 1.

    The native module gives the same bits (ops/csrc/statistics/statistics.h): the order of all sums
    is fixed, see `_sum`.
    """
    finite = np.isfinite(rows)
    count = finite.sum(axis=0).astype(np.float64)
    first = rows[finite.argmax(axis=0), np.arange(len(count))]
    first = np.where(count > 0, first, 0.0)
    low = rows
    high = rows
    distances = rows - first
    if not finite.all():
        low = np.where(finite, rows, first)
        high = low
        distances = np.where(finite, distances, 0.0)
    mean = _sum(distances) / np.maximum(count, 1.0)
    delta = np.where(finite, distances - mean, 0.0)
    # Without rounding, the deltas would sum to 0; the second term corrects what the mean lacks.
    rest = _sum(delta)
    squares = _sum(delta * delta) - rest * rest / np.maximum(count, 1.0)
    added = np.stack([count, first, mean, squares, low.min(axis=0), high.max(axis=0)])
    return merge([moments, added])


def _sum(rows: Float64) -> Float64:
    """Sum rows, [r, elements]; narrow ones in 8 parts, which are added in their order.

    With parts, row i belongs to part i % 8: of 10 rows, part 0 sums rows 0 and 8. Vector
    instructions add the parts of one element at the same time.
    """
    num_rows, num_elements = rows.shape
    parts = _PARTS if num_elements <= _MOST_DIVIDED else 1
    whole = -(-num_rows // parts) * parts
    padded = rows
    if whole != num_rows:
        padded = np.concatenate([rows, np.zeros((whole - num_rows, num_elements))])
    # NumPy adds the lines of an array with a long last axis one after the other.
    lines = np.add.reduce(padded.reshape(-1, parts * num_elements), axis=0)
    lines = (lines + 0.0).reshape(parts, num_elements)  # the native sums begin with 0, not with -0
    total = lines[0]
    for part in lines[1:]:
        total = total + part
    return np.asarray(total)
