"""Running moments of columns' elements, over all rows that a table has ever got: merged, and as statistics.

They are arrays of float64, `[Moment.NUM_WORDS, elements]`, of the normalised columns one after the other. The
store keeps them (ops/csrc/store/moments.h); all ranks compute with the copy that a selection has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from deepspeed_gear.data.dataset_statistics import LEAST_SPREAD, ColumnStatistics, Float64
from deepspeed_gear.schema import Column

_SPREADS = 1e-307, 1e307  # whose reciprocals float64 holds


class Moment:
    """Arrays of running moments; elements without a finite value are zero. Header: store/moments.h."""

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


def merge(parts: Sequence[Float64]) -> Float64:
    """Merge shards' moments, [6, elements], in order, as `Moments` does; one without rows changes no bit."""
    total = np.array(parts[0])
    for part in parts[1:]:
        known, added = total[Moment.COUNT], part[Moment.COUNT]
        with np.errstate(over="ignore", invalid="ignore"):
            share = added / np.maximum(known + added, 1.0)
            away = (part[Moment.FIRST] - total[Moment.FIRST]) + (part[Moment.MEAN] - total[Moment.MEAN])
            both = np.stack(
                [
                    known + added,
                    total[Moment.FIRST],
                    total[Moment.MEAN] + away * share,
                    total[Moment.SQUARES] + (part[Moment.SQUARES] + away * away * (known * share)),
                    np.minimum(total[Moment.LEAST], part[Moment.LEAST]),
                    np.maximum(total[Moment.GREATEST], part[Moment.GREATEST]),
                ]
            )
        total = np.where(added == 0, total, np.where(known == 0, part, both))
    return total


@np.errstate(over="ignore", invalid="ignore")
def statistics(moments: Float64, columns: Sequence[Column]) -> dict[str, ColumnStatistics]:
    """Return what columns are normalised with, by name; without quantiles.

    An element with fewer than two finite values is left as it is: mean 0, deviation 1. So is the deviation of
    one that is constant, or whose spread float64 does not hold beside its mean: it may vary later.
    """
    count, mean = moments[Moment.COUNT], moments[Moment.FIRST] + moments[Moment.MEAN]
    std = np.sqrt(moments[Moment.SQUARES] / np.maximum(count, 1.0))
    least = np.maximum(2 * LEAST_SPREAD * np.spacing(np.abs(mean)), _SPREADS[0])
    varies = (count >= 2) & (std >= least) & (std <= _SPREADS[1])
    mean = np.where((count >= 2) & np.isfinite(mean), mean, 0.0)
    low, high = (np.where(varies, moments[word], mean) for word in (Moment.LEAST, Moment.GREATEST))
    arrays = {"mean": mean, "std": np.where(varies, std, 1.0), "min": low, "max": high}
    found, first = {}, 0
    for column in columns:
        own = slice(first, first + column.num_elements)
        parts = {name: array[own].reshape(column.shape) for name, array in arrays.items()}
        most = int(count[own].max(initial=0))
        found[column.name] = ColumnStatistics(most, **parts, quantiles={}, quantile_rows=0, non_finite=0)
        first = own.stop
    return found
