"""Episodes of a trajectory: rows of several, such as a rollout with resets inside, are divided at end flags.

Returns-to-go, windows and n-step returns run to the end of a trajectory, so a flag inside would be crossed.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.trajectory_checks import (
    as_numbers,
    as_stored,
    check_finite,
    check_trajectory,
)
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema


def split_episodes(
    name: str,
    schema: Schema,
    trajectory: Mapping[str, Any],
    final: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> list[dict[str, Any]]:
    """Divide rows of several episodes, as a rollout with resets inside, at their end flags.

    A column of T+1 rows has the first state of the next episode after an inner end, not the last one of its
    own. The last state of a part is that of `final`. Without it, a part that ends with `terminated` repeats
    the state before its last step, which fills the place and is never bootstrapped from.

    Args:
        name: Of the table, for error texts.
        schema: Of the table, with a column of the role terminated or truncated.
        trajectory: As of `check_trajectory`; or nested. Parts share columns of one value per trajectory;
            those of the roles return and length become the sum of a part's rewards and its number of steps.
        final: Column of T+1 rows -> the state after each step, of which the rows of inner ends are read:
            [T, *shape], or T objects as gymnasium's `final_obs`; or nested.
        max_length: Steps of the longest part.
    Returns:
        The parts in order, each as a trajectory; columns of steps in the stored form.
    Raises:
        DataError: The rows do not fit the schema, a part is too long, or a part ends inside with `truncated`
            alone, and `final` does not have its last state: its value would be bootstrapped from.
    """
    given = flatten(f"{name}: trajectory", trajectory, frozenset(schema.names))
    if not schema.end_columns:
        rule = "must have a column of the role terminated or truncated to be split by its flags"
        raise DataError(name, rule)
    arrays, num_steps = check_trajectory(name, schema, given, may_end_inside=True)
    check_finite(name, schema, arrays)
    flags = {column.role: arrays[column.name] != 0 for column in schema.end_columns}
    ends = np.flatnonzero(np.logical_or.reduce([flag[:-1] for flag in flags.values()])) + 1
    bounds = [*pairwise([0, *ends.tolist(), num_steps])]
    longest = max(end - first for first, end in bounds)
    if max_length is not None and longest > max_length:
        raise DataError(f"{name}: part", f"must have at most max_length = {max_length} steps", longest)
    if not len(ends):
        return [dict(given)]
    terminated = flags.get("terminated", np.zeros(num_steps, bool))
    states = [column for column in schema if column.rows == "T+1" and column.name in given]
    finals = _finals(name, states, {} if final is None else final, num_steps, ends - 1, terminated)
    reward = schema.role("reward")

    def rows_of(column: Column, index: int, first: int, end: int) -> Any:
        """Return a column's rows of a part, or its value."""
        rows = arrays[column.name]
        if column.rows == "1" and column.role == "length":
            return np.asarray(end - first)
        if column.rows == "1" and column.role == "return" and reward is not None:
            return as_numbers(arrays[reward.name][first:end], reward).sum(dtype=np.float64)
        if column.rows == "1":
            return given[column.name]
        if column.rows == "T" or end == num_steps:
            return rows[first : end + int(column.rows == "T+1")]
        last = finals[column.name][index] if column.name in finals else rows[end - 1]
        return np.concatenate([rows[first:end], last[None]])

    return [
        {name: rows_of(schema[name], index, first, end) for name in given}
        for index, (first, end) in enumerate(bounds)
    ]


def _finals(
    name: str,
    states: list[Column],
    final: Mapping[str, Any],
    num_steps: int,
    last: np.ndarray,
    terminated: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the states after the last steps of the parts that end inside. Column -> [len(last), *shape].

    Raises:
        DataError: One is malformed, unknown, or missing after a step that has not terminated.
    """
    given = flatten(f"{name}: final", final, frozenset(column.name for column in states))
    known = [column.name for column in states]
    for odd in sorted(given.keys() - set(known)):
        rule = f"must be one of the columns of T+1 rows, {known}"
        raise DataError(f"{name}: final: column {odd}", rule)
    cut = last[~terminated[last]]
    finals = {}
    for column in states:
        where = f"{name}: final"
        if column.name not in given:
            if len(cut):
                rule = f"must have the state after step {cut[0]}, where an episode is truncated inside"
                remedy = f"give final={{{column.name!r}: states after each step}}; those at ends are read"
                raise DataError(f"{name}: column {column.name}", rule, None, remedy)
            continue
        rows = given[column.name]
        if len(rows) != num_steps:
            rule = f"must have a row after each of the {num_steps} steps"
            raise DataError(f"{where}: column {column.name}", rule, len(rows))
        ended = rows[last] if isinstance(rows, torch.Tensor) else [rows[step] for step in last.tolist()]
        finals[column.name] = as_stored(ended, column, where, len(last))
    check_finite(f"{name}: final", states, finals, lambda row: f"step {last[row]}")
    return finals
