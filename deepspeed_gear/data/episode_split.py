"""Division of a rollout with resets inside into episodes, at its end flags (`split_by_flags`)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.stored_values import as_numbers, as_stored, check_finite
from deepspeed_gear.data.trajectory_checks import check_trajectory
from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema


def split_episodes(
    name: str,
    schema: Schema,
    trajectory: Mapping[str, Any],
    final: Mapping[str, Any] | None = None,
    max_length: int | None = None,
) -> list[dict[str, Any]]:
    """Divide a rollout with resets inside into its episodes, at their end flags.

    Returns-to-go, windows and n-step returns run to the end of a trajectory, so they would cross a
    flag inside.

    After an inner end, a column of T+1 rows holds the first state of the next episode, not the last
    one of its own. The last state of a part is taken from `final`. Without it, a part that ends
    with `terminated` repeats the state before its last step, which fills the row and is never
    bootstrapped from.

    Args:
        trajectory: Its columns, flat or nested. Parts share columns of one value per trajectory;
            those of the roles return and length become the sum of a part's rewards and its number
            of steps.
        final: For a column of T+1 rows, the state after each step, of which the rows of inner ends
            are read: [T, *shape], or T objects like gymnasium's `final_obs`; it may be nested.
        max_length: Steps of the longest part.
    Returns:
        The parts in order, each a trajectory; step columns are in the stored form.
    Raises:
        DataError: The rows do not fit the schema; a part is too long; or a part ends inside with
            `truncated` alone and `final` lacks its last state, which would be bootstrapped from.
    """
    given = flatten(f"{name}: trajectory", trajectory, frozenset(schema.names))
    if not schema.end_columns:
        raise DataError(
            name,
            "must have a column of the role terminated or truncated to be split by its flags",
            remedy="add such a column to the schema, or add each episode on its own",
        )
    arrays, num_steps = check_trajectory(name, schema, given, may_end_inside=True)
    check_finite(name, schema, arrays)
    flags = {column.role: arrays[column.name] != 0 for column in schema.end_columns}
    ends = np.flatnonzero(np.logical_or.reduce([flag[:-1] for flag in flags.values()])) + 1
    bounds = [*pairwise([0, *ends.tolist(), num_steps])]
    longest = max(end - first for first, end in bounds)
    if max_length is not None and longest > max_length:
        raise DataError(
            f"{name}: part",
            f"must have at most max_length = {max_length} steps",
            longest,
            "raise max_length of the table, or end episodes earlier",
        )
    if not len(ends):
        return [dict(given)]
    terminated = flags.get("terminated", np.zeros(num_steps, bool))
    states = [column for column in schema if column.rows == "T+1" and column.name in given]
    finals = _finals(f"{name}: final", states, {} if final is None else final, ends - 1, terminated)
    reward = schema.role("reward")

    def rows_of(column: Column, index: int, first: int, end: int) -> Any:
        rows = arrays[column.name]
        if column.rows == "1" and column.role == "length":
            return np.asarray(end - first)
        if column.rows == "1" and column.role == "return" and reward is not None:
            return as_numbers(arrays[reward.name][first:end], reward).astype(np.float64).sum()
        if column.rows == "1":
            return given[column.name]
        if column.rows == "T" or end == num_steps:
            return rows[first : end + int(column.rows == "T+1")]
        last = finals[column.name][index] if column.name in finals else rows[end - 1]
        return np.concatenate([rows[first:end], last[None]])

    parts = enumerate(bounds)
    return [{name: rows_of(schema[name], index, *part) for name in given} for index, part in parts]


def _finals(
    name: str,
    states: list[Column],
    final: Mapping[str, Any],
    last: np.ndarray,
    terminated: np.ndarray,
) -> dict[str, np.ndarray]:
    """Return the states after the last steps of inner parts, by column. [len(last), *shape]."""
    known = [column.name for column in states]
    given = flatten(name, final, frozenset(known))
    for odd in sorted(given.keys() - set(known)):
        raise DataError(
            f"{name}: column {odd}",
            f"must be one of the columns of T+1 rows, {known}",
            remedy="leave it out of final",
        )
    truncated = last[~terminated[last]]
    finals = {}
    for column in states:
        where = f"{name}: column {column.name}"
        if column.name in given:
            rows = given[column.name]
            if len(rows) != len(terminated):
                raise DataError(
                    where,
                    f"must have a row after each of the {len(terminated)} steps",
                    len(rows),
                    f"give {len(terminated)} rows",
                )
            ended = (
                rows[last]
                if isinstance(rows, torch.Tensor)
                else [rows[step] for step in last.tolist()]
            )
            finals[column.name] = as_stored(ended, column, name, len(last))
        elif len(truncated):
            raise DataError(
                where,
                f"must have the state after step {truncated[0]}, where an episode is truncated "
                "inside",
                None,
                f"give final={{{column.name!r}: states after each step}}; those at ends are read",
            )
    check_finite(name, states, finals, lambda row: f"step {last[row]}")
    return finals
