"""Checks of an added trajectory: its columns, numbers of rows, and end flags inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from deepspeed_gear.data.stored_values import as_stored, check_finite, no_values
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.errors import DataError, known_names
from deepspeed_gear.schema import Schema

ENDS_LAST = "must be set at the last step of a trajectory only"
SPLIT = "add each episode, or all with split_by_flags=True (gear ingest: --split-by-flags)"


def check_trajectory(
    name: str,
    schema: Schema,
    trajectory: Mapping[str, Any],
    may_end_inside: bool = False,
    late_remedy: str = "",
) -> tuple[dict[str, np.ndarray], int]:
    """Return a flat trajectory's columns as arrays of the stored dtypes, and its number of steps.

    NaN and infinities are left to `check_finite`, or to the native module.

    Args:
        may_end_inside: Admit end flags before the last step.
        late_remedy: Remedy of the error for a late column that is missing; "" fills it with zeros.
    """
    if not trajectory.keys() <= set(schema.names):
        unknown = sorted(trajectory.keys() - set(schema.names))
        raise DataError(
            f"{name}: column {unknown[0]}",
            "must be in the schema",
            None,
            known_names(unknown[0], schema.names),
        )
    arrays: dict[str, np.ndarray] = {}
    for column in schema:
        if column.name in trajectory:
            arrays[column.name] = as_stored(trajectory[column.name], column, name)
        elif not column.late or late_remedy:
            remedy = (
                late_remedy
                if column.late
                else "give it with the trajectory, or take the column out of the table's schema"
            )
            raise DataError(
                f"{name}: column {column.name}", "must be in every trajectory", None, remedy
            )
    num_steps = _num_steps(name, schema, arrays)
    if num_steps < 1:
        raise DataError(
            f"{name}: trajectory",
            "must have at least one step",
            num_steps,
            "leave empty trajectories out",
        )
    for column in () if may_end_inside else schema.end_columns:
        inner = arrays[column.name][:-1]
        if np.count_nonzero(inner):  # returns, windows and bootstraps would run across it
            step = f"a flag at step {int(np.argmax(inner != 0))} of {len(inner) + 1}"
            raise DataError(f"{name}: column {column.name}", ENDS_LAST, step, SPLIT)
    for column in schema.late_columns:
        if column.name not in arrays:
            arrays[column.name] = no_values(column, num_steps)
    return arrays, num_steps


def stored_block(schema: Schema, block: TrajectoryBlock) -> dict[str, np.ndarray] | None:
    """Return the columns of several trajectories as arrays of the stored dtypes.

    Returns:
        The rows by column; or None where a trajectory may be wrong: checks of them one by one find
        out, and name it in their error.
    """
    is_same_form = block.has_final_row == schema.has_final_row
    is_same_form &= all(block.rows.get(column.name) == column.rows for column in schema)
    if not is_same_form or block.arrays.keys() != set(schema.names) or block.lengths.min() < 1:
        return None
    arrays: dict[str, np.ndarray] = {}
    try:
        for column in schema:
            num_rows = len(block) if column.rows == "1" else block.num_rows
            arrays[column.name] = as_stored(block.arrays[column.name], column, "", num_rows)
        check_finite("", schema, arrays)
    except DataError:
        return None
    for column in schema:
        if column.rows == "T" and np.any(arrays[column.name][block.final_rows]):
            return None
    for column in schema.end_columns:
        flags = arrays[column.name]
        if np.count_nonzero(flags) != np.count_nonzero(flags[block.last_steps]):
            return None
    return arrays


def _num_steps(name: str, schema: Schema, arrays: Mapping[str, np.ndarray]) -> int:
    """Return the number of steps of a trajectory's arrays; DataError where they differ.

    The number that most columns have counts. On a tie the columns of T rows decide, because a
    program more often omits the last observation of the T+1 columns.
    """
    given = [column for column in schema if column.rows != "1" and column.name in arrays]
    steps = [len(arrays[column.name]) - int(column.rows == "T+1") for column in given]
    if steps.count(steps[0]) == len(steps):
        return steps[0]
    votes = Counter(steps)
    plain = Counter(count for column, count in zip(given, steps, strict=True) if column.rows == "T")
    num_steps = max(votes, key=lambda count: (votes[count], plain[count]))
    measured = given[steps.index(num_steps)]
    wrong, count = next(pair for pair in zip(given, steps, strict=True) if pair[1] != num_steps)
    remedy = f"column {measured.name} has the rows of {num_steps} steps"
    if wrong.rows == "T+1" and count == num_steps - 1:
        remedy += "; rows T+1 end with the observation after the last step"
    raise DataError(
        f"{name}: column {wrong.name}",
        f"must have {num_steps + int(wrong.rows == 'T+1')} rows ({wrong.rows})",
        len(arrays[wrong.name]),
        remedy,
    )
