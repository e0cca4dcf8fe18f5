"""Ragged columns: each step of a trajectory has its own number of values.

A teacher's top-p support is an example: token ids and log-probabilities, one to a few hundred of
each for every token. The values of a trajectory are stored one after the other, with the count of
each step, as one item in the pages of the table's store (`store/media_pages.py`). For counts
[2, 0, 3] the offsets are [0, 2, 2, 5].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.stored_values import as_stored, check_finite
from deepspeed_gear.errors import DataError, ShapeError
from deepspeed_gear.schema import Column

_COUNT_DTYPES = ("uint8", "int16", "int32")


class Ragged:
    """Values of steps, of which each has its own number.

    Step t has `values[offsets[t]:offsets[t + 1]]`. In a micro batch the steps are the places of
    the pack.

    Args:
        values: The values of all steps, one step after the other. [n].
        offsets: First value of each step, and n. [T + 1], integers.
    Raises:
        ShapeError: One of them is not one-dimensional, or the offsets are no integers.
    """

    def __init__(self, values: Any, offsets: Any) -> None:
        self.values = _tensor("values", values)
        self.offsets = _tensor("offsets", offsets)
        if self.offsets.is_floating_point() or self.offsets.dtype == torch.bool:
            rule = "must be integers"
            given = str(self.offsets.dtype)
            raise ShapeError("ragged offsets", rule, given, "give [0, ..., len(values)]")
        self.offsets = self.offsets.long()

    @classmethod
    def of_rows(cls, rows: Sequence[Any]) -> Ragged:
        """Join the values of each step: arrays, tensors or lists of numbers. [k_t] each."""
        counts = [len(row) for row in rows]
        offsets = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
        parts = [row for row in rows if len(row)]  # an empty list would make integers floats
        if not parts:
            return cls(torch.zeros(0), offsets)
        if all(isinstance(row, torch.Tensor) for row in parts):
            return cls(torch.cat(parts), offsets)
        return cls(np.concatenate([np.asarray(row) for row in parts]), offsets)

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.offsets) - 1

    def __getitem__(self, step: int) -> torch.Tensor:
        """Return the values of a step. [k], a view."""
        steps = range(len(self))[step]  # IndexError, and steps from the end
        return self.values[int(self.offsets[steps]) : int(self.offsets[steps + 1])]

    def __eq__(self, other: object) -> bool:
        """Return whether both have equal counts and values."""
        return (
            isinstance(other, Ragged)
            and torch.equal(self.offsets, other.offsets)
            and torch.equal(self.values, other.values)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Ragged({len(self)} steps, {len(self.values)} values, {self.values.dtype})"

    @property
    def counts(self) -> torch.Tensor:
        """Number of values of each step. [T], int64."""
        return self.offsets.diff()

    @property
    def steps(self) -> torch.Tensor:
        """Step of each value: [0, 0, 2, 2, 2] for the counts [2, 0, 3]. [n], int64."""
        every = torch.arange(len(self), device=self.offsets.device)
        return every.repeat_interleave(self.counts, output_size=len(self.values))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a quantity of the values for each step; 0 for a step without values.

        Args:
            values: A number for each value. [n].
        Returns:
            [T], of the dtype of `values`.
        """
        return values.new_zeros(len(self)).index_add(0, self.steps, values)

    def padded(self, width: int | None = None, fill: float = 0) -> torch.Tensor:
        """Return a row of values for each step, padded at its end.

        Args:
            width: Values of a row; a step with more keeps its first ones. None: the most of a step,
                which waits for the device.
            fill: Value of the padding.
        Returns:
            [T, width], of the dtype of the values.
        """
        if width is None:
            width = int(self.counts.max()) if len(self) else 0
        shape = (len(self), width)
        if not self.values.numel():
            return self.values.new_full(shape, fill)
        places = torch.arange(width, device=self.values.device)
        index = self.offsets[:-1, None] + places
        is_value = places < self.counts[:, None]
        found = self.values[index.clamp(max=len(self.values) - 1)]
        return torch.where(is_value, found, self.values.new_full((), fill))

    def nested(self) -> torch.Tensor:
        """Return a nested tensor of the jagged layout, over the same memory. [T, k_t]."""
        made: torch.Tensor = torch.nested.nested_tensor_from_jagged(self.values, self.offsets)
        return made

    def to(self, device: torch.device | str) -> Ragged:
        """Return a copy on a device, or itself if it is there."""
        values = self.values.to(device, non_blocking=True)
        return Ragged(values, self.offsets.to(device, non_blocking=True))

    def part(self, first: int, end: int) -> Ragged:
        """Return the steps [first, end), with their values as a view."""
        begin = int(self.offsets[first])
        values = self.values[begin : int(self.offsets[end])]
        return Ragged(values, self.offsets[first : end + 1] - begin)

    def take(self, steps: torch.Tensor) -> Ragged:
        """Return the values of some steps, in their order; -1 is a step without values.

        Args:
            steps: Steps, or -1. [m], int64.
        """
        is_step = steps >= 0
        chosen = steps.clamp(min=0)
        counts = torch.zeros_like(steps)
        begins = torch.zeros_like(steps)
        if len(self):
            counts = torch.where(is_step, self.counts[chosen], 0)
            begins = self.offsets[:-1][chosen]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        # Value i of the result is that many values after the first one of its step.
        total = int(offsets[-1])
        shift = (begins - offsets[:-1]).repeat_interleave(counts, output_size=total)
        index = torch.arange(total, device=steps.device) + shift
        return Ragged(self.values[index], offsets)


