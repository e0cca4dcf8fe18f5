"""Filters of `sampler.where` on trajectories that are added to a table on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepspeed_gear.errors import SchemaError
from deepspeed_gear.sampling.mass_rules import Condition
from deepspeed_gear.schema import DTYPES, Schema


class AddFilter:
    """Which trajectories may be drawn; the others are not stored. Waits for nothing.

    Args:
        conditions: Of the sampler, on columns of a value per trajectory; all must hold.
    Raises:
        SchemaError: A column is late: its values are not there when the trajectory is added.
    """

    def __init__(self, conditions: Sequence[Condition], schema: Schema, device: torch.device) -> None:
        self._conditions = tuple(conditions)
        for condition in conditions:
            if schema[condition.column].late:
                rule = "must not be late where gear.sampler.where names it, in a table on devices"
                raise SchemaError(f"column {condition.column}", rule)
        self._among = {
            condition.column: _members(condition.among, DTYPES[schema[condition.column].dtype]).to(device)
            for condition in conditions
            if condition.among is not None
        }

    @property
    def columns(self) -> frozenset[str]:
        """The columns that are read."""
        return frozenset(condition.column for condition in self._conditions)

    def lengths(self, columns: Mapping[str, Tensor], lengths: Tensor | None, steps: int) -> Tensor | None:
        """Return the lengths of trajectories, 0 for those that fail a condition; None: all are `steps`.

        Args:
            columns: Of the trajectories. [E, *shape].
            lengths: Steps of each; None: all `steps`. [E], int64.
        """
        for condition in self._conditions:
            values = columns[condition.column]
            holds = self._holds(condition, values)
            kept = torch.full_like(holds, steps, dtype=torch.int64) if lengths is None else lengths
            lengths = torch.where(holds, kept, torch.zeros_like(kept))
        return lengths

    def _holds(self, condition: Condition, values: Tensor) -> Tensor:
        if values.dtype == torch.bool:
            values = values.to(torch.uint8)
        holds = torch.ones_like(values, dtype=torch.bool)
        # A float bound would round large integers: compared are integers.
        exact = not values.dtype.is_floating_point
        if condition.minimum is not None:
            least = math.ceil(condition.minimum) if exact else condition.minimum
            holds &= _compare(values, least, is_least=True)
        if condition.maximum is not None:
            most = math.floor(condition.maximum) if exact else condition.maximum
            holds &= _compare(values, most, is_least=False)
        if condition.among is not None:
            holds &= (values[:, None] == self._among[condition.column]).any(1)
        return holds


def _compare(values: Tensor, bound: float, is_least: bool) -> Tensor:
    """Return which values are at least, or at most, a bound that their dtype may not hold. [n], bool."""
    if not values.dtype.is_floating_point:
        limits = torch.iinfo(values.dtype)
        if not limits.min <= bound <= limits.max:
            return torch.full_like(values, (bound < limits.min) == is_least, dtype=torch.bool)
    return values >= bound if is_least else values <= bound


def _members(among: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Return the numbers that a dtype can hold. [n]."""
    if dtype.is_floating_point:
        return torch.tensor([float(number) for number in among], dtype=dtype)
    held = torch.uint8 if dtype == torch.bool else dtype
    limits = torch.iinfo(held)
    found = [int(number) for number in among if limits.min <= number <= limits.max and number == int(number)]
    return torch.tensor(found, dtype=held)
