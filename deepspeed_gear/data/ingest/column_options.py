"""Ingest options that change a reader's columns: names, dtypes, roles and missing rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.source_columns import column_name
from deepspeed_gear.data.stored_values import as_numbers, as_stored
from deepspeed_gear.data.trajectory_block import TrajectoryBlock
from deepspeed_gear.errors import ConfigError, DataError, known_names
from deepspeed_gear.schema import Column, Schema

RETURN = Column("return", "float64", role="return", rows="1")
LENGTH = Column("length", "int64", role="length", rows="1")
_REWARD = Column("reward", "float64", role="reward")
_RULES = "none (no column), last=VALUE (of the last step, 0 before) or each=VALUE"


class OutputColumns:
    """A reader's columns and episodes as they are written: changed by options, with derived ones.

    A data set has the columns `reward` and `return` only where the source has rewards, or a rule
    makes them. A source without rewards needs a rule, as zeros would be taken for rewards; a source
    of tokens needs none.

    Attributes:
        reader: The open source.
        columns: Columns of the data set, without `source`.
        names: New name by the reader's, for renamed columns.
    """

    def __init__(self, reader: Reader, options: Mapping[str, Any]) -> None:
        """Apply the options dtype, rename, role and reward to the columns of an open source."""
        self.reader = reader
        given = {**(reader.options.get("rename") or {}), **(options.get("rename") or {})}
        late = {old: new for old, new in given.items() if old not in reader.names.used}
        self._check_names("--rename", late, [column.name for column in reader.columns])
        judged = {
            column_name(*old.split(".")): column_name(*new.split("."))
            for old, new in reader.names.columns.items()
        }
        self.names = {**judged, **late}
        columns = [replace(c, name=self.names.get(c.name, c.name)) for c in reader.columns]
        roles = {**(reader.options.get("role") or {}), **(options.get("role") or {})}
        columns = self._changed(columns, "role", roles)
        self._at, self._value = self._rule(columns, options.get("reward"))
        if self._at in ("last", "each"):
            columns = [*Schema(columns), _REWARD]  # which has columns of steps
        columns = self._changed(columns, "dtype", options.get("dtype"))
        self._reward = next((column for column in columns if column.role == "reward"), None)
        self.columns = self._with_derived(columns)
        for name, count in Counter(column.name for column in self.columns).items():
            if count > 1:
                raise DataError(
                    f"{reader.path}: {name}",
                    "must not have the name of another column, or of a derived one",
                    None,
                    "leave it out with --columns, or give it another name with --rename",
                )
        self._check_kept()
        self._ends = Schema(self.columns).end_columns if options.get("split_by_flags") else ()

    def _with_derived(self, columns: list[Column]) -> tuple[Column, ...]:
        """Return the columns with `return` and `length`.

        For an export these are only those that its data set had, at their places.
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
        """Raise DataError if --columns may have left out the observations or the actions."""
        select = self.reader.select
        roles = {column.role for column in self.columns}
        left_out = select.left_out if "token" not in roles else []
        for role in ("observation", "action") if left_out else ():
            if role not in roles and role not in select.excluded:
                by_name = ",".join(f"!{name}" for name in left_out)
                raise DataError(
                    f"{self.reader.path}: --columns",
                    f"must keep a column of the role {role}: it leaves out {', '.join(left_out)}",
                    None,
                    f"name the {role}s as well, with --role COLUMN={role} where they lack the "
                    f"role; or leave columns out by name: {by_name}",
                )

    def _check_names(self, option: str, patterns: Mapping[str, str], names: list[str]) -> None:
        matches = fnmatchcase if option != "--rename" else str.__eq__
        for pattern in patterns:
            if not any(matches(name, pattern) for name in names):
                raise DataError(
                    f"{self.reader.path}: {option}",
                    "must name a column of the source",
                    pattern,
                    known_names(pattern, names),
                )

    def _changed(
        self, columns: list[Column], what: str, values: Mapping[str, str] | None
    ) -> list[Column]:
        """Return the columns with one option applied; the last pattern that matches counts."""
        self._check_names(f"--{what}", values or {}, [column.name for column in columns])
        for pattern, value in (values or {}).items():
            change: dict[str, Any] = {what: value}
            chosen = [column for column in columns if fnmatchcase(column.name, pattern)]
            for column in chosen if change == {"role": "reward"} else []:
                if column.rows == "1" and column.name != "reward":
                    as_float = "" if column.is_floating else " --dtype reward=float32"
                    where = f"{self.reader.path}: --role {pattern}=reward"
                    raise DataError(
                        where,
                        "must have a value for each step",
                        "one per trajectory",
                        f"--rename {column.name}=reward{as_float} makes it the reward of a "
                        "trajectory",
                    )
            columns = [replace(c, **change) if c in chosen else c for c in columns]
        return columns

    def _rule(self, columns: list[Column], rule: str | None) -> tuple[str, float]:
        """Return the steps that the rule rewards ("last", "each", "none" or "") and the reward."""
        at, _, text = (rule or "").partition("=")
        try:
            value = float(text or 0)
        except ValueError:
            value = math.nan
        is_known = (at in ("last", "each") and text) or rule == "none"
        if rule is not None and not (is_known and math.isfinite(value)):
            raise ConfigError(
                "--reward", f"must be {_RULES}", rule, "for example last, each:0.1 or none"
            )
        given = next((column.name for column in columns if column.role == "reward"), None)
        where = f"{self.reader.path}: --reward"
        if given is not None and rule is not None:
            raise DataError(
                where,
                "must be for a source without rewards",
                rule,
                f"the source has rewards, its column {given}: leave --reward out",
            )
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

    def blocks(self) -> Iterator[TrajectoryBlock]:
        """Yield the episodes in order, in the reader's blocks, with the columns as written.

        What a block cannot hold is done for its episodes one by one, and so are wrong values, whose
        error names the episode.
        """
        for block in self.reader.blocks():
            several = None if block.is_single else self._several(block)
            if several is not None:
                yield several
                continue
            for one in block.divided():
                yield self._one(one)

    def _one(self, block: TrajectoryBlock) -> TrajectoryBlock:
        """Return one episode with its columns as written."""
        name = self._name(block, 0)
        length = int(block.lengths[0])
        arrays: dict[str, Any] = {
            self.names.get(key, key): rows for key, rows in block.arrays.items()
        }
        derived = {"length": np.asarray(length, dtype=np.int64)}
        if self._at in ("last", "each"):
            rewarded = [np.arange(length) >= (length - 1 if self._at == "last" else 0)]
            rewarded += [as_stored(arrays.get(c.name), c, name, length) != 0 for c in self._ends]
            arrays[_REWARD.name] = np.where(np.logical_or.reduce(rewarded), self._value, 0.0)
        if self._reward is not None and self._reward.name in arrays:
            rewards = as_stored(arrays[self._reward.name], self._reward, name)
            arrays[self._reward.name] = rewards
            derived["return"] = np.asarray(
                as_numbers(rewards, self._reward).astype(np.float64).sum()
            )
        for column in derived.keys() & arrays.keys():  # of a program's rows
            if not np.array_equal(arrays[column], derived[column]):
                raise DataError(
                    f"{name}: column {column}",
                    f"must be {derived[column]}, as ingest derives it",
                    arrays[column],
                    "leave it out",
                )
        return TrajectoryBlock.of_one(name, {**arrays, **self._kept(derived)}, length)

    def _several(self, block: TrajectoryBlock) -> TrajectoryBlock | None:
        """Return several episodes with their columns as written; None to do it one by one."""
        arrays = {self.names.get(key, key): rows for key, rows in block.arrays.items()}
        if self._ends or not {"length", "return"}.isdisjoint(arrays):
            return None
        derived: dict[str, Any] = {"length": block.lengths}
        if self._at in ("last", "each"):
            rewards = np.zeros(block.num_rows)
            rewards[block.last_steps if self._at == "last" else slice(None)] = self._value
            rewards[block.final_rows] = 0.0
            arrays[_REWARD.name] = rewards
        if self._reward is not None and self._reward.name in arrays:
            if self._reward.rows != "T" or self._reward.shape:
                return None
            given = arrays[self._reward.name]
            try:
                rewards = as_stored(given, self._reward, "", block.num_rows)
            except DataError:
                return None
            arrays[self._reward.name] = rewards
            derived["return"] = block.sums(as_numbers(rewards, self._reward).astype(np.float64))
        return replace(
            block,
            name_of=partial(self._name, block),
            arrays={**arrays, **self._kept(derived)},
            rows={column.name: column.rows for column in self.columns},
        )

    def _kept(self, derived: Mapping[str, Any]) -> dict[str, Any]:
        names = {column.name for column in self.columns}
        return {column: derived[column] for column in derived if column in names}

    def _name(self, block: TrajectoryBlock, place: int) -> str:
        return f"{self.reader.path}: {block.name_of(place)}"