def _tensor(what: str, value: Any) -> torch.Tensor:
    is_array = ShapeError.on(
        f"ragged {what}",
        "must be an array of numbers",
        ValueError,
        TypeError,
        RuntimeError,
        remedy="give values [n] and offsets [T + 1], or Ragged.of_rows(lists of values)",
    )
    with is_array:
        tensor = torch.as_tensor(value)
    if tensor.dim() != 1:
        rule = "must have one dimension"
        remedy = "give the values of all steps, one step after the other"
        raise ShapeError(f"ragged {what}", rule, list(tensor.shape), remedy)
    return tensor


def as_ragged(value: Any, name: str) -> Ragged:
    """Return what a program gives for a ragged column: a Ragged, a nested tensor, or a list.

    Raises:
        DataError: It is none of these.
    """
    if isinstance(value, Ragged):
        return value
    kinds = (ShapeError, TypeError, ValueError)
    remedy = "give Ragged(values, offsets), or a list with the values of each step"
    with DataError.on(name, "must have values for each step", *kinds, remedy=remedy):
        if isinstance(value, torch.Tensor) and value.is_nested:
            return Ragged.of_rows(value.unbind())
        if isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 0:
            raise TypeError("a number")
        return Ragged.of_rows(list(value))


def count_column(column: Column) -> Column:
    """Return the column of the counts of a ragged column's steps, in the smallest dtype."""
    dtype = next(d for d in _COUNT_DTYPES if column.max_values <= np.iinfo(d).max)
    return Column(f"{column.name}.counts", dtype)


def item_columns(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Return the columns of the items of ragged columns: counts and values of each."""
    return tuple(part for one in columns for part in (count_column(one), one.values))


def encode_ragged(
    value: Any, column: Column, name: str, num_steps: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Check the value of a trajectory and convert it to the stored form.

    Args:
        value: As `as_ragged`.
        column: The ragged column.
        name: Name of the column, for errors.
        num_steps: Steps of the trajectory; None: not checked.
    Returns:
        Counts, [T], and values, [n], both in the stored dtypes.
    Raises:
        DataError: It does not fit the trajectory or the column, or a value is not finite.
    """
    given = as_ragged(value, name)
    offsets = arguments.dense(name, given.offsets).cpu().numpy()
    counts = np.diff(offsets)
    ends_well = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(given.values)
    if not ends_well or (counts < 0).any():
        rule = f"must have offsets that rise from 0 to its {len(given.values)} values"
        at = int(np.argmax(counts < 0)) if (counts < 0).any() else 0
        found = f"{offsets[at : at + 2].tolist()} at step {at}" if len(offsets) > 1 else offsets
        raise DataError(name, rule, found, "for counts [2, 0, 3] give [0, 2, 2, 5]")
    if num_steps is not None and len(counts) != num_steps:
        rule = f"must have values for each of the {num_steps} steps"
        remedy = "a step without values has an empty list, or two equal offsets"
        raise DataError(name, rule, len(counts), remedy)
    most = column.max_values
    if (counts > most).any():
        at = int(np.argmax(counts > most))
        rule = f"must have at most max_values = {most} values at a step"
        remedy = "leave out the least likely, or raise max_values of the column"
        raise DataError(name, rule, f"{counts[at]} at step {at}", remedy)
    table = name.removesuffix(f": column {column.name}")
    values = np.ascontiguousarray(as_stored(given.values, column.values, table))
    check_finite(
        table,
        [column.values],
        {column.name: values},
        lambda row: f"step {np.searchsorted(offsets, row, side='right') - 1}",
    )
    return counts.astype(count_column(column).numpy_dtype), values


def check_item(rows: dict[str, np.ndarray], column: Column, name: str, num_steps: int) -> None:
    """Raise DataError unless the rows of an item are those of a ragged column.

    Another machine made it, or it is the number of another item.
    """
    counts = rows[count_column(column).name]
    values = rows[column.name]
    is_other = any(len(rows[one]) for one in rows.keys() - {count_column(column).name, column.name})
    wide = counts.astype(np.int64)
    fits = len(counts) == num_steps and int(wide.sum()) == len(values) and not is_other
    if not fits or wide.min(initial=0) < 0 or wide.max(initial=0) > column.max_values:
        rule = f"must have the counts of {num_steps} steps, and a value for each"
        given = f"{len(counts)} counts and {len(values)} values"
        raise DataError(name, rule, given, "add Ragged values, not numbers of items")
