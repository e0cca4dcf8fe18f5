"""Conditions on groups: bounds of a statistic of a column over the members of a group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deepspeed_gear.schema import Column


def _std(values: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    centred = values - np.repeat(np.add.reduceat(values, begins) / counts, counts)
    # The second pass removes what rounding left in the mean: equal values have the deviation 0.
    centred -= np.repeat(np.add.reduceat(centred, begins) / counts, counts)
    variance = np.add.reduceat(centred * centred, begins) / np.maximum(counts - 1, 1)
    return np.asarray(np.sqrt(variance))


def _mean(values: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    mean = np.add.reduceat(values, begins) / counts
    # Rounding must not lift it over equal values: (0.1 + 0.1 + 0.1) / 3 is 0.10000000000000002.
    least = np.minimum.reduceat(values, begins)
    greatest = np.maximum.reduceat(values, begins)
    return np.asarray(np.clip(mean, least, greatest))


def _rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """Round to so many significant bits at any exponent. [n], float64."""
    if bits >= 53:
        return values
    fraction, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits))


STATISTICS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "std": _std,
    "mean": _mean,
    "min": lambda values, begins, _: np.minimum.reduceat(values, begins),
    "max": lambda values, begins, _: np.maximum.reduceat(values, begins),
    "sum": lambda values, begins, _: np.add.reduceat(values, begins),
}


@dataclass(frozen=True)
class GroupCondition:
    """Bounds of a statistic of a per-trajectory column over the members of a group.

    The statistic is computed in float64. Of a floating column it is compared as precisely as the
    column stores numbers: four of five float32 rewards of 1 have a mean of at least, and of at
    most, 0.8.
    """

    column: str  # of a member of several trajectories the last one's value counts
    statistic: str  # a key of `STATISTICS`; "std" is divided by the number of members - 1
    minimum: float | None = None  # inclusive, as the other one; None: no bound
    maximum: float | None = None
    bits: int = 53  # of the column's significand, to which statistic and bounds are rounded

    @classmethod
    def of(
        cls, column: Column, statistic: str, minimum: float | None, maximum: float | None
    ) -> GroupCondition:
        """Return the condition on a column, with the bounds that it holds."""
        bits = column.significant_bits

        def nearest(bound: float) -> float:
            # Not to 0, which a deviation of 0 would reach, and not to infinity.
            return float(_rounded(np.asarray(column.nearest(bound) or bound), bits))

        low, high = (None if end is None else nearest(end) for end in (minimum, maximum))
        return cls(column.name, statistic, low, high, bits)

    def holds(self, values: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Return which groups pass; one with a NaN does not. [groups], bool.

        Args:
            values: Values of the members, group by group. [n].
            begins: Where each group begins in `values`. [groups], int64.
            counts: Members of each group, at least 1. [groups], int64.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            found = _rounded(
                STATISTICS[self.statistic](values.astype(np.float64), begins, counts), self.bits
            )
            passes = ~np.isnan(found)
            if self.minimum is not None:
                passes &= found >= self.minimum
            if self.maximum is not None:
                passes &= found <= self.maximum
        return np.asarray(passes)
