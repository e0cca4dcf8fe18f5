"""Conditions (`where`): which values of a column pass, and which prompts of a data set are left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.stored_values import as_numbers


@dataclass(frozen=True)
class Condition:
    """A filter on a per-trajectory column; every given bound must hold."""

    column: str
    minimum: int | float | None = None
    maximum: int | float | None = None
    among: tuple[int | float, ...] | None = None

    def holds(self, values: np.ndarray) -> np.ndarray:
        """Return which values pass. [n] -> [n], bool."""
        if values.dtype == bool:  # compared as the numbers 0 and 1
            values = values.view(np.uint8)
        result = np.ones(len(values), bool)
        if self.minimum is not None:
            result &= values >= self.minimum
        if self.maximum is not None:
            result &= values <= self.maximum
        if self.among is not None:
            among = np.asarray(self.among)
            if values.dtype.kind in "iu":
                # As integers: through float64, large ones would be rounded. No value equals the
                # others.
                limits = np.iinfo(values.dtype)
                fitting = [
                    int(n) for n in self.among if limits.min <= n <= limits.max and n == int(n)
                ]
                among = np.asarray(fitting, values.dtype)
            result &= np.isin(values, among.astype(values.dtype))
        return result


def admitted_prompts(dataset: Dataset, conditions: Iterable[Condition]) -> np.ndarray:
    """Return the places of the prompts in their data set that pass all conditions, ascending.

    Args:
        dataset: Each of its trajectories is a prompt.
        conditions: Conditions on its per-trajectory columns.
    Returns:
        [n], int64.
    Cost: a pass over each column of a condition.
    """
    passes = np.ones(len(dataset), bool)
    for condition in conditions:
        column = dataset.schema[condition.column]
        passes &= condition.holds(as_numbers(dataset.columns[column.name][:], column))
    return np.nonzero(passes)[0]
