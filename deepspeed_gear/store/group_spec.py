"""Specification of a table's groups: which trajectories belong together, and when a group is
complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from deepspeed_gear.schema import Column


class SlotGroup:
    """Words of a slot in a table of groups. Of the leader of a complete group also those from FIRST
    on.
    """

    LEADER: Final = (
        0  # slot of the group's leader, plus 1; 0: the group is not complete; or REJECTED
    )
    LEAVING: Final = 1  # its group is being evicted: 1, or REMOVED by the program
    TIME: Final = 2  # of its commit, or of its latest `fill`, in nanoseconds of the monotonic clock
    NEXT: Final = 3  # slot of the group's next trajectory, plus 1; 0: it is the last one
    FIRST: Final = 4  # slot of the group's first trajectory, plus 1
    COUNT: Final = 5  # trajectories
    STEPS: Final = 6  # of all of them
    NUMBER: Final = 7  # complete groups ever, up to this one
    DRAWN: Final = 8  # 1: a selection has drawn the group
    NUM_WORDS: Final = 9
    REJECTED: Final = -1  # a data set's group that fails a condition
    REMOVED: Final = 2


class GroupCount:
    """Words of the groups of a table."""

    SEEN: Final = 0  # the table's Control.CHANGED up to which groups are formed
    DUE: Final = (
        1  # monotonic nanoseconds at which a group may be complete without all of its members
    )
    HELD: Final = 2  # complete groups
    INSERTED: Final = 3  # complete groups ever
    REJECTED: Final = 4  # groups ever that failed a condition
    OVERSIZED: Final = 5  # groups ever that had too many trajectories
    # Trajectories ever that were evicted since their group is complete without them:
    LATE: Final = 6  # they came when it was complete
    LATE_CONSUMED: Final = 7  # they came when it had left the table
    UNFILLED: Final = 8  # they lacked a late column when it became complete
    SURPLUS: Final = 9  # they were more than `size` when it became complete
    EVICTED_UNSAMPLED: Final = (
        10  # complete groups ever that were evicted before any selection drew them
    )
    RECENT_PASSED: Final = 11  # of the latest groups, at most RECENT: those that are complete,
    RECENT_FAILED: Final = 12  # and those that failed a condition or were too large
    CONSUMED: Final = 13  # numbers ever written to the ring of groups that have left the table
    NUM_WORDS: Final = 16


RECENT: Final = 256  # groups
# Counts of `TableGroups.statistics`, in its order, beside the numbers of complete and incomplete
# groups.
_COUNTED = "rejected oversized late late_consumed unfilled surplus evicted_unsampled".split()
COUNTED: Final[dict[str, int]] = {name: getattr(GroupCount, name.upper()) for name in _COUNTED}


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
        """Return which groups pass, [groups], bool; one with a NaN does not. `values` group by
        group, [n]; `begins` of each group's first, and `counts` >= 1, [groups], int64.
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


@dataclass(frozen=True)
class GroupSpec:
    """Groups of a table's trajectories."""

    column: str  # per-trajectory column of integers; the trajectories of a group have one value
    size: int  # members of a group
    # Per-trajectory column of integers, one for each member of a group; None: each trajectory is
    # a member.
    member: str | None = None
    late: tuple[str, ...] = ()  # late columns that a trajectory must have
    # Seconds after its latest commit or `fill` at which a group with `min_size` members is
    # complete.
    after_s: float | None = None  # None: never
    min_size: int = 0
    where: tuple[GroupCondition, ...] = ()  # a group that fails one is evicted when it is complete
    max_trajectories: int = 0  # of a group
    remember: int = (
        0  # groups that have left the table, at most, of which late trajectories are dropped
    )
