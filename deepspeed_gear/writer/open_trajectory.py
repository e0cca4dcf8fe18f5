"""A trajectory that grows step by step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.trajectory import as_stored
from deepspeed_gear.writer.publishing import Growing, Part, Publisher, no_publisher

Tell = Callable[[object, np.ndarray], None]
NOTHING_OPEN = np.empty(0, np.int64)


class OpenTrajectory:
    """A trajectory that grows step by step in this process.

    Args:
        table: Its name, for error texts.
        schema: Of the table.
        add: Adds a trajectory.
        per_trajectory: Columns of one value per trajectory.
        publisher: Publishes steps before the end; None: nothing can.
    """

    def __init__(
        self,
        table: str,
        schema: Schema,
        add: Callable[[Mapping[str, Any]], int],
        per_trajectory: Mapping[str, Any],
        publisher: Publisher | None = None,
    ) -> None:
        self._table, self._schema, self._add, self._once = table, schema, add, dict(per_trajectory)
        self._publisher, self._growing = publisher, Growing(weakref.ref(self))
        steps = [column for column in schema if column.rows != "1" and not column.late]
        self._rows: dict[str, list[Any]] = {column.name: [] for column in steps}
        self._ends = {column.name for column in steps if column.rows == "T+1"}
        self._watch: tuple[str, Tell] | None = None
        self.id: int | None = None  # once it is added, or its first steps are published

    def watch_versions(self, column: str, tell: Tell) -> None:
        """Tell the policy version of the first step, as `VectorWriter.watch_versions`."""
        self._watch = column, tell

    def append(self, *, publish: bool = False, **columns: Any) -> None:
        """Append a step: the observation, the action that it led to, and what came of it.

        Behind the last step, what is left of an episode (its last observation) is appended alone: the columns
        of T+1 rows.

        Args:
            publish: Let batches hold the steps so far that are complete, from the next cut on: with columns
                of T+1 rows a step is complete when the observation behind it is appended. By then columns of
                one value per trajectory must be set.
            **columns: A row of each column of steps.
        Raises:
            DataError: A column is missing or unknown; or the table cannot take parts of trajectories.
            StoreFullError, NotReadyError: The step is appended, but not published; as `TrajectoryWriter.add`.
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
        if publish:
            self._publish()

    # ---- publishing ------------------------------------------------------------------------------

    @property
    def _num_steps(self) -> int:
        """Steps that are complete."""
        return min(len(rows) - int(name in self._ends) for name, rows in self._rows.items())

    def _publish(self) -> None:
        publisher = self._publisher
        if publisher is None:
            raise no_publisher()
        publisher.check()
        try:
            publisher.publish([Part(self._growing, self._num_steps, self._rows_of, self._value_of)])
        finally:
            self.id = self._growing.id

    def _rows_of(self, column: Column, first: int, end: int) -> np.ndarray:
        rows = np.stack(self._rows[column.name][first:end])
        return as_stored(rows, column, f"table {self._table}")

    def _value_of(self, column: Column) -> np.ndarray:
        if column.name not in self._once:
            raise DataError(f"table {self._table}: column {column.name}", "must be in every trajectory")
        return as_stored(self._once[column.name], column, f"table {self._table}")

    # ---- end -------------------------------------------------------------------------------------

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
        if self._growing.is_published and self._publisher is not None:
            self._end_published(self._publisher, kind is None)
        elif kind is None:
            rows = {name: np.stack(values) if values else np.empty(0) for name, values in self._rows.items()}
            self.id = self._add({**rows, **self._once})

    def _end_published(self, publisher: Publisher, is_whole: bool) -> None:
        """End what is published; it is marked as truncated unless all of the rest can follow."""
        truncated = True
        try:
            if is_whole:
                self._publish()
                self._check_end()
                truncated = False
        finally:
            publisher.end(self._growing, truncated)

    def _check_end(self) -> None:
        for name, rows in self._rows.items():
            if len(rows) - int(name in self._ends) != self._num_steps:
                rule = f"must have the rows of {self._num_steps} steps"
                raise DataError(f"table {self._table}: column {name}", rule, len(rows))
