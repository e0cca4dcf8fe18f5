"""Options of ingest that change a reader's columns: names, dtypes, roles, and the rule of missing
rewards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.trajectory_checks import as_numbers, as_stored
from deepspeed_gear.errors import ConfigError, DataError, known_names
from deepspeed_gear.schema import Column, Schema

RETURN = Column("return", "float64", role="return", rows="1")
LENGTH = Column("length", "int64", role="length", rows="1")
_REWARD = Column("reward", "float64", role="reward")
_RULES = "none (no column), last=VALUE (of the last step, 0 before) or each=VALUE"


class OutputColumns:
    """A reader's columns and episodes as they are written: with the options, and the derived
    columns.

    A data set has the columns `reward` and `return` only where the source has rewards, or a rule
    makes them. A source without rewards needs a rule, as zeros would be taken for rewards; tokens
    need none. `columns` are those of the data set, without `source`; `names` has the new ones by
    the reader's.
    """

    def __init__(self, reader: Reader, options: Mapping[str, Any]) -> None:
        """Apply dtype, rename, role and reward of `ingest.Options` to the columns of an open
        source.
        """
        self.reader = reader
        self.names = dict(options.get("rename") or {})
        self._check_names("--rename", self.names, [column.name for column in reader.columns])
        columns = [replace(c, name=self.names.get(c.name, c.name)) for c in reader.columns]
        columns = self._changed(columns, "role", options.get("role"))
        self._at, self._value = self._rule(columns, options.get("reward"))
        if self._at in ("last", "each"):
            columns = [*Schema(columns), _REWARD]  # which has columns of steps
        columns = self._changed(columns, "dtype", options.get("dtype"))
        self._reward = next((column for column in columns if column.role == "reward"), None)
        self.columns = self._with_derived(columns)
        for name, count in Counter(column.name for column in self.columns).items():
            if count > 1:
                rule = "must not have the name of another column, or of a derived one"
                remedy = "leave it out with --columns, or give it another name with --rename"
                raise DataError(f"{reader.path}: {name}", rule, None, remedy)
        self._check_kept()
        self._ends = Schema(self.columns).end_columns if options.get("split_by_flags") else ()

    def _with_derived(self, columns: list[Column]) -> tuple[Column, ...]:
        """Return the columns with return and length; of an export, those that its data set has of
        them.
        """
        derived = [*([] if self._reward is None else [RETURN]), LENGTH]
        if (whole := self.reader.whole) is None:
            return (*columns, *derived)
        is_new = self._at in ("last", "each")  # the rewards, so the returns too
        stated = {c.name: c for c in whole if replace(c, allow_nan=False) in derived}
        derived = [
            stated.get(c.name, c) for c in derived if c.name in stated or (is_new and c == RETURN)
        ]
        places = {self.names.get(name, name): place for place, name in enumerate(whole.names)}
        return (
            *sorted((*columns, *derived), key=lambda column: places.get(column.name, len(places))),
        )

    def _check_kept(self) -> None:
        """Raise DataError if --columns has left out what may be the observations or the actions."""
        select = self.reader.select
        roles = {column.role for column in self.columns}
        left_out = select.left_out if "token" not in roles else []
        for role in ("observation", "action") if left_out else ():
            if role not in roles and role not in select.excluded:
                rule = f"must keep a column of the role {role}: it leaves out {', '.join(left_out)}"
                remedy = (
                    f"name the {role}s as well, with --role COLUMN={role} where they lack "
                    f"the role; "
                )
                remedy += "or leave columns out by name: " + ",".join(
                    f"!{name}" for name in left_out
                )
                raise DataError(f"{self.reader.path}: --columns", rule, None, remedy)

    def _check_names(self, option: str, patterns: Mapping[str, str], names: list[str]) -> None:
        matches = fnmatchcase if option != "--rename" else str.__eq__
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                rule = "must name a column of the source"
                raise DataError(
                    f"{self.reader.path}: {option}", rule, pattern, known_names(pattern, names)
                )

    def _changed(
        self, columns: list[Column], what: str, values: Mapping[str, str] | None
    ) -> list[Column]:
        """Return the columns with the values of one option; the last pattern that
        matches counts.
        """
        self._check_names(f"--{what}", values or {}, [column.name for column in columns])
        for pattern, value in (values or {}).items():
            change: dict[str, Any] = {what: value}
            chosen = [column for column in columns if fnmatchcase(column.name, pattern)]
            for column in chosen if change == {"role": "reward"} else []:
                if column.rows == "1" and column.name != "reward":
                    as_float = "" if column.is_floating else " --dtype reward=float32"
                    remedy = (
                        f"--rename {column.name}=reward{as_float} makes it the reward of "
                        f"a "
                        f"trajectory"
                    )
                    where = f"{self.reader.path}: --role {pattern}=reward"
                    raise DataError(
                        where, "must be of a value per step", "one per trajectory", remedy
                    )
            columns = [replace(c, **change) if c in chosen else c for c in columns]
        return columns

    def _rule(self, columns: list[Column], rule: str | None) -> tuple[str, float]:
        """Return where the rule sets rewards, "" without one, and their value."""
        at, _, text = (rule or "").partition("=")
        try:
            value = float(text or 0)
        except ValueError:
            value = math.nan
        is_known = (at in ("last", "each") and text) or rule == "none"
        if rule is not None and not (is_known and math.isfinite(value)):
            raise ConfigError("--reward", f"must be {_RULES}", rule)
        given = next((column.name for column in columns if column.role == "reward"), None)
        where = f"{self.reader.path}: --reward"
        if given is not None and rule is not None:
            remedy = f"the source has rewards, its column {given}: leave --reward out"
            raise DataError(where, "must be for a source without rewards", rule, remedy)
        needs_rule = not self.reader.has_schema and not any(
            column.role == "token" for column in columns
        )
        if given is None and rule is None and needs_rule:
            names = ", ".join(column.name for column in columns)
            remedy = f"or name one of its columns with --role COLUMN=reward: {names}"
            if nulls := [
                note for note in self.reader.notes if note.startswith("null in every row")
            ]:
                remedy += f"; {nulls[0]}"
            raise DataError(
                where, f"must be given, as the source has no rewards: {_RULES}", None, remedy
            )
        return at, value

    def episodes(self) -> Iterator[tuple[str, dict[str, Any], int]]:
        """Yield the name for errors of each episode, its columns, and its number of steps."""
        first = next(column for column in self.reader.columns if column.rows != "1")
        names = {column.name for column in self.columns}
        for episode, given in self.reader.episodes():
            name = f"{self.reader.path}: {episode}"
            if first.name not in given:
                raise DataError(f"{name}: column {first.name}", "must be in every trajectory")
            length = len(given[first.name]) - int(first.rows == "T+1")
            arrays: dict[str, Any] = {self.names.get(key, key): rows for key, rows in given.items()}
            derived = {"length": np.asarray(length, dtype=np.int64)}
            if self._at in ("last", "each"):
                rewarded = [np.arange(length) >= (length - 1 if self._at == "last" else 0)]
                rewarded += [
                    as_stored(arrays.get(c.name), c, name, length) != 0 for c in self._ends
                ]
                arrays[_REWARD.name] = np.where(np.logical_or.reduce(rewarded), self._value, 0.0)
            if self._reward is not None and self._reward.name in arrays:
                rewards = as_stored(arrays[self._reward.name], self._reward, name)
                arrays[self._reward.name] = rewards
                derived["return"] = np.asarray(
                    as_numbers(rewards, self._reward).astype(np.float64).sum()
                )
            for column in derived.keys() & arrays.keys():  # of a program's rows
                if not np.array_equal(arrays[column], derived[column]):
                    rule = f"must be {derived[column]}, as ingest derives it"
                    raise DataError(
                        f"{name}: column {column}", rule, arrays[column], "leave it out"
                    )
            kept = {column: derived[column] for column in derived if column in names}
            yield name, {**arrays, **kept}, length
