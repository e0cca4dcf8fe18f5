"""Steps of many environments at once: each has a trajectory that is added when its episode ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal, get_args

import numpy as np

from deepspeed_gear.errors import DataError
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.native import address, form_of
from deepspeed_gear.store.trajectory import as_stored

Autoreset = Literal["next_step", "same_step", "disabled"]
_FIRST_LENGTH = 256
_MODES = get_args(Autoreset)


class VectorWriter:
    """Keeps the open trajectories of N environments, and adds each when its episode ends.

    Columns of observations, and those of T+1 rows, say how an environment is: `reset` gives the first of an
    episode, `step` the one that a step has led to. The other columns of steps say what was done and what came
    of it. The last observation of an episode is its own; the next episode begins with its own.

    Not thread-safe. Cost of a step: one copy of its rows into private memory, and of an episode one copy into
    the store.

    Args:
        schema: Of the table.
        add: Adds a trajectory.
        num_envs: N.
        autoreset: "next_step": the step behind the last one of an episode resets, and its action is ignored;
            "same_step": the last step resets, and the episode's last observation is given as `final`;
            "disabled": `reset` is called with a mask.
        max_length: A longer episode is cut there, marked as truncated, and goes on as another trajectory.
        native: The native module, which copies faster; None: NumPy does.
    """

    def __init__(
        self,
        schema: Schema,
        add: Callable[[Mapping[str, Any]], int],
        num_envs: int,
        autoreset: str,
        max_length: int | None,
        native: ModuleType | None = None,
    ) -> None:
        if autoreset not in _MODES:
            raise DataError("autoreset", f"must be one of {', '.join(_MODES)}", autoreset)
        self._schema, self._add, self._native = schema, add, native
        self.num_envs, self._mode, self._max_length = num_envs, autoreset, max_length
        steps = [column for column in schema if column.rows != "1"]
        self._state = [c for c in steps if c.rows == "T+1" or c.role == "observation"]
        self._done_by = [c for c in steps if c not in self._state]
        self._once = [column for column in schema if column.rows == "1"]
        self._truncated = schema.role("truncated")
        roles = {role: schema.role(role) for role in ("terminated", "truncated")}
        self._names = {role: role if column is None else column.name for role, column in roles.items()}
        self.num_steps = self.num_trajectories = 0
        self._length = 0
        self._columns: dict[str, np.ndarray] = {}
        self._values = {c.name: np.zeros((num_envs, *c.shape), c.numpy_dtype) for c in self._once}
        self._grow(min(_FIRST_LENGTH, max_length or _FIRST_LENGTH))
        self._next = np.zeros(num_envs, np.int64)  # row of each environment's next state
        self._rows = np.full(num_envs, -1, np.int64)
        self._waits = np.ones(num_envs, bool)  # for its first observation
        self._any_waits, self._room = True, 0

    # ---- staging ---------------------------------------------------------------------------------

    @property
    def _stride(self) -> int:
        return self._length + 1

    def _grow(self, length: int) -> None:
        """Make room for trajectories of so many steps, keeping what is there."""
        old, old_stride = self._columns, self._stride
        self._length = length
        self._columns = {}
        for column in (*self._state, *self._done_by):
            rows = np.zeros((self.num_envs, self._stride, *column.shape), column.numpy_dtype)
            if column.name in old:
                rows[:, :old_stride] = old[column.name]
            self._columns[column.name] = rows
        if old:
            env, step = np.divmod(self._next - 1, old_stride)
            self._next = env * self._stride + step + 1
        self._first = np.arange(self.num_envs, dtype=np.int64) * self._stride
        self._state_targets = self._targets(self._state)
        self._done_targets = self._targets(self._done_by)

    def _targets(self, columns: list[Column]) -> Any:
        if self._native is None:
            return columns
        return self._native.rows_targets([(address(self._columns[c.name]), *form_of(c)) for c in columns])

    def _put(self, targets: Any, columns: list[Column], values: list[Any], rows: np.ndarray) -> None:
        """Copy a row of each environment into each column; a negative row is left out."""
        if self._native is not None and self._native.rows_put(targets, values, rows) < 0:
            return
        kept = rows >= 0
        stored = [self._as_stored(c, v) for c, v in zip(columns, values, strict=True)]
        for column, value in zip(columns, stored, strict=True):
            flat = self._columns[column.name].reshape(-1, *column.shape)
            flat[rows[kept]] = value[kept]

    def _as_stored(self, column: Column, value: Any) -> np.ndarray:
        """Return a value per environment as it is stored.

        Raises:
            DataError: It has another shape, or a dtype that does not fit.
        """
        return as_stored(value, column, "the steps", self.num_envs)

    def _pick(self, columns: list[Column], given: Mapping[str, Any], what: str) -> list[Any]:
        try:
            return [given[column.name] for column in columns]
        except KeyError as error:
            raise DataError(f"column {error.args[0]}", f"must be in every {what}") from None

    # ---- steps -----------------------------------------------------------------------------------

    def reset(self, mask: np.ndarray | None = None, **columns: Any) -> None:
        """Begin an episode of all environments, or of some; what was open of theirs is dropped.

        Args:
            mask: Which ones. [N], bool.
            **columns: How they are. [N, *shape] each; columns of one value per trajectory may come along.
        Raises:
            DataError: A column is missing or has a wrong shape; nothing has changed.
        """
        which = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask, bool)
        self._take_values(columns)
        state = self._pick(self._state, columns, "reset")
        self._put(self._state_targets, self._state, state, np.where(which, self._first, -1))
        self._next[which] = self._first[which] + 1
        self._waits[which] = False
        self._any_waits = bool(self._waits.any())
        self._room = 0

    def step(self, final: Mapping[str, Any] | None = None, **columns: Any) -> list[int]:
        """Take a step of every environment.

        Args:
            final: With "same_step": how the environments are that have ended; column -> [N, *shape], or an
                array of objects as gymnasium's `final_obs`; the others' rows are not looked at.
            **columns: What was done and what came of it, and how the environments are now. [N, *shape] each;
                `terminated` and `truncated` also where the schema has no such columns.
        Returns:
            Ids of the trajectories that were added.
        Raises:
            DataError: A column is missing or has a wrong shape; or what adding raises.
        """
        if self._any_waits and self._mode != "next_step":
            raise DataError("reset", "must come first", None, f"{int(self._waits.sum())} environments wait")
        if self._once:
            self._take_values(columns)
        done_by = self._pick(self._done_by, columns, "step")
        state = self._pick(self._state, columns, "step")
        terminated, truncated = self._flags(columns)
        if self._room <= 0:
            self._make_room()
        rows, following = self._rows, self._next
        np.subtract(following, 1, out=rows)
        if self._any_waits:
            following = np.where(self._waits, self._first, following)
            rows[self._waits] = -1
        self._put(self._done_targets, self._done_by, done_by, rows)
        self._put(self._state_targets, self._state, state, following)
        self._next = following
        self._room -= 1
        self.num_steps += self.num_envs
        ended = terminated | truncated
        added: list[int] = []
        if self._any_waits:
            ended &= ~self._waits
            self.num_steps -= int(self._waits.sum())
            self._waits[:] = False
            self._any_waits = False
        if ended.any():
            added = self._end(np.nonzero(ended)[0], final, state)
        self._next += 1
        return added

    def _flags(self, columns: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        flags = []
        for role, name in self._names.items():
            if name not in columns and role == "terminated":
                raise DataError(f"column {name}", "must be in every step")
            found = columns.get(name)
            flags.append(np.zeros(self.num_envs, bool) if found is None else np.asarray(found, bool))
        return flags[0], flags[1]

    def _take_values(self, columns: Mapping[str, Any]) -> None:
        for column in self._once:
            if column.name in columns:
                self._values[column.name][...] = self._as_stored(column, columns[column.name])

    # ---- ends ------------------------------------------------------------------------------------

    def _end(self, envs: np.ndarray, final: Mapping[str, Any] | None, state: list[Any]) -> list[int]:
        """Add the trajectories of some environments; their last states lie where `_next` says."""
        added = []
        for env in envs.tolist():
            last = int(self._next[env] - self._first[env])
            if self._mode == "same_step":
                self._set_final(env, last, final)
            added.append(self._commit(env, last))
        if self._mode == "same_step":
            rows = np.full(self.num_envs, -1, np.int64)
            rows[envs] = self._first[envs]
            self._put(self._state_targets, self._state, state, rows)
            self._next[envs] = self._first[envs]
        else:
            self._waits[envs] = self._any_waits = True
        return added

    def _set_final(self, env: int, row: int, final: Mapping[str, Any] | None) -> None:
        for column in self._state:
            if final is None or column.name not in final:
                remedy = (
                    'with "same_step" it comes with the next episode\'s first; gymnasium: info["final_obs"]'
                )
                raise DataError(f"final {column.name}", "must be given where an episode ends", None, remedy)
            self._columns[column.name][env, row] = final[column.name][env]

    def _commit(self, env: int, num_steps: int) -> int:
        """Add the first steps of an environment."""
        trajectory: dict[str, Any] = {}
        for column in self._schema:
            if column.rows == "1":
                trajectory[column.name] = self._values[column.name][env, ...]
            else:
                end = num_steps + (1 if column.rows == "T+1" else 0)
                trajectory[column.name] = self._columns[column.name][env, :end]
        number = self._add(trajectory)
        self.num_trajectories += 1
        return number

    def _make_room(self) -> None:
        """See to it that the next steps have rows: grow, or cut what is as long as it may be."""
        used = np.where(self._waits, 0, self._next - self._first - 1)
        longest = int(used.max())
        if longest >= self._length:
            if self._max_length is None or self._length < self._max_length:
                length = 2 * self._length
                self._grow(length if self._max_length is None else min(length, self._max_length))
            else:
                self._cut(np.nonzero(used >= self._length)[0])
                longest = int(np.where(self._waits, 0, self._next - self._first - 1).max())
        self._room = self._length - longest

    def _cut(self, envs: np.ndarray) -> None:
        """Add what is as long as it may be, as truncated; it goes on from its last state."""
        for env in envs.tolist():
            if self._truncated is not None:
                self._columns[self._truncated.name][env, self._length - 1] = True
            self._commit(env, self._length)
            for column in self._state:
                rows = self._columns[column.name][env]
                rows[0] = rows[self._length]
            self._next[env] = self._first[env] + 1
