"""Trajectories from turns: the calls of a model that an agent has made, as token ids.

Nothing is tokenised here. Token ids that a model generated are stored as they were generated, with
their log-probabilities and versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.ragged import Ragged
from deepspeed_gear.errors import DataError, known_names

_COLUMNS: Final[Mapping[str, str | None]] = {
    "tokens": "tokens",
    "loss_mask": "loss_mask",
    "logprobs": "logp",
    "version": "version",
    "turn": None,
}
_MOST = np.iinfo(np.int32).max
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: its powers modulo 2^64 are never 0


@dataclass(frozen=True, eq=False)
class Turn:
    """One call of a model: the token ids of its context, and those that it generated.

    Arrays, tensors and lists are taken. All turns of a member have the same optional values.

    Attributes:
        prompt_ids: The whole context of the call: instructions, earlier turns, tool results. [p].
        output_ids: The generated tokens, the end of the turn included. [n].
        logprobs: Log-probability of each generated token, under the distribution from which it was
            drawn. [n].
        version: Version of the policy that generated: one number, or one for each generated token
            if weights were loaded within the turn. [n].
        columns: Further columns by name, such as the experts of each generated token. [n, *shape];
            or a Ragged of n steps for a ragged column.
    """

    prompt_ids: Any
    output_ids: Any
    logprobs: Any = None
    version: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)


_FIELDS = tuple(one.name for one in fields(Turn))


@dataclass(frozen=True)
class _Checked:
    """A turn as arrays.

    Attributes:
        tokens: Prompt and output. [p + n], int32.
        start: Place of the first generated token, p.
        columns: By name of the column, the rows of the generated tokens. [n, *shape], or a Ragged.
    """

    tokens: np.ndarray
    start: int
    columns: dict[str, np.ndarray | Ragged]


def trajectories_from_turns(
    turns: Iterable[Turn | Mapping[str, Any]],
    values: Mapping[str, Any] | None = None,
    names: Mapping[str, str | None] | None = None,
) -> list[dict[str, Any]]:
    """Return the trajectories of one rollout of an agent, from its turns in the order of time.

    A turn continues a trajectory if its prompt begins with all token ids of that trajectory, and
    the longest one if there are several. Otherwise (an edited context, another agent) it begins a
    trajectory. So each generated token has loss in exactly one trajectory, and its context there is
    the context that it was generated from.

    Args:
        turns: Turns, or mappings with the same names.
        values: Per-trajectory columns, which every trajectory gets, such as the reward, the group
            and the member.
        names: Names of columns that differ from the defaults: `tokens`, `loss_mask`, `logprobs`
            ("logp"), `version` and `turn`. None leaves a column out. `turn`, left out by default,
            is the index of the turn that generated a token, and -1 elsewhere.
    Returns:
        Columns of each trajectory, in the order of their first turns, as `Replay.add` takes them:
        tokens (int32), loss mask (bool), log-probabilities (float32) and versions (int32) where the
        turns have them, and the turns' further columns. These are 0 at tokens that were not
        generated, [T, *shape], and ragged ones have no values there.
    Raises:
        DataError: A turn has no prompt or no output, its values are malformed or of another number
            than its generated tokens, or turns differ in what they have.
    Cost: Linear in the tokens of all prompts and outputs; one comparison of numbers for each pair
        of a turn and a trajectory.
    """
    columns = _names_of_columns(names)
    checked = [_check(number, turn, columns) for number, turn in enumerate(turns)]
    if not checked:
        raise DataError("turns", "must have at least one turn", 0, "fail a rollout without turns")
    for number, turn in enumerate(checked):
        _check_alike(number, turn, checked[0])
    of_trajectory = {} if values is None else dict(arguments.mapping("values", values))
    taken = [columns["tokens"], columns["loss_mask"], columns["turn"], *checked[0].columns]
    for name in of_trajectory:
        if name in taken:
            rule = "must not be a column that the turns fill"
            remedy = "rename one of the two; `names` renames columns of turns"
            raise DataError(f"values: {name}", rule, None, remedy)
    return [
        {**_columns(numbers, checked, columns), **of_trajectory} for numbers in _merged(checked)
    ]


def _merged(turns: list[_Checked]) -> list[list[int]]:
    """Return the turns of each trajectory.

    With the prompts and outputs [1, 2] + [3], [1, 2, 3, 4] + [5] and [1, 4] + [6], the turns are
    [[0, 1], [2]]. Sums over the tokens find the candidates, and the tokens decide.
    """
    trajectories: list[list[int]] = []
    # Of each trajectory so far: its number of tokens, and their sum.
    lengths = np.zeros(len(turns), np.int64)
    sums = np.zeros(len(turns), np.uint64)
    for number, turn in enumerate(turns):
        of_prefix = _prefix_sums(turn.tokens)
        own = lengths[: len(trajectories)]
        fits = (own <= turn.start) & (
            of_prefix[np.minimum(own, turn.start) - 1] == sums[: len(own)]
        )
        # The longest first; of equally long ones the latest.
        for place in sorted(np.flatnonzero(fits).tolist(), key=lambda one: (-own[one], -one)):
            tokens = turns[trajectories[place][-1]].tokens
            if np.array_equal(turn.tokens[: len(tokens)], tokens):
                trajectories[place].append(number)
                break
        else:
            place = len(trajectories)
            trajectories.append([number])
        lengths[place] = len(turn.tokens)
        sums[place] = of_prefix[-1]
    return trajectories


def _prefix_sums(tokens: np.ndarray) -> np.ndarray:
    """Return for each prefix a number that equal prefixes share, and others hardly ever. [T].

    It is the sum of (token + 1) times a power of its place, modulo 2^64.
    """
    powers = np.cumprod(np.full(len(tokens), _MULTIPLIER))
    return np.asarray(np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * powers))


def _columns(
    numbers: list[int], turns: list[_Checked], names: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the columns of a trajectory: its tokens are those of its last turn."""
    tokens = turns[numbers[-1]].tokens
    mask = np.zeros(len(tokens), np.bool_)
    index = np.full(len(tokens), -1, np.int32)
    filled: dict[str, Any] = {}
    for name, rows in turns[numbers[0]].columns.items():
        if isinstance(rows, Ragged):
            filled[name] = [rows.values[:0]] * len(tokens)
            continue
        every = [turns[number].columns[name] for number in numbers]
        dtype = np.result_type(*(one for one in every if isinstance(one, np.ndarray)))
        filled[name] = np.zeros((len(tokens), *rows.shape[1:]), dtype)
    for number in numbers:
        turn = turns[number]
        own = slice(turn.start, len(turn.tokens))
        mask[own] = True
        index[own] = number
        for name, rows in turn.columns.items():
            filled[name][own] = rows
    for name, rows in turns[numbers[0]].columns.items():
        if isinstance(rows, Ragged):
            filled[name] = Ragged.of_rows(filled[name])
    made = {"tokens": tokens, "loss_mask": mask, "turn": index}
    renamed = {own_name: made[key] for key in made if (own_name := names[key]) is not None}
    return {**renamed, **filled}


