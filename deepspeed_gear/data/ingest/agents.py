"""Several agents in a source: one array for all, and the rewards and ends of their episodes.

The names are those of PettingZoo's environments. A key such as `rewards/agent_0` names the kind of
an array and an agent. Arrays of one kind become one array [T, agents, ...] if those of all agents
have one shape and one dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.ingest.source_columns import FLAGS, convert
from deepspeed_gear.data.ingest.source_names import FLAG_KINDS
from deepspeed_gear.errors import DataError

#: The key beside the agents whose flag is that of the episode (RLlib, older PettingZoo).
ALL = "__all__"
_NEEDED = ("observation", "action", "reward", *FLAG_KINDS)  # kinds that all agents have, or none
#: Kinds of one value a step, whose parts are agents.
NAMES_AGENTS = ("reward", *FLAG_KINDS)


class AgentRows:
    """Arrays of agents with one shape and dtype, read as one array [T, agents, ...]."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays
        first = arrays[0]
        self.dtype = first.dtype
        self.shape: tuple[int, ...] = (len(first), len(arrays), *first.shape[1:])
        self.ndim = len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice | tuple[()]) -> NDArray[Any]:
        """Return rows of all agents; with () all of them."""
        return np.stack([np.asarray(array[rows]) for array in self._arrays], axis=1)


class _Key(NamedTuple):
    """A key of an agent's array."""

    head: str  # as in the source, such as "obs"
    kind: str  # its meaning, such as "observation"
    agent: str
    rest: tuple[str, ...]  # of a part of a dict

    @property
    def joined(self) -> str:
        """The key of the array of all agents."""
        return "/".join((self.head, *self.rest))


