"""What the last row of an episode holds, in sources whose flags mark rows (`--last-step`).

RLDS, Dreamer and Open X-Embodiment share the flags `is_first`, `is_last` and `is_terminal`, and
differ in the row that `is_last` marks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_gear.data.ingest.row_values import numeric
from deepspeed_gear.data.ingest.source_names import ROW_FLAGS
from deepspeed_gear.errors import ConfigError, DataError, near_name

TRANSITION = "transition"  # a step as every other row: Open X-Embodiment
OBSERVATION = "observation"  # only the observation after the last step: RLDS, OGBench
REWARD = "reward"  # that observation, and the reward of the step before: Dreamer
ACTION = "action"  # as REWARD, and the action of that step, too: DrQ-v2, ExORL, V-D4RL
#: Note on end flags that do not state why an episode ended.
ENDS_TERMINATE = (
    "end flags are taken as terminated, as they do not distinguish a terminal state from a time "
    "limit: --episode-length N takes an end after N steps as truncated"
)
#: Values of the option, with the note for the user on last rows.
NOTES = {
    TRANSITION: "each row is a step, also the last one of an episode",
    OBSERVATION: "the last row of each episode is the observation after its last step",
    REWARD: "the last row of each episode is the observation after its last step, and each row has "
    "the reward of the step before it",
    ACTION: "the last row of each episode is the observation after its last step, and each row has "
    "the action and the reward of the step before it",
}
_MOVED = {REWARD: ("reward", "discount"), ACTION: ("action", "reward", "discount")}


def check_last_step(given: str) -> str:
    """Return the value of `last_step`; ConfigError if there is no such value."""
    if given not in NOTES:
        remedy = near_name(given, NOTES) or '"gear ingest --help" has their meaning'
        raise ConfigError("last_step", f"must be one of {', '.join(NOTES)}", given, remedy)
    return given


def is_moved(kind: str, name: str) -> bool:
    """Return whether the rows of a column belong to the step before their row.

    Args:
        kind: What the last row holds.
        name: The column by its usual name, such as "action.gripper".
    """
    return name.split(".")[0] in _MOVED.get(kind, ())


def last_step(path: Path, at_first: bool, at_last: bool) -> str:
    """Return what the rewards of a source with such flags show about its last rows.

    Args:
        at_first: Whether the first row of an episode has a reward other than 0.
        at_last: Whether the last row of an episode has one.
    Raises:
        DataError: The rewards allow two meanings.
    """
    if not at_last:
        return OBSERVATION
    if at_first:  # the first row of Dreamer has no step before it, and so no reward
        return TRANSITION
    raise DataError(
        f"{path}: reward",
        "must be 0 in rows with is_last, which hold only an observation in RLDS",
        None,
        "--last-step transition: each row is a step, with its action and reward (Open "
        "X-Embodiment); --last-step reward: a row has the reward of the step before it (Dreamer); "
        "--last-step action: a row has the action and the reward of the step before it (DrQ-v2); "
        "--last-step observation: the reward there has no meaning",
    )


def num_rows(where: str, row: Mapping[str, Any]) -> int:
    """Return the rows of an episode by its flags; DataError if these are not one for each row.

    Args:
        row: Columns of the episode by name, of which some are `ROW_FLAGS`.
    """
    sizes = {}
    for name in ROW_FLAGS:
        if name in row:
            flags = numeric(row[name])
            if flags is None or flags.ndim != 1 or not len(flags):
                raise DataError(
                    f"{where}: {name}",
                    "must be a flag for each row, and not null",
                    row[name],
                    "store one flag for each row",
                )
            sizes[name] = len(flags)
    if len({*sizes.values()}) > 1:
        raise DataError(
            where, "must have as many flags of each kind", sizes, "store one flag for each row"
        )
    return next(iter(sizes.values()))


def is_per_row(value: Any, rows: int) -> bool:
    """Return whether a value may have an element for each row."""
    is_list = isinstance(value, (list, tuple)) or bool(getattr(value, "ndim", 0))
    return is_list and len(value) == rows


def end_rewards(row: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return whether the first, and the last, row of an episode have a reward other than 0."""
    rewards = numeric(row.get("reward"))
    if rewards is None or not rewards.size:
        return False, False
    return bool(np.any(rewards[0])), bool(np.any(rewards[-1]))


def steps_of_rows(
    where: str, row: Mapping[str, Any], kind: str, per_row: set[str]
) -> dict[str, Any] | None:
    """Return the columns of an episode's steps, with the flag `terminated`; None without a step.

    With rows o0 o1 o2, of which the last is only an observation, there are two steps: observations
    [o0, o1, o2], and the first two rows of every other column.

    Args:
        row: Columns by the usual names, and `ROW_FLAGS`.
        kind: What the last row holds.
        per_row: Columns with an element for each row.
    Raises:
        DataError: A flag is set inside the episode.
    """
    rows = num_rows(where, row)
    flags = {name: np.asarray(row[name]) != 0 for name in ROW_FLAGS if name in row}
    for name, values in flags.items():
        inner = values[1:] if name == "is_first" else values[:-1]
        if inner.any():
            at = int(np.argmax(inner)) + int(name == "is_first")
            place = "first" if name == "is_first" else "last"
            raise DataError(
                f"{where}: {name}",
                f"must be set at the {place} row of an episode only",
                f"row {at} of {rows}",
                "name the column of the episodes with --episode-id, or correct the flags",
            )
    ends = [flags[name][-1] for name in ("is_terminal", "is_last") if name in flags]
    num_steps = rows if kind == TRANSITION else rows - 1
    if num_steps == 0:
        return None
    steps: dict[str, Any] = {}
    for name, value in row.items():
        if name in flags:
            continue
        is_whole = name.split(".")[0] == "observation" or name not in per_row
        first = int(is_moved(kind, name))
        steps[name] = value if is_whole else value[first : first + num_steps]
    steps["terminated"] = np.zeros(num_steps, np.bool_)
    steps["terminated"][-1] = bool(ends and ends[0])
    return steps
