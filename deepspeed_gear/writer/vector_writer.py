"""VectorWriter: steps of many environments; ends, resets and cuts of their episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.errors import DataError
from deepspeed_gear.public_names import PublicNames
from deepspeed_gear.schema import Column
from deepspeed_gear.store.native_rows import address, form_of
from deepspeed_gear.store.process_bound import ProcessBound
from deepspeed_gear.store.records import Growing, StepCount
from deepspeed_gear.writer.autoreset_modes import ResetCheck
from deepspeed_gear.writer.open_rows import OpenRows
from deepspeed_gear.writer.partial_publish import (
    UNPUBLISHED,
    CompletedTrajectory,
    GrowingTrajectory,
    OpenWriter,
    PublishedPart,
    checked,
    new_words,
)
from deepspeed_gear.writer.returns_to_go import ReturnsToGo
from deepspeed_gear.writer.step_columns import StepColumns, pick

_FIRST_LENGTH = 256  # steps for which there is room at first; it doubles as needed
# Bits of the native call's result, `StepEvent` of store/vector_steps.h: the part of the step that
# Python must complete.
_LEFT = -1  # the whole step: the call did nothing
_ENDS_LEFT = 2  # some trajectories have ended and are not stored
_PUBLISH_LEFT = 4  # some steps are not published


class VectorWriter(ProcessBound, PublicNames):
    """Writer of the steps of N environments: adds a trajectory whenever an episode ends.

    State columns (observations, and all columns of T+1 rows) hold the state of an environment:
    `reset` takes the first state of an episode, `step` the state after a step. The other columns of
    steps hold actions and their results. Each episode has its own first and last observation.
    Columns with dots in their names may come nested, as in `Replay.add`: `observation` as a
    gymnasium environment with a Dict or Tuple space returns it. The writer fills columns of the
    roles timestep and return_to_go itself, the latter after the episode.

    An episode of more than `max_length` steps is cut there, marked as truncated, and continues as
    another trajectory, unless a field needs whole episodes.

    Every environment has a range of open rows, in which its trajectory grows. Row
    `_next` of an environment holds its next state; the action that leads to it is one row before.
    After `reset` and two steps of the environment at place 0, observations are in the rows 0 to 2,
    actions in 0 and 1, and `_next` is 3. Steps of plain arrays are taken by one native call;
    `_take` is the same in Python, for all others.

    Not thread-safe. Cost: a step copies its rows once, an episode is copied into the
    store once.

    Args:
        writer: Writer of the table, which stores the trajectories.
        num_envs: Number of environments, N.
        autoreset: "next_step": the step after the last one of an episode resets, and its action is
            ignored; "same_step": the last step resets, and the episode's last observation is passed
            as `final`; "disabled": the program resets, and calls `reset` with a mask.
        open_rows: Arrays in which trajectories grow; None: private memory.
    """

    _internal = frozenset({"has_begun", "last_states", "take_after", "waits"})

    def __init__(
        self, writer: OpenWriter, num_envs: int, autoreset: str, open_rows: OpenRows | None = None
    ) -> None:
        num_envs = arguments.count("num_envs", num_envs)
        schema = writer.schema
        publisher = writer.publisher
        native = writer.native
        self._schema = schema
        self._add = writer.add
        self._native = native
        if native is not None:
            self._vector_step = native.vector_step
            self._vector_publish = native.vector_publish
        self.num_envs = num_envs
        self.autoreset = autoreset
        self._all = np.arange(num_envs, dtype=np.int64)
        self._time, to_go, reward = map(schema.role, ("timestep", "return_to_go", "reward"))
        self._returns: ReturnsToGo | None = None
        if to_go is not None and reward is not None and publisher is not None:
            self._returns = ReturnsToGo(to_go, reward, publisher.inserter)
        self._continued: set[int] = set()  # environments whose episode was cut at max_length
        self._max_length = writer.max_length
        self._whole_fields = writer.whole_fields
        self._columns = StepColumns(schema)
        self.num_trajectories = 0
        self._values = {
            c.name: np.zeros((num_envs, *c.shape), c.numpy_dtype) for c in self._columns.once
        }
        self._completed: list[CompletedTrajectory] = []  # not returned yet
        self._waits = np.ones(num_envs, bool)  # for its first observation
        self._unstored = np.zeros(num_envs, bool)  # ended, and left to Python by the native call
        self._was_truncated = np.zeros(num_envs, bool)  # its latest episode
        self._reward = reward
        # Until the check ends, steps after truncated episodes are taken in Python.
        self._check = ResetCheck(autoreset != "next_step" or self._reward is not None)
        self._counts = np.zeros(StepCount.NUM_WORDS, np.int64)
        self._just_completed = np.zeros((2 * num_envs, len(CompletedTrajectory._fields)), np.int64)
        # Column of policy versions, if they are reported to the ranks; and the first version of
        # each open trajectory, -1: none.
        self._version = "" if publisher is None else publisher.inserter.version_column
        self._oldest = np.full(num_envs, -1)
        self._publisher = publisher
        # One per environment from the first publication on; empty before.
        self._growing = list[GrowingTrajectory]()
        self._growing_words = new_words(num_envs)
        self._native_steps: Any = None  # takes plain steps; None: Python does
        self._publishes = False  # whether it publishes steps
        # Steps of open trajectories that are not in the open rows (of an inference client). [N].
        self._steps_before = np.zeros(num_envs, np.int64)
        use_native = native if open_rows is None else None
        if open_rows is None:
            length = min(_FIRST_LENGTH, self._max_length or _FIRST_LENGTH)
            open_rows = OpenRows.private(schema.step_columns, num_envs, length, native)
        self._next = open_rows.first.copy()  # row of each environment's next state. [N], int64
        self._use(open_rows, use_native)
        if publisher is not None:
            publisher.counts.append(self._counts)

    @property
    def num_steps(self) -> int:
        """Number of steps appended so far, of all environments."""
        return int(self._counts[StepCount.STEPS_TAKEN])

    def __repr__(self) -> str:
        counts = f"{self.num_steps:,} steps, {self.num_trajectories:,} trajectories added"
        return f'{type(self).__name__}({self.num_envs} environments, "{self.autoreset}", {counts})'

    def _use(self, open_rows: OpenRows, native: ModuleType | None) -> None:
        """Set the arrays in which trajectories grow, and the native call's view of them."""
        self._open_rows = open_rows
        self._state_rows = open_rows.rows(self._columns.state)
        self._result_rows = open_rows.rows(self._columns.results)
        self._number_steps(self._all)
        if native is None:
            return
        taken = self._columns
        given = [*((c, True) for c in taken.state), *((c, False) for c in taken.results)]
        words = (
            self._next,
            open_rows.first,
            self._waits,
            self._unstored,
            self._was_truncated,
            self._check.goes_on,
            self._counts,
            self._just_completed,
            self._growing_words,
        )
        columns = [column.name for column, _ in given]
        truncated = taken.flags["truncated"]
        self._native_steps = native.VectorSteps(
            columns=[(c.name, address(open_rows.arrays[c.name]), form_of(native, c), is_state)
                     for c, is_state in given],
            ends=(taken.flag_names["terminated"], taken.flag_names["truncated"]),
            num_envs=self.num_envs,
            length=open_rows.length,
            words=[address(array) for array in words],
            autoreset=self.autoreset,
            truncated_column=columns.index(truncated.name) if truncated is not None else -1,
        )  # fmt: skip
        self._steps_address = self._native_steps.address
        if self._publisher is None:
            return
        # The native call stores trajectories that end, and publishes steps.
        arrays = {**open_rows.arrays, **self._values}
        are_bytes = all(
            flag is None or flag.numpy_dtype.itemsize == 1 for flag in taken.flags.values()
        )
        is_longest = open_rows.length == self._max_length
        self._native_steps.set_store(
            of_columns=[0 if c.late else address(arrays[c.name]) for c in self._schema],
            cuts=is_longest and are_bytes and not self._whole_fields and self._time is None,
            **self._publisher.inserter.vector_options(),
        )
        self._publishes = self._publisher.unsuited is None and are_bytes

    def _number_steps(self, envs: Any) -> None:
        """Write the time steps of episodes that begin in the first rows of environments."""
        if self._time is not None:
            rows = self._open_rows.arrays[self._time.name]
            length = self._open_rows.length
            rows[self._open_rows.places[envs]] = np.arange(length + 1)

    def _grow(self, length: int) -> None:
        """Enlarge the open rows to trajectories of `length` steps, and keep what they hold."""
        old = self._open_rows
        new = OpenRows.private(self._schema.step_columns, self.num_envs, length, self._native)
        for name, rows in old.arrays.items():
            new.arrays[name][:, : old.length + 1] = rows
        self._next += new.first - old.first
        self._use(new, self._native)

    def reset(self, mask: np.ndarray | None = None, **columns: Any) -> list[CompletedTrajectory]:
        """Begin an episode of all environments, or of some.

        Their open trajectories are dropped; published steps stay, marked as truncated.

        Args:
            mask: Environments to reset; None: all. [N], bool.
            **columns: First states, of all environments. [N, *shape] each; columns of one value
                per trajectory may be given too.
        Returns:
            The published trajectories that end here.
        Raises:
            DataError: A column is missing or unknown, does not fit, or is not finite and must be;
                nothing has changed.
        """
        which = np.ones(self.num_envs, bool)
        if mask is not None:
            which = arguments.array("mask", mask).astype(bool)
        if which.shape != (self.num_envs,):
            rule = f"must have shape [{self.num_envs}]"
            remedy = "give one bool for each environment"
            raise DataError("mask", rule, list(which.shape), remedy)
        given = self._columns.flat("reset", columns)
        self._columns.check_names("reset", given)
        begun = np.flatnonzero(which)
        once = self._columns.once_values(given, begun, self.num_envs, which)
        state = pick(self._columns.state, given, "reset")
        first = self._open_rows.first
        self._state_rows.put(state, np.where(which, first, -1))
        ended = np.flatnonzero(which & self._waits & self.has_begun)
        if self.autoreset == "disabled" and len(ended):
            self._check_states(ended, self._next[ended] - 1)
        self._set_values(once, begun)
        for env in np.flatnonzero(which & self._has_published()).tolist():
            self._end_growing(env, truncated=True)
        self._end_episodes(begun.tolist())
        self._next[begun] = first[begun] + 1
        self._waits[begun] = False
        self._begin(begun)
        return self._take_completed()

    def step(
        self,
        final: Mapping[str, Any] | None = None,
        envs: np.ndarray | None = None,
        *,
        publish: bool = False,
        **columns: Any,
    ) -> list[CompletedTrajectory]:
        """Append a step of every environment, or of some.

        Args:
            final: With "same_step": last states of the episodes that end; column -> [n, *shape], or
                an array of objects as gymnasium's `final_obs`. Rows of other environments are
                ignored.
            envs: Numbers of the environments that the columns are of, all different; None: all N.
                [n], int64.
            publish: Publish all steps so far, which the next selection may then sample. Costs one
                more copy of these rows with the table's lock held. Rows are reserved for the
                longest trajectory of each environment, so the table must hold all of them at once.
            **columns: Actions, their results, and the states after them. [n, *shape] each;
                `terminated` and `truncated` also where the schema has no such columns.
        Returns:
            The trajectories that were added: they ended with this step, or had `max_length` steps
            before it.
        Raises:
            DataError: A column is missing or unknown, does not fit, or is not finite and must be;
                or `reset` was not called first; or an episode exceeds `max_length` and a field
                needs whole episodes: nothing has changed, and the step may be appended again. Or
                as `TrajectoryWriter.add`.
            StoreFullError, NotReadyError: The step is appended, but not published; the next step
                tries again.
        """
        taken = self._take_plain(columns, final, publish) if envs is None else _LEFT
        if taken < 0:
            taken = self._take(final, envs, columns, publish)
        if publish and taken & _PUBLISH_LEFT:
            self._publish()
        return self._take_completed() if self._completed else []

    def _take(
        self,
        final: Mapping[str, Any] | None,
        envs: np.ndarray | None,
        given: Mapping[str, Any],
        publish: bool = False,
    ) -> int:
        """Append a step that is nested or not plain; arguments as `step`.

        Returns:
            What is left, as `_take_plain`.
        """
        taken = self._columns
        columns = taken.flat("step", given)
        if envs is None and columns is not given:
            flat = final if final is None else taken.flat("final", final)
            left = self._take_plain(columns, flat, publish)
            if left >= 0:
                return left
        envs = self._all if envs is None else arguments.integers("envs", envs)
        if len(envs) and not (envs.min() >= 0 and envs.max() < self.num_envs):
            remedy = f"environments are numbered from 0 to {self.num_envs - 1}"
            raise DataError("envs", f"must be in [0, {self.num_envs})", envs.tolist(), remedy)
        taken.check_names("step", columns)
        waits = self._waits[envs]
        waiting = envs[waits]
        if len(waiting):
            unbegun = waiting
            if self.autoreset == "next_step":
                unbegun = waiting[self._next[waiting] == self._open_rows.first[waiting]]
            if len(unbegun):
                which = f"environments {unbegun[:8].tolist()}"
                remedy = (
                    f'call reset with first observations; the autoreset mode is "{self.autoreset}"'
                )
                raise DataError("step", "must come after reset", which, remedy)
        once = taken.once_values(columns, envs, len(waits)) if taken.once else {}
        results = pick(taken.results, columns, "step")
        state = pick(taken.state, columns, "step")
        ended, truncated = taken.ends(columns, len(waits))
        ended &= ~waits
        at = np.flatnonzero(ended)  # places in `envs` of the episodes that end
        finals = {}
        if self.autoreset == "same_step" and len(at):
            finals = taken.last_states(at, envs, final)
        rows, following = self._rows_for(envs, waits)
        first = self._open_rows.first[envs]
        length = self._open_rows.length
        # With room for 4 steps, `following` of the fifth is first + 5: its state has no row.
        is_full = following - first > length
        if is_full.any():
            self._result_rows.check(results, rows)
            self._state_rows.check(state, np.minimum(following, first + length))
            if self._max_length is None or length < self._max_length:
                self._grow(min(2 * length, self._max_length or 2 * length))
            else:
                self._truncate(envs[is_full])
            rows, following = self._rows_for(envs, waits)
        # The step counts once `_next` moves: rows of a step that raises before are overwritten.
        self._result_rows.put(results, rows)
        self._state_rows.put(state, following)
        if once:
            self._set_values(once, envs)
        self._next[envs] = following
        self._counts[StepCount.STEPS_TAKEN] += len(rows)
        self._was_truncated[envs] = np.where(ended, truncated, self._was_truncated[envs])
        if self._version:
            begins = rows == self._open_rows.first[envs]
            if begins.any() or ended.any():
                assert self._publisher is not None
                versions = self._open_rows.arrays[self._version].reshape(-1)
                self._oldest[envs[begins]] = versions[rows[begins]]
                self._oldest[envs[ended]] = -1
                self._publisher.inserter.report_versions(self, self._oldest)
        if len(waiting):  # "next_step": this step has their first observations
            if self._check.goes_on[0] and self._reward is not None:
                self._check.note_rewards(np.asarray(columns[self._reward.name])[waits])
            self._counts[StepCount.STEPS_TAKEN] -= len(waiting)
            self._waits[waiting] = False
            self._begin(waiting)
        if len(at):
            self._end(at, envs, finals, state)
        self._next[envs] += 1
        return _PUBLISH_LEFT

    def take_after(self, observed: Any, columns: Mapping[str, Any]) -> bool:
        """Append and publish a step by one native call.

        Args:
            observed: The states that the step was taken at. [N, *shape]: the last states; or with
                "disabled", after an episode has ended, the first state of the next one, which
                begins here.
            columns: As `step`; columns without a shape also as [N, 1], and those of a single
                environment also without its axis.
        Returns:
            Whether the step was appended; False: nothing has changed.
        """
        taken = self._take_plain(columns, None, True, observed)
        if taken > 0 and taken & _PUBLISH_LEFT:
            self._publish()
        self._completed.clear()
        return taken >= 0

    def last_states(self, name: str) -> np.ndarray:
        """Copy the last states of all environments; undefined before `reset`. [N, *shape]."""
        column = self._schema[name]
        return np.asarray(self._open_rows.arrays[name].reshape(-1, *column.shape)[self._next - 1])

    @property
    def waits(self) -> np.ndarray:
        """Mask of environments that wait for a first observation. [N], bool, a copy."""
        return np.array(self._waits)

    @property
    def has_begun(self) -> np.ndarray:
        """Mask of environments that have ever begun an episode. [N], bool."""
        return np.asarray(self._next != self._open_rows.first)

    def _check_states(self, envs: np.ndarray, last_rows: np.ndarray) -> None:
        """Compare the last states of truncated episodes with the first states after them.

        Args:
            envs: Environments whose episodes have ended; first states are in their first rows. [n].
            last_rows: Rows of their last states. [n].
        """
        truncated = self._was_truncated[envs]
        if not (self._check.goes_on[0] and truncated.any()):
            return
        last = last_rows[truncated]
        first = self._open_rows.first[envs[truncated]]
        states = [self._open_rows.arrays[c.name].reshape(-1, *c.shape) for c in self._columns.state]
        self._check.note_states(
            before=[column[last - 1] for column in states],
            last=[column[last] for column in states],
            first=[column[first] for column in states],
        )

    def _take_completed(self) -> list[CompletedTrajectory]:
        """Return the trajectories that were completed since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def _take_plain(
        self,
        columns: Mapping[str, Any],
        final: Any,
        publish: bool,
        observed: np.ndarray | None = None,
    ) -> int:
        """Append a step of all environments by one native call, which stores and publishes too.

        Args:
            columns: As `step`.
            final: As `step`.
            publish: As `step`.
            observed: As `take_after`; None: the last states.
        Returns:
            What is left to do in Python: 0; _PUBLISH_LEFT; or _LEFT, where nothing has changed
            since the step is not plain: columns to convert or to refuse, other names, no free rows.
        """
        if self._native_steps is None or self._version:
            return _LEFT
        if self._publisher is not None:
            self._look(publish)
        # By environment, steps of its episode that are no longer stored; read before the call
        # resets the words.
        evicted = [] if self._returns is None else self._growing_words[:, Growing.FIRST].tolist()
        publishes = publish and self._publishes
        events: int = self._vector_step(self._steps_address, columns, final, observed, publishes)
        if events == 0:
            return 0 if self._publishes else _PUBLISH_LEFT
        if self._counts[StepCount.NUM_COMPLETED]:
            count = int(self._counts[StepCount.NUM_COMPLETED])
            self._counts[StepCount.NUM_COMPLETED] = 0
            self.num_trajectories += count
            self._completed += map(CompletedTrajectory._make, self._just_completed[:count].tolist())
            if evicted or self._continued:
                stored = self._completed[-count:]
                for done in stored:
                    self._note_rewards(done, evicted[done.env] if evicted else 0)
                self._end_episodes(done.env for done in stored)
        if events > 0 and events & _ENDS_LEFT:
            at = np.flatnonzero(self._unstored)
            self._unstored[at] = False
            finals = {}
            if self.autoreset == "same_step":
                finals = self._columns.last_states(at, self._all, final)
            self._end(at, self._all, finals, pick(self._columns.state, columns, "step"))
            self._next[at] += 1
        return events if events < 0 or self._publishes else _PUBLISH_LEFT

    def _look(self, publish: bool) -> None:
        """Check that the run goes on; register open trajectories before their first publication."""
        assert self._publisher is not None
        self._publisher.look()
        if publish and self._publishes and not self._growing:
            self._register()

    def _rows_for(self, envs: np.ndarray, waits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a step's actions and of the states that follow. [n] each, int64.

        An environment that waits has no action (row -1), and its state is the first of an episode.
        """
        following = self._next[envs]
        rows = following - 1
        if waits.any():
            following = np.where(waits, self._open_rows.first[envs], following)
            rows[waits] = -1
        return rows, following

    def _set_values(self, values: Mapping[str, np.ndarray], envs: np.ndarray) -> None:
        for name, rows in values.items():
            self._values[name][envs] = rows

    def _begin(self, envs: np.ndarray) -> None:
        """Hook of subclasses: an episode of some environments begins, at their first rows."""

    def _end(
        self, at: np.ndarray, envs: np.ndarray, finals: Mapping[str, np.ndarray], state: list[Any]
    ) -> None:
        """Add the trajectories that end, at the places `at` of `envs`.

        Last states are in rows `_next`. With "same_step" the rows of `state` there begin the next
        episodes: they move to the first rows, and the last states of `finals` take their place.
        """
        ended = envs[at]
        first = self._open_rows.first
        for index, env in enumerate(ended.tolist()):
            last = int(self._next[env] - first[env])
            for name, rows in finals.items():
                self._open_rows.of(name, env)[last] = rows[index]
            self._commit(env, last)
        if self.autoreset == "same_step":
            firsts = np.full(len(envs), -1, np.int64)
            firsts[at] = first[ended]
            self._state_rows.put(state, firsts)
            self._check_states(ended, self._next[ended])
            self._next[ended] = first[ended]
            self._begin(ended)
        else:
            self._waits[ended] = True

    def _commit(self, env: int, num_steps: int, is_truncated: bool = False) -> None:
        """Add the first `num_steps` steps of an environment's open rows as a trajectory."""
        columns = self._columns_of(env, num_steps)
        num_steps += int(self._steps_before[env])
        if self._has_published()[env]:
            assert self._publisher is not None
            self._publisher.publish([PublishedPart(self._growing[env], num_steps, columns)])
            self._end_growing(env, is_truncated)
        else:
            self._completed.append(CompletedTrajectory(env, self._add(columns), num_steps))
            self._note_rewards(self._completed[-1])
        if not is_truncated:
            self._end_episodes([env])
        self.num_trajectories += 1

    def _note_rewards(self, stored: CompletedTrajectory, evicted: int = 0) -> None:
        """Note the rewards of a stored trajectory; `evicted` steps of it are no longer stored."""
        if self._returns is not None:
            end = evicted + stored.num_steps
            rewards = self._steps_of(self._returns.reward, stored.env, end)[:end]
            self._returns.note(stored.env, stored.trajectory_id, rewards, evicted)

    def _end_episodes(self, envs: Iterable[int]) -> None:
        """End episodes: number the next steps from 0 again, and fill returns-to-go."""
        for env in envs:
            if env in self._continued:
                self._continued.discard(env)
                self._number_steps([env])
            if self._returns is not None:
                self._returns.end(env)

    def _columns_of(self, env: int, num_steps: int) -> dict[str, np.ndarray]:
        """Return the columns of an open trajectory of `num_steps` steps; views of the open rows."""
        columns = {c.name: self._values[c.name][env, ...] for c in self._columns.once}
        for column in self._schema.step_columns:
            if not column.late:
                columns[column.name] = self._steps_of(column, env, num_steps)
        return columns

    def _steps_of(self, column: Column, env: int, num_steps: int) -> np.ndarray:
        """Return a column's rows of an open trajectory; subclasses may have them elsewhere."""
        return self._open_rows.of(column.name, env)[: num_steps + (column.rows == "T+1")]

    def _publish(self) -> None:
        publisher = checked(self._publisher)
        if self._native_steps is not None:
            self._look(True)
            if self._publishes and self._vector_publish(self._steps_address):
                return
        self._register()
        used = np.where(self._waits, 0, self._next - self._open_rows.first - 1)
        parts = []
        for env in np.flatnonzero(used).tolist():
            steps = int(used[env])
            end = steps + int(self._steps_before[env])
            columns = self._columns_of(env, steps)
            parts.append(PublishedPart(self._growing[env], end, columns))
        publisher.publish(parts)

    def _register(self) -> None:
        """Register the open trajectories, which the publisher ends if this writer is deleted."""
        publisher = self._publisher
        if not self._growing and publisher is not None:
            self._growing = [
                GrowingTrajectory(self, publisher, words) for words in self._growing_words
            ]
            publisher.inserter.growing.update(self._growing)

    def _has_published(self) -> np.ndarray:
        """Return a mask of the published open trajectories, also those evicted since. [N], bool."""
        words = self._growing_words
        return np.asarray((words[:, Growing.SLOT] >= 0) | (words[:, Growing.FIRST] > 0))

    def _end_growing(self, env: int, truncated: bool) -> None:
        assert self._publisher is not None
        growing = self._growing[env]
        completed = self._publisher.end(growing, truncated, env)
        if completed is not None:
            self._completed.append(completed)
        number = int(growing.words[Growing.ID])
        self._note_rewards(CompletedTrajectory(env, number, growing.published), growing.first)
        self._growing_words[env, : Growing.LATEST_SLOT] = UNPUBLISHED

    def close(self) -> list[CompletedTrajectory]:
        """End all open trajectories; published steps stay, marked as truncated. Safe to call twice.

        Returns:
            The published trajectories that end here.
        """
        for env in np.flatnonzero(self._has_published()).tolist():
            self._end_growing(env, truncated=True)
        self._end_episodes(self._all.tolist())
        if self._growing and self._publisher is not None:
            self._publisher.inserter.growing.difference_update(self._growing)
            self._growing = []
        return self._take_completed()

    def _truncate(self, envs: np.ndarray) -> None:
        """Cut episodes at `max_length`: add their steps as truncated, and begin at the last states.

        Raises:
            DataError: A field needs whole episodes.
        """
        if self._whole_fields:
            why = f"since field {self._whole_fields[0]} needs whole episodes"
            rule = f"must have at most max_length = {self._max_length} steps, {why}"
            remedy = (
                "raise it, or give the table a column of the role timestep or return_to_go "
                "for the field"
            )
            raise DataError(f"the episode of environment {envs[0]}", rule, None, remedy)
        for env in envs.tolist():
            steps = int(self._next[env] - self._open_rows.first[env] - 1)
            flag = self._columns.flags["truncated"]
            if flag is not None:
                self._open_rows.of(flag.name, env)[steps - 1] = True
            self._commit(env, steps, is_truncated=True)
            self._go_on(env, steps)

    def _go_on(self, env: int, steps: int) -> None:
        """Continue a cut episode: its last state becomes the first row of the next trajectory."""
        for column in self._columns.state:
            rows = self._open_rows.of(column.name, env)
            rows[0] = rows[steps]
        if self._time is not None:
            self._open_rows.of(self._time.name, env)[...] += steps
        self._continued.add(env)
        self._next[env] = self._open_rows.first[env] + 1
