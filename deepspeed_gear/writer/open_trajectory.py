"""A trajectory that grows step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Schema

Tell = Callable[[object, np.ndarray], None]
NOTHING_OPEN = np.empty(0, np.int64)


class OpenTrajectory:
    """A trajectory that grows step by step in this process.

    Args:
        table: Its name, for error texts.
        schema: Of the table.
        add: Adds a trajectory.
        per_trajectory: Columns of one value per trajectory.
    """

    def __init__(
        self,
        table: str,
        schema: Schema,
        add: Callable[[Mapping[str, Any]], int],
        per_trajectory: Mapping[str, Any],
    ) -> None:
        self._table, self._add, self._once = table, add, dict(per_trajectory)
        steps = [column for column in schema if column.rows != "1" and not column.late]
        self._rows: dict[str, list[Any]] = {column.name: [] for column in steps}
        self._ends = {column.name for column in steps if column.rows == "T+1"}
        self._watch: tuple[str, Tell] | None = None
        self.id: int | None = None  # once it is added

    def watch_versions(self, column: str, tell: Tell) -> None:
        """Tell the policy version of the first step, as `VectorWriter.watch_versions`."""
        self._watch = column, tell

    def append(self, **columns: Any) -> None:
        """Append a step: the observation, the action that it led to, and what came of it.

        Behind the last step, what is left of an episode (its last observation) is appended alone: the columns
        of T+1 rows.

        Args:
            **columns: A row of each column of steps.
        Raises:
            DataError: A column is missing or unknown.
        """
        name = f"table {self._table}"
        unknown = sorted(set(columns) - set(self._rows))
        if unknown:
            raise DataError(f"{name}: column {unknown[0]}", "must be a column of steps", None)
        missing = sorted(set(self._rows) - set(columns))
        if missing and set(columns) != self._ends:
            remedy = f"behind the last step append {sorted(self._ends)} alone" if self._ends else ""
            raise DataError(f"{name}: column {missing[0]}", "must be in every step", None, remedy)
        for column, row in columns.items():
            self._rows[column].append(np.array(row))  # a copy: environments reuse their arrays
        if self._watch is not None and len(self._rows[self._watch[0]]) == 1:
            self._watch[1](self, np.array([columns[self._watch[0]]], np.int64))

    def set(self, **per_trajectory: Any) -> None:
        """Set columns of one value per trajectory."""
        self._once.update(per_trajectory)

    def __enter__(self) -> OpenTrajectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch[1](self, NOTHING_OPEN)
        if kind is None:
            rows = {name: np.stack(values) if values else np.empty(0) for name, values in self._rows.items()}
            self.id = self._add({**rows, **self._once})
