"""Conditions on the columns of prompts, which leave prompts out of a ledger."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.stored_values import as_numbers
from deepspeed_gear.sampling.mass_rules import Condition


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
