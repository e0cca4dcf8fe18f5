"""Masses: what makes one trajectory more likely than another."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from deepspeed_gear.selection.anchors import AnchorRule
from deepspeed_gear.store.split import split_of

Unit = Literal["trajectory", "step"]
UNIT_CODES: dict[str, int] = {"trajectory": 0, "step": 1}


@dataclass(frozen=True)
class Condition:
    """A filter on a per-trajectory column; every given bound must hold."""

    column: str
    minimum: float | None = None
    maximum: float | None = None
    among: tuple[float, ...] | None = None

    def holds(self, values: np.ndarray) -> np.ndarray:
        """Return which values pass. [n] -> [n], bool."""
        result = np.ones(len(values), bool)
        if self.minimum is not None:
            result &= values >= self.minimum
        if self.maximum is not None:
            result &= values <= self.maximum
        if self.among is not None:
            result &= np.isin(values, _as_dtype(self.among, values.dtype))
        return result


def _as_dtype(numbers: tuple[float, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Return those numbers that a dtype can hold, in it: through float64, large integers would be rounded."""
    if dtype.kind not in "iu":
        return np.asarray(numbers, dtype)
    limits = np.iinfo(dtype)
    return np.asarray([int(n) for n in numbers if limits.min <= n <= limits.max], dtype)


@dataclass(frozen=True)
class MassRule:
    """The integer mass of each trajectory in one stream.

    Args:
        unit: What an item is. A step item has one unit of mass per anchor, so all steps are equally likely.
        by_length: Trajectories in proportion to their number of steps.
        anchors: Which steps are admissible; a trajectory without one has mass 0.
        where: Filters that must all hold.
        split: Fractions of the splits.
        split_index: The split this stream draws from; 0 is training.
    """

    unit: Unit
    by_length: bool
    anchors: AnchorRule
    where: tuple[Condition, ...] = ()
    split: Mapping[str, float] = field(default_factory=dict)
    split_index: int = 0

    def masses(
        self, ids: np.ndarray, num_steps: np.ndarray, column: Callable[[str], np.ndarray]
    ) -> np.ndarray:
        """Return the mass of trajectories.

        Args:
            ids: [n], int64.
            num_steps: Their lengths. [n], int64.
            column: Gives their values of a per-trajectory column. [n].
        Returns:
            [n], int64.
        """
        anchors = self.anchors.num_anchors(num_steps)
        if self.unit == "step":
            masses = anchors
        else:
            masses = np.where(anchors > 0, num_steps if self.by_length else 1, 0)
        keep = np.ones(len(ids), bool)
        for condition in self.where:
            keep &= condition.holds(column(condition.column))
        if self.split:
            keep &= split_of(ids, self.split) == self.split_index
        return np.where(keep, masses, 0).astype(np.int64)


def key_of(*names: str) -> int:
    """Return the 32-bit stream key of a table and a stream, a part of the counter of every draw."""
    return zlib.crc32("\0".join(names).encode())
