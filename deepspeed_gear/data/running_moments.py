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
    """Return moments merged with those of the finite values in rows, [r, elements], r >= 1."""
    finite = np.isfinite(rows)
    count = finite.sum(axis=0)
    begins = rows[finite.argmax(axis=0), np.arange(len(count))]
    first = np.where(moments[Moment.COUNT] > 0, moments[Moment.FIRST], begins)
    low = rows
    high = rows
    distances = rows - first
    if not finite.all():
        low = np.where(finite, rows, np.inf)
        high = np.where(finite, rows, -np.inf)
        distances = np.where(finite, distances, 0.0)
    mean = distances.sum(axis=0) / np.maximum(count, 1)
    delta = (distances - mean) * finite
    # Without rounding, the deltas would sum to 0; the second term corrects what the mean lacks.
    squares = (delta * delta).sum(axis=0) - delta.sum(axis=0) ** 2 / np.maximum(count, 1)
    added = np.stack([count, first, mean, squares, low.min(axis=0), high.max(axis=0)])
    return merge([moments, added])
