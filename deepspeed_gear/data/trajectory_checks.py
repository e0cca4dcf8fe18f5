"""Checks of an added trajectory against a schema, and its division into episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data import opaque_rows
from deepspeed_gear.data.array_values import holds_text
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.errors import DataError, known_names
from deepspeed_gear.ops.backends import existing_native
from deepspeed_gear.schema import DTYPES, FLOATING, Column, Schema

CORRECT = "correct it, or give the column a dtype that holds it"
ENDS_LAST = "must be set at the last step of a trajectory only"
_PLAIN = frozenset(DTYPES) - {"bfloat16"}  # dtypes that NumPy has
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


def no_values(column: Column, num_steps: int) -> np.ndarray:
    """Return zeros in place of a late column that has not been filled."""
    rows = () if column.rows == "1" else (num_steps + int(column.rows == "T+1"),)
    return np.zeros((*rows, *column.shape), column.numpy_dtype)


def as_stored(value: Any, column: Column, table: str, num_rows: int | None = None) -> np.ndarray:
    """Convert a value, or a list for an opaque column, to the stored dtype.

    Args:
        table: Start of the name in errors.
        num_rows: Rows that the value must have, in place of those that `column.rows` asks for.
    """
    if column.is_ragged:  # the table has the numbers of its items
        column = column.item_number
    single = column.rows == "1" and num_rows is None
    rank = len(column.shape) + (0 if single else 1)
    if isinstance(value, np.number) and column.dtype in _PLAIN:
        value = np.asarray(value)
    if type(value) is np.ndarray and value.dtype == column.numpy_dtype and column.dtype in _PLAIN:
        fits = value.ndim == rank and value.shape[rank - len(column.shape) :] == column.shape
        if fits and (num_rows is None or len(value) == num_rows):
            return value  # the usual case: nothing to convert
    name = f"{table}: column {column.name}"
    if column.is_opaque and num_rows is not None:
        return opaque_rows.encode_rows(value, column, name, num_rows)
    if column.is_opaque:
        return opaque_rows.encode(value, column, name)
    are_bits = False  # of bfloat16, which is stored as uint16
    if isinstance(value, torch.Tensor):
        value = arguments.dense(name, value).cpu()
        if value.dtype == torch.bfloat16:
            are_bits = column.dtype == "bfloat16"
            value = value.view(torch.uint16) if are_bits else value.float()
        array = value.numpy()
    else:
        if isinstance(value, (list, tuple)) and holds_text(value):
            raise DataError(
                name,
                f"must be convertible to {column.dtype}",
                "text",
                "give numbers, or store the text in a column of dtype json",
            )
        with DataError.on(
            name,
            "must be an array",
            ValueError,
            TypeError,
            RuntimeError,
            remedy="give an array, or nested lists of equal lengths",
        ):
            array = np.asarray(value)
        are_bits = array.dtype == np.uint16
    if array.dtype.kind not in "biuf":
        rule = f"must be convertible to {column.dtype}"
        remedy = "give numbers"
        if isinstance(value, Mapping):
            remedy = f"name the columns {column.name}.<key> to store its parts"
        raise DataError(name, rule, str(array.dtype), remedy)
    fits = array.ndim == rank and array.shape[rank - len(column.shape) :] == column.shape
    if not fits or (num_rows is not None and len(array) != num_rows):
        lead = column.rows if num_rows is None else num_rows
        shape = list(column.shape) if single else [lead, *column.shape]
        raise DataError(
            name,
            f"must have shape {shape}",
            list(array.shape),
            f"the schema has {column.dtype}{list(column.shape)}, rows {column.rows}",
        )
    if are_bits and column.dtype == "bfloat16":
        return np.asarray(array)
    return cast(array, column, name)


def cast(array: np.ndarray, column: Column, name: str, remedy: str = CORRECT) -> np.ndarray:
    """Convert real numbers to a column's stored dtype. Costs nothing if the array already has it.

    An integer or bool column keeps every bool, integer and whole number that it can hold exactly; a
    floating column rounds. Other values are a DataError, and so are finite values that would become
    infinite.
    """
    if array.dtype == column.numpy_dtype and column.dtype != "bfloat16":
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        if column.dtype == "bfloat16":
            single = torch.from_numpy(array.astype(np.float32, order="C"))
            stored = single.to(torch.bfloat16).view(torch.uint16).numpy()
        else:
            stored = array.astype(column.numpy_dtype)
    if column.is_floating:
        held = ~not_finite(stored, column) | ~np.isfinite(array)
    else:
        held = stored == array
        # Some machines convert 2^63 to the largest int64, which equals it as a float.
        if column.dtype == "int64" and array.dtype.kind == "f":
            held &= array.astype(np.float64) < 2.0**63
    if not held.all():
        value = array[~held].flat[0].item()
        raise DataError(name, f"must hold values that {column.dtype} can hold", value, remedy)
    return stored


def not_finite(stored: np.ndarray, column: Column) -> np.ndarray:
    """Return which stored values are NaN or infinite. A bool array of the shape of `stored`."""
    if column.dtype == "bfloat16":
        return np.asarray((stored & 0x7F80) == 0x7F80)  # all bits of the exponent are set
    return np.asarray(~np.isfinite(stored))


def are_finite(stored: np.ndarray, column: Column) -> bool:
    """Return whether no stored value of a floating column is NaN or infinite."""
    native = existing_native(stored.nbytes)
    if native is None or not stored.flags.c_contiguous:
        return not not_finite(stored, column).any()
    kind = FLOATING.index(column.dtype) + 1  # as in ops/csrc/store/finite_checks.h
    return bool(native.all_finite(stored.ctypes.data, stored.nbytes, kind))


def check_finite(
    name: str,
    columns: Iterable[Column],
    arrays: Mapping[str, np.ndarray],
    place: Callable[[int], str] = "step {}".format,
) -> None:
    """Raise DataError for NaN or an infinity in a column that does not allow them.

    Args:
        place: Describes a row by its number, for the error.
    """
    for column in columns:
        array = arrays.get(column.name)
        if array is None or not column.must_be_finite or are_finite(array, column):
            continue
        wrong = not_finite(array, column)
        if wrong.any():
            at = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
            value = as_numbers(array[at], column).item()
            shown = f"{value} at {place(int(at[0]))}" if array.ndim > len(column.shape) else value
            raise DataError(
                f"{name}: column {column.name}",
                "must be finite",
                shown,
                'correct it, or set "allow_nan" of the column (gear ingest: --allow-nan)',
            )


def as_numbers(values: np.ndarray, column: Column) -> np.ndarray:
    """Return stored values as numbers: bfloat16, stored as uint16, becomes float32."""
    array = np.asarray(values)
    if column.dtype != "bfloat16":
        return array
    return np.asarray(array.astype(np.uint32) << 16).view(np.float32)  # its upper half


@np.errstate(invalid="ignore")  # converting a signalling NaN raises the flag
def as_float64(values: np.ndarray, column: Column) -> np.ndarray:
    """Return stored values as float64."""
    return as_numbers(values, column).astype(np.float64)


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
