"""Columns as ingest writes them: the options of names, dtypes, roles and rewards; the returns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
                    raise DataError(
                        f"{self.reader.path}: --role {pattern}=reward",
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

        Where a value of a block is wrong, its episodes are written one by one, so that the error
        names the episode.
        """
        # Other rewards have no sums by trajectory of a block.
        has_sums = self._reward is None or (self._reward.rows == "T" and not self._reward.shape)
        for given in self.reader.blocks():
            for block in (given,) if has_sums else given.divided():
                written: Iterable[TrajectoryBlock]
                try:
                    written = [self._written(block)]
                except DataError:
                    if block.is_single:
                        raise
                    written = map(self._written, block.divided())
                yield from written

    def _written(self, block: TrajectoryBlock) -> TrajectoryBlock:
        """Return episodes with their columns as written; DataError for a wrong value."""
        name = self._name(block, 0)
        arrays = {self.names.get(key, key): rows for key, rows in block.arrays.items()}
        derived: dict[str, Any] = {"length": block.lengths[0] if block.is_single else block.lengths}
        if self._at in ("last", "each"):
            is_rewarded = np.zeros(block.num_rows, np.bool_)
            is_rewarded[block.last_steps if self._at == "last" else slice(None)] = True
            is_rewarded[block.final_rows] = False
            for column in self._ends:
                flags = as_stored(arrays.get(column.name), column, name, block.num_rows)
                is_rewarded |= flags != 0
            arrays[_REWARD.name] = np.where(is_rewarded, self._value, 0.0)
        if self._reward is not None and self._reward.name in arrays:
            num_rows = None if block.is_single else block.num_rows
            rewards = as_stored(arrays[self._reward.name], self._reward, name, num_rows)
            arrays[self._reward.name] = rewards
            numbers = as_numbers(rewards, self._reward).astype(np.float64)
            derived["return"] = numbers.sum() if block.is_single else block.sums(numbers)
        for key in derived.keys() & arrays.keys():  # of a program's rows
            if not np.array_equal(arrays[key], derived[key]):
                raise DataError(
                    f"{name}: column {key}",
                    f"must be {derived[key]}, as ingest derives it",
                    arrays[key],
                    "leave it out",
                )
        rows = {column.name: column.rows for column in self.columns}
        arrays.update({key: values for key, values in derived.items() if key in rows})
        return replace(
            block,
            name_of=partial(self._name, block),
            arrays=arrays,
            rows={} if block.is_single else rows,
        )

    def _name(self, block: TrajectoryBlock, place: int) -> str:
        return f"{self.reader.path}: {block.name_of(place)}"
