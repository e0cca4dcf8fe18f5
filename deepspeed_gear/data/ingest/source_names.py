"""Usual names of a source's arrays, and the names and roles that a user gives them instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

# The usual names of each kind of array in the sources.
KEYS = {
    "observation": ("observations", "observation", "obs"),
    "action": ("actions", "action", "acts"),
    "reward": ("rewards", "reward", "rews"),
    "next_observation": ("next_observations", "next_observation", "next_obs", "new_obs"),
    "final_observation": ("final_observations", "final_observation", "final_obs"),
    "terminated": (
        "terminals",
        "terminations",
        "termination",
        "terminated",
        "terminateds",
        "is_terminal",
    ),
    "truncated": (
        "timeouts",
        "timeout",
        "time_outs",
        "truncations",
        "truncation",
        "truncated",
        "truncateds",
    ),
    "done": ("dones", "done", "terminal", "is_last"),  # of either cause
    "start": ("episode_starts", "episode_start", "is_first"),
}
KINDS = {key: kind for kind, keys in KEYS.items() for key in keys}
FLAG_KINDS = ("terminated", "truncated", "done", "start")
#: Flags of rows, not of transitions: RLDS, Dreamer, Open X-Embodiment.
ROW_FLAGS = ("is_first", "is_last", "is_terminal")
_COLUMNS = ("observation", "next_observation", "action", "reward")  # kinds that become columns


def meaning(name: str) -> tuple[str, ...]:
    """Return the kind of a dotted name, or its first part where that has none, and its other parts.

    `obs.pos` is an observation's part: ("observation", "pos").
    """
    head, *parts = name.split(".")
    return (KINDS.get(head, head), *parts)


class SourceNames:
    """Names (`rename`) and roles (`role`) that the user gives to the keys of a source.

    A reader asks for the name of each key before it judges what the key is, so arrays of any names
    can be read. A given name or role counts here if it has a known meaning, and no key of the
    source has that meaning by itself. All others change columns later (`output_columns`).

    Attributes:
        columns: Name in the data set of each column that the reader names by its meaning.
        used: Old names of `rename` that have counted here.
    """

    def __init__(self, options: Mapping[str, Any], roles: Iterable[str] = ()) -> None:
        """Take the options `rename` and `role` of a source.

        Args:
            roles: The roles that count here.
        """
        self._rename: dict[str, str] = dict(options.get("rename") or {})
        self._role: dict[str, str] = dict(options.get("role") or {})
        self._roles = set(roles)
        self._early: dict[str, str] = {}
        self.columns: dict[str, str] = {}
        self.used: set[str] = set()

    def compare(self, names: Iterable[str], known: Iterable[str] = ()) -> None:
        """Decide which given names and roles count, by the dotted names of a source.

        Args:
            known: Further names of known meaning, each of its own.
        """
        meanings = {**KINDS, **{name: name for name in known}}
        present = {meanings.get(name.split(".")[0]) for name in names}
        self._early = {
            old: new
            for old, new in self._rename.items()
            if (meaning := meanings.get(new.split(".")[0])) is not None and meaning not in present
        }
        self._roles -= present

    def name(self, given: str) -> str:
        """Return the name by which a dotted name of the source is judged."""
        usual = ".".join(meaning(given))
        for old, new in self._early.items():
            for form in (given, usual):
                if form == old or form.startswith(f"{old}."):
                    return self._renamed(old, new, form.removeprefix(old))
        # A role gives the name of its kind: with role {"score": "reward"}, "score" is judged as
        # "reward". Of observations and actions there may be several, so two columns "a" and "b" of
        # the role observation are judged as the parts "observation.a" and "observation.b".
        final = self._rename.get(given, given)
        for pattern, role in self._role.items():
            if role in self._roles and fnmatchcase(final, pattern):
                is_only = pattern == final and list(self._role.values()).count(role) == 1
                is_scalar = role not in ("observation", "action")
                judged = role if is_scalar or is_only else f"{role}.{given}"
                self.columns[judged] = final
                self.used.update({given} & self._rename.keys())
                return judged
        return given

    def _renamed(self, old: str, new: str, rest: str) -> str:
        self.used.add(old)
        kind, *parts = meaning(new)
        if (
            kind in _COLUMNS and kind != new.split(".")[0]
        ):  # "obs" is judged as observation, and stays "obs"
            self.columns[".".join((kind, *parts)) + rest] = new + rest
        return new + rest
