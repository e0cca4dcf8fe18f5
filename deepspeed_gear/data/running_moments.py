"""Moments of columns' elements: of the rows of a data set, and running, of all that a table has
ever got.

They are arrays of float64, `[Moment.NUM_WORDS, elements]`, of the normalised columns one after the
other. The store keeps running ones (ops/csrc/store/moments.h); all ranks compute with the copy that
a selection has. Merged are means and squared deviations, so no difference of large sums is ever
taken, and these are of distances from an element's first value: those of time stamps would lose the
bits that differ.

Source: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
Variances",
    1979, equation 1.5b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.schema import Column

Float64 = NDArray[np.float64]


class Moment:
    """Arrays of running moments; elements without a finite value are zero. Header:
    store/moments.h.
    """

    COUNT: Final = 0  # finite values
    FIRST: Final = 1  # the first one, from which distances are taken
    MEAN: Final = 2  # less the first one
    SQUARES: Final = 3  # sum of squared deviations from the mean
    LEAST: Final = 4
    GREATEST: Final = 5
    NUM_WORDS: Final = 6


def moments_size(columns: Sequence[Column]) -> int:
    """Return the number of elements of columns, all together."""
    return sum(column.num_elements for column in columns)


@np.errstate(over="ignore", invalid="ignore")
def merge(parts: Sequence[Float64]) -> Float64:
    """Merge moments, [6, elements], in order; those without rows change no bit."""
    total = np.array(parts[0])
    for part in parts[1:]:
        known = total[Moment.COUNT]
        added = part[Moment.COUNT]
        share = added / np.maximum(known + added, 1.0)
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
    """Return moments merged with those of the finite values of rows, [r, elements], r >= 1."""
    finite = np.isfinite(rows)
    count = finite.sum(axis=0)
    begins = rows[finite.argmax(axis=0), np.arange(len(count))]
    first = np.where(moments[Moment.COUNT] > 0, moments[Moment.FIRST], begins)
    low, high, rows = rows, rows, rows - first
    if not finite.all():
        low, high = np.where(finite, low, np.inf), np.where(finite, high, -np.inf)
        rows = np.where(finite, rows, 0.0)
    mean = rows.sum(axis=0) / np.maximum(count, 1)
    delta = (rows - mean) * finite
    squares = (delta * delta).sum(axis=0) - delta.sum(axis=0) ** 2 / np.maximum(count, 1)
    return merge(
        [moments, np.stack([count, first, mean, squares, low.min(axis=0), high.max(axis=0)])]
    )