# ---- checks --------------------------------------------------------------------------------------


def _names_of_columns(given: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Return the name of each column that turns fill; None for one that is left out."""
    names = dict(_COLUMNS)
    for key, name in ({} if given is None else arguments.mapping("names", given)).items():
        if key not in names:
            remedy = known_names(key, names)
            raise DataError(f"names: {key}", "must be a column of turns", None, remedy)
        if name is not None and not (isinstance(name, str) and name):
            rule = "must be the name of a column, or None to leave it out"
            raise DataError(f"names: {key}", rule, name, "give a name of the table's schema")
        names[key] = name
    for key in ("tokens", "loss_mask"):
        if names[key] is None:
            remedy = "trajectories have token ids and a loss mask: give their names"
            raise DataError(f"names: {key}", "must not be left out", None, remedy)
    kept = [name for name in names.values() if name is not None]
    for name in kept:
        if kept.count(name) > 1:
            remedy = "give each column a name of its own"
            raise DataError("names", "must differ from each other", name, remedy)
    return names


def _check(number: int, given: Any, names: Mapping[str, str | None]) -> _Checked:
    """Return a turn as arrays; DataError if a value is malformed."""
    at = f"turn {number}"
    turn = _as_turn(at, given)
    prompt = _ids(f"{at}: prompt_ids", turn.prompt_ids, "a model generates from a context")
    output = _ids(f"{at}: output_ids", turn.output_ids, "leave out turns that generated nothing")
    columns: dict[str, np.ndarray | Ragged] = {}
    if names["logprobs"] is not None and turn.logprobs is not None:
        logprobs = _rows(f"{at}: logprobs", turn.logprobs, len(output))
        if logprobs.ndim != 1:
            remedy = "give the log-probability of the token that was drawn, not of the alternatives"
            raise DataError(f"{at}: logprobs", "must be one-dimensional", logprobs.shape, remedy)
        if not np.isfinite(logprobs).all():
            place = int(np.flatnonzero(~np.isfinite(logprobs))[0])
            remedy = "a token that was drawn has a finite log-probability: leave a broken turn out"
            name = f"{at}: logprobs[{place}]"
            raise DataError(name, "must be finite", float(logprobs[place]), remedy)
        columns[names["logprobs"]] = logprobs.astype(np.float32)
    if names["version"] is not None and turn.version is not None:
        columns[names["version"]] = _versions(f"{at}: version", turn.version, len(output))
    for name, rows in arguments.mapping(f"{at}: columns", turn.columns).items():
        if name in names.values():
            remedy = (
                f"names of columns that turns fill are {', '.join(filter(None, names.values()))}"
            )
            raise DataError(f"{at}: columns: {name}", "must have another name", None, remedy)
        if isinstance(rows, Ragged):
            _check_count(f"{at}: columns: {name}", len(rows), len(output))
            columns[name] = rows
        else:
            columns[name] = _rows(f"{at}: columns: {name}", rows, len(output))
    return _Checked(np.concatenate([prompt, output]), len(prompt), columns)


def _as_turn(at: str, given: Any) -> Turn:
    if isinstance(given, Turn):
        return given
    if not isinstance(given, Mapping):
        rule = "must be a Turn, or a mapping with its names"
        raise DataError(at, rule, type(given).__name__, "give Turn(prompt_ids, output_ids)")
    for name in given:
        if name not in _FIELDS:
            remedy = f"{known_names(str(name), _FIELDS)}; further columns are in `columns`"
            raise DataError(f"{at}: {name}", "must be a name that turns have", None, remedy)
    for name in ("prompt_ids", "output_ids"):
        if name not in given:
            raise DataError(f"{at}: {name}", "must be given", None, "give the token ids")
    return Turn(**given)


def _ids(name: str, given: Any, remedy_of_none: str) -> np.ndarray:
    """Return token ids. [n], int32."""
    ids = arguments.array(name, given)
    if ids.ndim != 1:
        rule = "must be one-dimensional"
        raise DataError(name, rule, ids.shape, "give the ids of one call, without padding")
    if not len(ids):
        raise DataError(name, "must have at least one token", 0, remedy_of_none)
    return _as_int32(name, ids, "token ids are integers from 0 to 2^31 - 1")


def _versions(name: str, given: Any, count: int) -> np.ndarray:
    """Return the version of each generated token. [n], int32."""
    versions = arguments.array(name, given)
    if versions.ndim:
        versions = _rows(name, versions, count)
    if versions.ndim > 1:
        rule = "must be one number, or one for each generated token"
        raise DataError(name, rule, versions.shape, "give the version of each token")
    whole = np.broadcast_to(versions, count)
    return _as_int32(name, whole, "versions are integers from 0 to 2^31 - 1")


def _as_int32(name: str, numbers: np.ndarray, remedy: str) -> np.ndarray:
    if numbers.dtype.kind not in "iu":
        raise DataError(name, "must be integers", str(numbers.dtype), remedy)
    outside = (numbers < 0) | (numbers > _MOST)
    if outside.any():
        place = int(np.flatnonzero(outside)[0])
        rule = f"must be in [0, {_MOST}]"
        raise DataError(f"{name}[{place}]", rule, int(numbers[place]), remedy)
    return numbers.astype(np.int32)


def _rows(name: str, given: Any, count: int) -> np.ndarray:
    """Return one row for each generated token. [n, *shape]."""
    rows = arguments.array(name, given)
    _check_count(name, len(rows) if rows.ndim else "one number", count)
    return rows


def _check_count(name: str, given: int | str, count: int) -> None:
    """Raise a DataError unless there is a row for each generated token."""
    if given != count:
        rule = f"must have one value for each of {count} output_ids"
        remedy = "give those of the generated tokens alone, in their order"
        raise DataError(name, rule, given, remedy)


def _check_alike(number: int, turn: _Checked, first: _Checked) -> None:
    """Raise a DataError if a turn has other columns than the first one, or of another shape."""
    absent = first.columns.keys() ^ turn.columns.keys()
    for name in sorted(absent):
        who = number if name in first.columns else 0
        rule = "must be given with every turn, or with none"
        remedy = "leave it out everywhere, or give it with all turns of the rollout"
        raise DataError(f"turn {who}: {name}", rule, None, remedy)
    for name, rows in turn.columns.items():
        wanted = _form(first.columns[name])
        if _form(rows) != wanted:
            rule = f"must have rows of the shape of turn 0, {wanted}"
            remedy = "give rows of one shape"
            raise DataError(f"turn {number}: {name}", rule, _form(rows), remedy)


def _form(rows: np.ndarray | Ragged) -> tuple[int, ...] | str:
    """Return the shape of a row, or "ragged"."""
    return "ragged" if isinstance(rows, Ragged) else rows.shape[1:]