class Agents:
    """The agents of a source, and its arrays by key with one array for all agents.

    Columns beside the usual ones: `agent_reward` [T, agents], and the flags of each agent as
    `agent_terminated`, `agent_truncated` or `agent_done`.

    - `reward` is the mean of the agents' rewards, so where all get the reward of the team, that.
    - An agent that has ended stays so until the episode ends: with the row in which the last one
      ends, terminated if all are. A flag of the episode itself, or `__all__` beside the agents,
      takes the place of that one.
    """

    def __init__(self, where: str, goes_on: bool = False) -> None:
        """Know no agent yet.

        Args:
            where: The source, for errors.
            goes_on: Whether the rows of a call follow those of the call before, in one episode.
        """
        self._where = where
        self._goes_on = goes_on
        self._cause: NDArray[np.int64] | None = None
        self.names: list[str] = []  # agent_2 comes before agent_10

    @property
    def note(self) -> str:
        """Return a note on the agents and the rules; "" without agents."""
        rules = (
            "in this order: reward is the mean of theirs, and an episode ends with its last agent"
        )
        return f"agents {', '.join(self.names)}, {rules}" if self.names else ""

    def joined(
        self, name: str, arrays: Mapping[str, Any], judged: Callable[[str], tuple[str, ...]]
    ) -> dict[str, Any]:
        """Return arrays by key, with one for all agents; those of a source without agents as given.

        Args:
            name: The trajectory or environment, for errors; "" if there is only one.
            arrays: By key.
            judged: Returns the kind of a key and its parts.
        Raises:
            DataError: An agent lacks an array that others have, or the agents are not those of the
                trajectories before.
        """
        where = f"{self._where}: {name}: " if name else f"{self._where}: "
        kinds = {key: judged(key) for key in arrays}
        keys = {key: _parsed(key, kind) for key, kind in kinds.items()}
        found = {at.agent for at in keys.values() if at and at.kind in NAMES_AGENTS} - {ALL}
        names = sorted(found, key=_by_number)
        if self.names and names != self.names:
            raise DataError(
                where.rstrip(": "),
                f"must have the agents {', '.join(self.names)}, as the trajectories before",
                ", ".join(names),
                "ingest trajectories with other agents into a data set of their own",
            )
        self.names = names
        if not names:
            return dict(arrays)
        groups: dict[tuple[str, str], dict[str, str]] = {}
        result = {}
        for key, at in keys.items():
            if at is not None and at.agent in (*names, ALL):
                groups.setdefault((at.kind, at.joined), {})[at.agent] = key
            else:
                result[key] = arrays[key]
        own = {kinds[key][0] for key in result}  # kinds of arrays of the episode itself
        flags: dict[str, tuple[str, dict[str, str]]] = {}
        for (kind, head), given in groups.items():
            self._check(where, kind, head, given)
            if kind in FLAG_KINDS:
                flags[kind] = head, given
            elif kind == "reward":
                rewards = _values(where, given, names, arrays)
                result["agent_reward"] = rewards
                if kind not in own:
                    is_given = ALL in given
                    result[head] = arrays[given[ALL]] if is_given else _mean(rewards)
            elif kind not in own:
                result.update(self._stacked(head, given, arrays))
            else:
                result.update({key: arrays[key] for key in given.values()})
        by_agent = {
            kind: self._flags(f"{where}{head}", given, arrays)
            for kind, (head, given) in flags.items()
            if given.keys() != {ALL}
        }
        result.update({f"agent_{kind}": rows for kind, rows in by_agent.items()})
        others = [
            rows for key, rows in result.items() if kinds.get(key, ("",))[0] in FLAG_KINDS[:3]
        ]
        others += [arrays[given[ALL]] for _, given in flags.values() if ALL in given]
        if self._cause is None or not self._goes_on:
            self._cause = np.full(len(names), -1)
        last = last_ends(by_agent, [np.asarray(rows[()]) for rows in others], self._cause)
        for kind, (head, given) in flags.items():
            if ALL in given:
                result[head] = arrays[given[ALL]]
            elif kind not in own:
                result[head] = last[kind]
        return result

    def _check(self, where: str, kind: str, head: str, given: Mapping[str, str]) -> None:
        """Raise DataError if an agent lacks an array; parts of its observation may be its own."""
        missing = [agent for agent in self.names if agent not in given]
        is_needed = kind in _NEEDED and "/" not in head
        if is_needed and missing and given.keys() != {ALL}:
            raise DataError(
                f"{where}{head}/{missing[0]}",
                "must be in the source, as the arrays of its other agents are",
                sorted(given.values()),
                "store rows of zeros while an agent does not act, or leave the agent out",
            )

    def _stacked(
        self, head: str, given: Mapping[str, str], arrays: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return one array of all agents, or theirs where shapes or dtypes differ."""
        every = [arrays[given[agent]] for agent in self.names if agent in given]
        forms = {(one.shape, one.dtype) for one in every}
        is_one = len(forms) == 1 and every[0].ndim and every[0].dtype.kind != "O"
        if is_one and given.keys() == {*self.names}:
            return {head: AgentRows(every)}
        return {key: arrays[key] for key in given.values()}

    def _flags(
        self, where: str, given: Mapping[str, str], arrays: Mapping[str, Any]
    ) -> NDArray[np.bool_]:
        """Return the flags of all agents. [T, agents], bool."""
        values = _values(f"{where}: ", given, self.names, arrays)
        return np.stack([convert(where, rows, FLAGS[0]) for rows in values.T], axis=1)


def _parsed(key: str, judged: tuple[str, ...]) -> _Key | None:
    """Return the parts of a key that may be an agent's; None: it has no part."""
    kind, *parts = judged
    if not parts:
        return None
    head = re.split(r"[/.]", key)[0]
    return _Key(head, kind, parts[0], tuple(parts[1:]))


def last_ends(
    flags: Mapping[str, NDArray[np.bool_]],
    others: Sequence[NDArray[Any]] = (),
    cause: NDArray[np.int64] | None = None,
) -> dict[str, NDArray[np.bool_]]:
    """Return the flags of episodes that end with their last agent.

    Of two agents whose flags are set in rows 1 and 3, the episode ends in row 3. It is terminated
    if both are; else it is an end of the other kind that is given.

    Args:
        flags: Of each agent, by kind (`FLAG_KINDS`). [T, agents] each.
        others: Flags of the episode itself, which end it for all agents. [T] or [T, 1] each.
        cause: For rows that follow others, the index of the kind that has ended each agent, or -1;
            it is updated. [agents].
    Returns:
        [T] each, for each given kind.
    """
    kinds = [kind for kind in FLAG_KINDS if kind in flags]
    last: dict[str, NDArray[np.bool_]]
    last = {kind: np.zeros(len(flags[kind]), np.bool_) for kind in kinds}
    starts = np.zeros(0, np.int64)
    if "start" in last:  # an episode begins when all agents do
        last["start"] = np.asarray(flags["start"].all(axis=1))
        starts = np.flatnonzero(last["start"])
        kinds.remove("start")
    if not kinds:
        return last
    num_rows, num_agents = flags[kinds[0]].shape
    cause = np.full(num_agents, -1) if cause is None else cause
    is_end = np.logical_or.reduce([flags[kind].any(axis=1) for kind in kinds])
    whole = [rows.reshape(len(rows), -1) for rows in others if len(rows) == num_rows]
    is_other = np.zeros(num_rows, np.bool_)
    for rows in whole:
        is_other |= (rows != 0).any(axis=1)
    is_start = np.isin(np.arange(num_rows), starts)
    # `cause` is the place in `kinds` of each agent's first end, whose order is that of FLAG_KINDS:
    # terminated comes first, so the largest one is "terminated" only if all agents' are. With
    # kinds terminated and truncated, causes [0, 1] make the row truncated.
    for row in np.flatnonzero(is_end | is_other | is_start).tolist():
        if is_start[row]:
            cause[:] = -1
        for index, kind in enumerate(kinds):
            cause[flags[kind][row] & (cause < 0)] = index
        if (cause >= 0).all():
            last[kinds[int(cause.max())]][row] = True
            cause[:] = -1
        if is_other[row]:
            cause[:] = -1
    return last


def _values(
    where: str, given: Mapping[str, str], names: Sequence[str], arrays: Mapping[str, Any]
) -> NDArray[Any]:
    """Return the values of all agents in each step. [T, agents]."""
    columns = []
    for agent in names:
        array = arrays[given[agent]]
        if array.ndim not in (1, 2) or tuple(array.shape[1:]) not in ((), (1,)):
            raise DataError(
                f"{where}{given[agent]}",
                "must be one value per step",
                list(array.shape),
                "store one value for each step",
            )
        columns.append(np.asarray(array[()]).reshape(-1))
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise DataError(
            f"{where}{given[names[0]]}",
            "must have as many rows as those of the other agents",
            sorted(lengths),
            "store rows of zeros while an agent does not act",
        )
    return np.stack(columns, axis=1)


def _mean(rewards: NDArray[Any]) -> NDArray[Any]:
    """Return the mean of the agents' rewards, exact where all are equal. [T, agents] to [T]."""
    if rewards.dtype.kind not in "biuf":
        return rewards[:, 0]  # its dtype is refused as that of a reward
    dtype = rewards.dtype if rewards.dtype.kind == "f" else np.dtype(np.float64)
    mean = rewards.mean(axis=1, dtype=np.float64).astype(dtype)
    first = rewards[:, 0]
    return np.where((rewards == first[:, None]).all(axis=1), first.astype(dtype), mean)


def _by_number(name: str) -> list[Any]:
    """Return a key that sorts agent_2 before agent_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
