"""Open trajectory: grows step by step in one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.trajectory_checks import ENDS_LAST, as_stored, check_finite
from deepspeed_gear.errors import DataError, known_names
from deepspeed_gear.store.native_rows import form_of
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.writer.partial_publish import (
    CompletedTrajectory,
    GrowingTrajectory,
    OpenWriter,
    PublishedPart,
    checked,
)


class OpenTrajectory(ProcessBound):
    """A trajectory that grows step by step in this process."""

    def __init__(self, writer: OpenWriter, per_trajectory: Mapping[str, Any]) -> None:
        self._name, self._schema, self._add = f"table {writer.table}", writer.schema, writer.add
        self._once: dict[str, np.ndarray] = {}
        self._publisher = publisher = writer.publisher
        schema, native = writer.schema, writer.native
        self._growing = GrowingTrajectory(self, publisher)
        steps = [column for column in schema if column.rows != "1" and not column.late]
        self._rows: dict[str, list[np.ndarray]] = {column.name: [] for column in steps}
        self._row = {column.name: replace(column, rows="1") for column in steps}  # form of one row
        self._index = {column.name: i for i, column in enumerate(steps)}
        self._targets: Any = None
        if native is not None:
            self._targets = native.RowTargets([(0, form_of(native, c)) for c in steps])
            self._row_fits = partial(native.row_fits, self._targets.address)
        # Largest values: Python floats up to these are converted without a check for overflow.
        floats = [c for c in steps if c.must_be_finite and c.dtype != "bfloat16" and not c.shape]
        self._floats = {c.name: (c.numpy_dtype, float(np.finfo(c.numpy_dtype).max)) for c in floats}
        self._ends = {column.name for column in steps if column.rows == "T+1"}
        self._flags = [column.name for column in schema.end_columns]
        self._has_ended = False  # an end flag is set at the last step
        self._version = "" if publisher is None else publisher.inserter.version_column
        self.trajectory_id: int | None = None  # once it is added, or its first steps are published
        self.completed: CompletedTrajectory | None = None  # once it has ended and is stored
        self._open = True
        self.set(**per_trajectory)

    def append(self, *, publish: bool = False, **columns: Any) -> None:
        """Append a step: an observation, its action, and the reward and end flags that followed.

        After the last step, the episode's last observation (the columns of T+1 rows) is appended alone. A
        step that raises is not appended: it may be corrected and appended again, or the trajectory
        discarded.

        Args:
            publish: Publish the complete steps so far, which the next selection may then sample: with columns
                of T+1 rows a step is complete when the observation after it is appended. By then columns of
                one value per trajectory must be set.
            **columns: A row of each column of steps; or nested, as in `Replay.add`.
        Raises:
            DataError: A column is missing or unknown, does not fit, or is not finite and must be; the step
                before it has an end flag; or the trajectory has ended: nothing has changed. Or the table does
                not admit open trajectories.
            StoreFullError, NotReadyError: The step is appended, but not published; as `TrajectoryWriter.add`.
        """
        name = self._name
        self._check_open()
        given = flatten(name, columns, self._rows.keys())
        unknown = sorted(given.keys() - self._rows.keys())
        if unknown:
            raise DataError(f"{name}: column {unknown[0]}", "must be a column of steps", None)
        missing = sorted(self._rows.keys() - given.keys())
        if missing and given.keys() != self._ends:
            remedy = f"after the last step append {sorted(self._ends)} alone" if self._ends else ""
            raise DataError(f"{name}: column {missing[0]}", "must be in every step", None, remedy)
        if self._has_ended and not missing:
            step = f"step {len(self._rows[self._flags[0]]) - 1}"
            remedy = "end this trajectory with its last observation, and begin another"
            raise DataError(f"{name}: end flag of {step}", ENDS_LAST, "a step after it", remedy)
        rows = {column: self._stored(column, row) for column, row in given.items()}
        for column, row in rows.items():
            self._rows[column].append(row)
        if not missing:
            self._has_ended = any(rows[column] for column in self._flags)
        if self._version and len(self._rows[self._version]) == 1:
            self._report_version(rows[self._version])
        if publish:
            self._publish()

    def _stored(self, column: str, row: Any) -> np.ndarray:
        """Return a copy of a row in its stored form: environments reuse their arrays."""
        dtype, largest = self._floats.get(column, (None, -1.0))
        given = row
        if type(row) is float and abs(row) <= largest:
            given = np.array(row, dtype)
        elif type(row) in (bool, int):
            given = np.array(row)
        if self._targets is None or not self._row_fits(self._index[column], given):
            given = as_stored(row, self._row[column], self._name)
            step = f"{self._name}: step {len(self._rows[column])}"
            check_finite(step, [self._row[column]], {column: given})
        stored: np.ndarray = np.array(given)
        return stored

    @property
    def _num_steps(self) -> int:
        """Number of complete steps."""
        return min(len(rows) - int(name in self._ends) for name, rows in self._rows.items())

    def _publish(self) -> None:
        publisher = checked(self._publisher)
        try:
            once = {name: value for name, value in self._once.items() if not self._schema[name].late}
            publisher.publish([PublishedPart(self._growing, self._num_steps, {**self._rows, **once})])
        finally:
            self.trajectory_id = self._growing.trajectory_id

    def set(self, **per_trajectory: Any) -> None:
        """Set columns of one value per trajectory.

        Raises:
            DataError: One is unknown, does not fit, or is not finite and must be; nothing has changed.
        """
        self._check_open()
        given = flatten(self._name, per_trajectory, frozenset(self._schema.names))
        unknown = sorted(given.keys() - set(self._schema.names))
        if unknown:
            remedy = known_names(unknown[0], self._schema.names)
            raise DataError(f"{self._name}: column {unknown[0]}", "must be in the schema", None, remedy)
        values = {n: as_stored(value, self._schema[n], self._name) for n, value in given.items()}
        check_finite(self._name, self._schema, values)
        self._once.update(values)

    def discard(self) -> None:
        """End the trajectory without adding it; published steps stay, the last marked as truncated.

        Nothing can be appended any more, and the end of a `with` block adds nothing. Safe to call twice.
        """
        if not self._open:
            return
        self._close()
        if self._growing.is_published and self._publisher is not None:
            self.completed = self._publisher.end(self._growing, truncated=True)

    def _check_open(self) -> None:
        if not self._open:
            raise DataError(f"{self._name}: trajectory", "must be open", None, "it has ended, begin another")

    def _close(self) -> None:
        self._open = False
        if self._version:
            self._report_version(np.empty(0))

    def _report_version(self, version: np.ndarray) -> None:
        """Report the policy version of the first step while the trajectory is open."""
        assert self._publisher is not None
        self._publisher.inserter.report_versions(self, version.reshape(-1).astype(np.int64))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self._open:
            return
        self._close()
        publisher = self._publisher
        if publisher is None or not self._growing.is_published:
            if kind is None:
                steps = {name: np.stack(rows) if rows else np.empty(0) for name, rows in self._rows.items()}
                number = self._add({**steps, **self._once})
                self.trajectory_id, self.completed = number, CompletedTrajectory(0, number, self._num_steps)
            return
        truncated = True  # unless all its steps can be published
        try:
            if kind is None:
                self._publish()
                for name, rows in self._rows.items():
                    if len(rows) - int(name in self._ends) != self._num_steps:
                        rule = f"must have the rows of {self._num_steps} steps"
                        raise DataError(f"{self._name}: column {name}", rule, len(rows))
                truncated = False
        finally:
            self.completed = publisher.end(self._growing, truncated)
