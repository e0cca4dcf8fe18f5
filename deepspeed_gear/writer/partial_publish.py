"""Open trajectories: append, set, discard; publish their first steps before the episode ends."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.ragged import Ragged, as_ragged, encode_ragged
from deepspeed_gear.data.stored_values import as_stored, check_finite
from deepspeed_gear.data.trajectory_checks import ENDS_LAST
from deepspeed_gear.errors import DataError, known_names, undo_on_error
from deepspeed_gear.public_names import PublicNames
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.eviction import NO_LATEST
from deepspeed_gear.store.native_rows import form_of
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.records import Growing, Refusal, StepCount
from deepspeed_gear.writer.inserter import Inserter

# The words of a growing trajectory before its first publication, up to those of the latest one.
UNPUBLISHED = (-1, 0, 0, 0, 0, -1)
LATEST = slice(Growing.LATEST_SLOT, Growing.NUM_WORDS)


def new_words(count: int) -> np.ndarray:
    """Return the words of trajectories that have not begun. [count, Growing.NUM_WORDS], int64."""
    words = np.empty((count, Growing.NUM_WORDS), np.int64)
    words[:, : Growing.LATEST_SLOT] = UNPUBLISHED
    words[:, LATEST] = NO_LATEST
    return words


class CompletedTrajectory(NamedTuple):
    """A trajectory that has ended and is stored; its late columns can be filled.

    Attributes:
        env: Number of its environment; 0 for a single one.
        trajectory_id: Its id, for `fill` and `read`; a RemoteWriter gives its own number for it.
        num_steps: Number of steps.
    """

    env: int
    trajectory_id: int
    num_steps: int


class GrowingTrajectory:
    """An open trajectory of this process, and how many of its steps are published.

    Args:
        owner: The object that appends to it. The trajectory ends when the owner is deleted.
        publisher: Publisher of its steps; None: it cannot be published.
        words: `Growing` [NUM_WORDS], int64, shared with C++, of an environment's trajectories one
            after the other. None: words of its own, for one trajectory.
    """

    def __init__(
        self, owner: Any, publisher: Publisher | None, words: np.ndarray | None = None
    ) -> None:
        dropped = None if publisher is None else publisher.inserter.dropped.append
        self.owner = weakref.ref(owner, dropped)
        self.publisher = publisher
        self.is_used_again = words is not None
        self.words = new_words(1)[0] if words is None else words

    @property
    def trajectory_id(self) -> int | None:
        """Its id; None: no step was published."""
        number = int(self.words[Growing.ID])
        return None if number < 0 else number

    @property
    def first(self) -> int:
        """First step of the stored trajectory: earlier steps belong to one that was evicted."""
        return int(self.words[Growing.FIRST])

    @property
    def published(self) -> int:
        """Number of published steps of the stored trajectory."""
        return int(self.words[Growing.PUBLISHED])

    @property
    def is_published(self) -> bool:
        return bool(self.words[Growing.SLOT] >= 0)


class PublishedPart(NamedTuple):
    """The steps of an open trajectory to be published.

    Attributes:
        growing: The open trajectory.
        end: Number of its steps, including those before `growing.first`.
        columns: In the stored form. Columns of steps: all rows so far, as an array or a list of
            rows; others: the value. [*shape].
    """

    growing: GrowingTrajectory
    end: int
    columns: Mapping[str, Any]

    @property
    def num_steps(self) -> int:
        """Number of steps that the stored trajectory will have."""
        return self.end - self.growing.first

    @property
    def num_new(self) -> int:
        """Number of steps that are not published yet."""
        return self.num_steps - self.growing.published


def checked(publisher: Publisher | None) -> Publisher:
    """Return a writer's publisher after `Publisher.check`.

    Raises:
        DataError: The writer has no publisher, as it is on another machine; or as the check.
        StoreError: As the check.
    """
    if publisher is None:
        rule = "must be called on a writer of a node that holds the table"
        raise DataError("publish", rule, None, "add whole trajectories from elsewhere")
    publisher.check()
    return publisher


class Publisher:
    """Publishes the open trajectories of this process. One thread at a time.

    The first publication reserves rows for the longest trajectory. If the trajectory is evicted
    (by hand or by age; never to free rows), the steps that follow become another one.

    Args:
        inserter: Adds to the table.
        check: Called before each publication; raises where writing has ended.
    """

    def __init__(self, inserter: Inserter, check: Callable[[], None] = lambda: None) -> None:
        self.inserter = inserter
        self._table = inserter.table
        self._check = check
        self._name = f"table {inserter.table.spec.name}"
        spec = inserter.table.spec
        cases = (
            (
                inserter.max_length is None,
                "must have max_length for steps of open trajectories to be published",
                "set gear.tables.<name>.max_length",
            ),
            (
                spec.return_to_go,
                "must not keep returns-to-go where steps of open trajectories are published",
                "leave out the field return_to_go, or do not publish",
            ),
            (
                spec.group is not None,
                "must have no groups for steps of open trajectories to be published",
                "a group can be sampled when all of it has ended",
            ),
            (
                spec.media is not None,
                "must have no media or ragged columns for steps of open trajectories to be "
                "published",
                "add whole trajectories",
            ),
        )
        #: Rule and remedy of the error where the table cannot have open trajectories; else None.
        self.unsuited: tuple[str, str] | None = next(
            ((rule, remedy) for is_unsuited, rule, remedy in cases if is_unsuited), None
        )
        self._num_begun = 0  # trajectories with published steps
        #: Words of `StepCount` of the native calls that add through this publisher.
        self.counts: list[np.ndarray] = []

    @property
    def num_added(self) -> int:
        """Number of published trajectories, and of those that native calls have stored whole."""
        words = (StepCount.WHOLE_ADDED, StepCount.BEGUN)
        return self._num_begun + sum(int(counts[word]) for counts in self.counts for word in words)

    def look(self) -> None:
        """Raise if writing has ended; end the trajectories of writers that were dropped."""
        self._check()
        if self.inserter.dropped:
            self.inserter.dropped.clear()
            orphans = [growing for growing in self.inserter.growing if growing.owner() is None]
            self.inserter.growing.difference_update(orphans)
            for growing in orphans:
                if growing.is_published:
                    self.end(growing, truncated=True)

    def check(self) -> None:
        """Check that open trajectories can be published.

        Raises:
            StoreError: The run has ended, or the writer is closed.
            DataError: The table takes whole trajectories only.
        """
        self.look()
        if self.unsuited is not None:
            rule, remedy = self.unsuited
            raise DataError(self._name, rule, None, remedy)

    def publish(self, parts: Sequence[PublishedPart]) -> None:
        """Publish all steps so far, for the next selection; waits as `Inserter.add`.

        Raises:
            DataError, StoreFullError, NotReadyError: As `Inserter.add`. Parts that were published
                before stay; a new one that raises has no stored steps.
        """
        until = time.monotonic() + self.inserter.timeout_s
        longer = [part for part in parts if part.num_new > 0]
        for part in longer:
            self.inserter.check_length(part.num_steps)
        while longer:
            with self._table.lock:
                waiting = [
                    part for part in longer if part.growing.is_published and not self._grow(part)
                ]
            for part in longer:
                if not part.growing.is_published:
                    self._begin(part)
            longer = waiting
            if waiting:
                self.inserter.evictor.wait(Refusal.RATE_LIMITED, waiting[0].num_new, until)

    def _grow(self, part: PublishedPart) -> bool:
        """Publish new steps of a published trajectory; return False if rate-limited.

        The caller holds the lock: loading a checkpoint replaces rows, and must not come between
        the test of the slot and the write.
        """
        growing = part.growing
        extents = self._table.extents
        if not extents.stands(growing.words):
            # It was evicted, so the steps that follow become another trajectory. After 5 of 7
            # steps were published, FIRST is 5, and the next trajectory has the steps 5 and 6.
            self._end_slot(growing, truncated=False)
            growing.words[Growing.FIRST] += growing.published
            growing.words[Growing.PUBLISHED] = 0
            growing.words[Growing.SLOT] = -1
            return True
        rate = self._table.spec.retention.rate_limiter
        by_step = rate is not None and rate.unit == "step"
        if by_step and not self.inserter.evictor.may_insert(part.num_new):
            return False
        slot = int(growing.words[Growing.SLOT])
        # Rows first, then the number of steps: samplers read only the steps that it counts.
        self._table.write(slot, part.columns, growing.published, part.num_steps, growing.first)
        growing.words[Growing.PUBLISHED] = part.num_steps
        extents.grow(slot, part.num_steps)
        return True

    def _begin(self, part: PublishedPart) -> None:
        """Publish the first steps of a trajectory, in rows for the longest one."""
        growing = part.growing
        limit = self.inserter.max_length
        extents = self._table.extents
        assert limit is not None  # `unsuited` otherwise
        once = [c.name for c in self._table.spec.schema if c.rows == "1" and not c.late]
        for name in once:
            if name not in part.columns:
                raise DataError(
                    f"{self._name}: column {name}",
                    "must be in every trajectory",
                    remedy="give it with the first steps of the trajectory",
                )
        self.inserter.check({name: part.columns[name] for name in once})
        while not growing.is_published:
            # What its writer has published last and ended: rows near it may be free.
            slot, generation = growing.words[LATEST].tolist()
            slot = self.inserter.reserve(limit, part.num_steps, latest=(slot, generation))
            growing.words[LATEST] = NO_LATEST
            growing.words[: Growing.FIRST] = extents.handle_of(slot)
            self.inserter.growing.add(growing)
            with undo_on_error(lambda: self.end(growing)), self._table.lock:
                if not extents.stands(growing.words):  # a checkpoint was loaded in the meantime
                    growing.words[Growing.SLOT] = -1
                    continue
                self._table.write(slot, part.columns, 0, part.num_steps, growing.first)
                growing.words[Growing.ID] = self.inserter.publish(slot, part.num_steps)
        growing.words[Growing.PUBLISHED] = part.num_steps
        self._num_begun += 1

    def end(
        self, growing: GrowingTrajectory, truncated: bool = False, env: int = 0
    ) -> CompletedTrajectory | None:
        """End an open trajectory; its published steps stay.

        Args:
            growing: The trajectory.
            truncated: Whether to mark its last published step as truncated.
            env: Number of its environment.
        Returns:
            The completed trajectory; None: no step is stored.
        """
        number = growing.trajectory_id if growing.is_published else None
        with self._table.lock:
            self._end_slot(growing, truncated)
        growing.words[Growing.SLOT] = -1
        return None if number is None else CompletedTrajectory(env, number, growing.published)

    def _end_slot(self, growing: GrowingTrajectory, truncated: bool) -> None:
        extents = self._table.extents
        if not growing.is_used_again:
            self.inserter.growing.discard(growing)
        if growing.is_published and extents.is_own(growing.words):
            extents.end(int(growing.words[Growing.SLOT]), truncated, growing.is_used_again)
            if growing.is_used_again:
                growing.words[LATEST] = growing.words[[Growing.SLOT, Growing.GENERATION]]

    def close(self) -> None:
        """End all open trajectories: published steps stay, marked as truncated."""
        for growing in list(self.inserter.growing):
            if growing.publisher is self and growing.is_published:
                self.end(growing, truncated=True)


class OpenWriter(ProcessBound, PublicNames, ABC):
    """Base of the writers that store open trajectories; `add` stores them when they end.

    Args:
        table: Name of the table.
        schema: Columns of the table.
        max_length: Steps of the longest trajectory; None: as many as fit.
        whole_fields: Fields that need whole episodes. Longer ones are then refused instead of
            divided: a part's returns-to-go would lack later rewards, and its time steps would
            begin at 0 again.
    """

    _internal = frozenset({"native", "publisher", "whole_fields"})
    #: Publisher of this writer's open trajectories; None: they cannot be published.
    publisher: Publisher | None = None
    native: ModuleType | None = None  # none on a machine without a store, which needs no compiler

    def __init__(
        self, table: str, schema: Schema, max_length: int | None, whole_fields: tuple[str, ...]
    ) -> None:
        self.table = table
        self.schema = schema
        self.max_length = max_length
        self.whole_fields = whole_fields

    @abstractmethod
    def add(self, trajectory: Mapping[str, Any]) -> int:
        """Add a whole trajectory; return its id, or a RemoteWriter's number for it."""


class OpenTrajectory(ProcessBound):
    """A trajectory that grows step by step; a `with` block adds it to the table at its end.

    Attributes:
        trajectory_id: Its id, once it is added or its first steps are published; else None.
        completed: The record of the stored trajectory, once it has ended; else None.
    """

    def __init__(self, writer: OpenWriter, per_trajectory: Mapping[str, Any]) -> None:
        self._name = f"table {writer.table}"
        self._schema = writer.schema
        self._add = writer.add
        self._once: dict[str, np.ndarray] = {}
        publisher = writer.publisher
        schema = writer.schema
        native = writer.native
        self._publisher = publisher
        self._growing = GrowingTrajectory(self, publisher)
        steps = [column for column in schema if column.rows != "1" and not column.late]
        # The values of each step of these columns are joined when the trajectory ends.
        self._ragged = {column.name: column for column in schema.ragged_columns if not column.late}
        self._rows: dict[str, list[Any]] = {name: [] for name in self._ragged}
        self._rows |= {column.name: [] for column in steps}
        self._row = {column.name: replace(column, rows="1") for column in steps}  # form of one row
        self._index = {column.name: i for i, column in enumerate(steps)}
        self._targets: Any = None
        if native is not None:
            self._targets = native.RowTargets([(0, form_of(native, c)) for c in steps])
            self._row_fits = partial(native.row_fits, self._targets.address)
        # dtype and largest value: Python floats up to it are converted without an overflow check.
        floats = [c for c in steps if c.must_be_finite and c.dtype != "bfloat16" and not c.shape]
        self._floats = {c.name: (c.numpy_dtype, float(np.finfo(c.numpy_dtype).max)) for c in floats}
        self._ends = {column.name for column in steps if column.rows == "T+1"}
        self._flags = [column.name for column in schema.end_columns]
        self._has_ended = False  # an end flag is set at the last step
        self._version = "" if publisher is None else publisher.inserter.version_column
        self.trajectory_id: int | None = None
        self.completed: CompletedTrajectory | None = None
        self._open = True
        self.set(**per_trajectory)

    def append(self, *, publish: bool = False, **columns: Any) -> None:
        """Append a step: an observation, its action, and the reward and end flags that followed.

        After the last step, the episode's last observation (the columns of T+1 rows) is appended
        alone. A step that raises is not appended: it may be corrected and appended again, or the
        trajectory discarded.

        Args:
            publish: Publish the complete steps so far, which the next selection may then sample:
                with columns of T+1 rows a step is complete when the observation after it is
                appended. By then columns of one value per trajectory must be set.
            **columns: A row of each column of steps, and the values of the step in each ragged
                column; or nested, as in `Replay.add`.
        Raises:
            DataError: A column is missing or unknown, does not fit, or is not finite and must be;
                the step before has an end flag; or the trajectory has ended: nothing has changed.
                Or the table does not admit open trajectories.
            StoreFullError, NotReadyError: As `TrajectoryWriter.add`; the step is appended, but not
                published.
        """
        name = self._name
        self._check_open()
        given = self._flat(columns, self._rows.keys(), "must be a column of steps")
        missing = sorted(self._rows.keys() - given.keys())
        if missing and given.keys() != self._ends:
            remedy = "append every column of the schema with each step"
            if self._ends:
                remedy = f"after the last step append {sorted(self._ends)} alone"
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

    def _flat(self, given: Mapping[str, Any], names: Set[str], rule: str) -> Mapping[str, Any]:
        """Return columns by their dotted names; raise a DataError by a rule if one is unknown."""
        flat = flatten(self._name, given, names)
        if not flat.keys() <= names:
            unknown = min(flat.keys() - names)
            remedy = known_names(unknown, names)
            raise DataError(f"{self._name}: column {unknown}", rule, None, remedy)
        return flat

    def _stored(self, column: str, row: Any) -> Any:
        """Copy a row in its stored form: environments reuse their arrays."""
        if column in self._ragged:
            name = f"{self._name}: step {len(self._rows[column])}: column {column}"
            values = as_ragged([row], name)
            encode_ragged(values, self._ragged[column], name, 1)
            return values.values.clone()
        dtype, largest = self._floats.get(column, (None, -1.0))
        given = row
        # Python numbers become arrays first, as the native check of a row only takes arrays.
        if type(row) is float and abs(row) <= largest:
            given = np.array(row, dtype)
        elif type(row) in (bool, int):
            given = np.array(row)
        if self._targets is None or not self._row_fits(self._index[column], given):
            given = as_stored(row, self._row[column], self._name)
            step = f"{self._name}: step {len(self._rows[column])}"
            check_finite(step, [self._row[column]], {column: given})
        return np.array(given)

    @property
    def _num_steps(self) -> int:
        """Number of complete steps: T of T+1 observations and T other rows."""
        return min(len(rows) - int(name in self._ends) for name, rows in self._rows.items())

    def _publish(self) -> None:
        publisher = checked(self._publisher)
        try:
            once = {
                name: value for name, value in self._once.items() if not self._schema[name].late
            }
            publisher.publish(
                [PublishedPart(self._growing, self._num_steps, {**self._rows, **once})]
            )
        finally:
            self.trajectory_id = self._growing.trajectory_id

    def set(self, **per_trajectory: Any) -> None:
        """Set columns of one value per trajectory.

        Raises:
            DataError: One is unknown, does not fit, or is not finite and must be; nothing has
                changed.
        """
        self._check_open()
        names = dict.fromkeys(self._schema.names).keys()
        given = self._flat(per_trajectory, names, "must be in the schema")
        values: dict[str, Any] = {}
        for name, value in given.items():
            column = self._schema[name]
            if column.is_ragged:
                at = f"{self._name}: column {name}"
                values[name] = as_ragged(value, at)
                encode_ragged(values[name], column, at, None)
            else:
                values[name] = as_stored(value, column, self._name)
        tensors = {n: value for n, value in values.items() if not self._schema[n].is_ragged}
        check_finite(self._name, self._schema, tensors)
        self._once.update(values)

    def discard(self) -> None:
        """End the trajectory without adding it.

        Published steps stay, the last one marked as truncated. Nothing can be appended afterwards,
        and the end of the `with` block adds nothing. Safe to call twice.
        """
        if not self._open:
            return
        self._close()
        if self._growing.is_published and self._publisher is not None:
            self.completed = self._publisher.end(self._growing, truncated=True)

    def _check_open(self) -> None:
        if not self._open:
            raise DataError(
                f"{self._name}: trajectory", "must be open", None, "it has ended, begin another"
            )

    def _close(self) -> None:
        self._open = False
        if self._version:
            self._report_version(np.empty(0))

    def _report_version(self, version: np.ndarray) -> None:
        """Report the policy version of the first step, or with an empty array that it has ended."""
        assert self._publisher is not None
        self._publisher.inserter.report_versions(self, version.reshape(-1).astype(np.int64))

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if not self._open:
            return
        self._close()
        publisher = self._publisher
        if publisher is None or not self._growing.is_published:
            if kind is None:
                steps: dict[str, Any] = {
                    name: np.stack(rows) if rows else np.empty(0)
                    for name, rows in self._rows.items()
                    if name not in self._ragged
                }
                steps |= {name: Ragged.of_rows(self._rows[name]) for name in self._ragged}
                number = self._add({**steps, **self._once})
                self.trajectory_id = number
                self.completed = CompletedTrajectory(0, number, self._num_steps)
            return
        truncated = True  # unless all its steps can be published
        try:
            if kind is None:
                self._publish()
                for name, rows in self._rows.items():
                    if len(rows) - int(name in self._ends) != self._num_steps:
                        rule = f"must have the rows of {self._num_steps} steps"
                        raise DataError(
                            f"{self._name}: column {name}",
                            rule,
                            len(rows),
                            "give a row of every column with each step",
                        )
                truncated = False
        finally:
            self.completed = publisher.end(self._growing, truncated)
