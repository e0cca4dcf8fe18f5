"""Open rows: arrays for the open trajectories of N environments, before they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from deepspeed_gear.data.stored_values import as_stored, check_finite
from deepspeed_gear.schema import Column
from deepspeed_gear.store.native_rows import address, form_of


class OpenRows:
    """Arrays in which the open trajectories of N environments grow.

    Each environment has one place in every array; all places have room for `length` steps and the
    state after the last one. With a length of 4 the environment at place 2 has the rows 10 to 14
    of all places' rows: `first` is 10. One process at a time.

    Args:
        columns: Columns of steps.
        arrays: Column -> [places, length + 1, *shape], contiguous; they belong to the caller.
        places: Place of each environment, all different. [N], int64.
        native: The native module; None: Python copies rows.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        arrays: dict[str, np.ndarray],
        places: np.ndarray,
        native: ModuleType | None,
    ) -> None:
        self.arrays = arrays
        self.places = places
        self._native = native
        self.length = arrays[columns[0].name].shape[1] - 1
        #: Row of each environment's first step, over all places. [N], int64.
        self.first = places * (self.length + 1)

    @classmethod
    def private(
        cls, columns: Sequence[Column], num_envs: int, length: int, native: ModuleType | None
    ) -> OpenRows:
        """Allocate open rows in private memory, for trajectories of up to `length` steps."""
        arrays = {
            c.name: np.zeros((num_envs, length + 1, *c.shape), c.numpy_dtype) for c in columns
        }
        return cls(columns, arrays, np.arange(num_envs, dtype=np.int64), native)

    def of(self, name: str, env: int) -> np.ndarray:
        """Return an environment's rows of a column. [length + 1, *shape], a view."""
        return np.asarray(self.arrays[name][self.places[env]])

    def rows(self, columns: Sequence[Column]) -> ColumnRows:
        """Return access to the rows of some columns by their numbers over all places."""
        return ColumnRows(columns, self.arrays, self._native, self.places)


class ColumnRows:
    """Rows of some columns, addressed by their numbers over all places.

    Args:
        columns: The columns.
        arrays: Column -> [places, length, *shape], contiguous.
        native: The native module; None: Python copies rows.
        places: Place of each environment, for the environment's number in errors; None: it is the
            place.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        arrays: dict[str, np.ndarray],
        native: ModuleType | None,
        places: np.ndarray | None = None,
    ) -> None:
        self.columns = tuple(columns)
        self._places = places
        self._length = next((arrays[c.name].shape[1] for c in columns), 1)
        self._flat = {c.name: arrays[c.name].reshape(-1, *c.shape) for c in columns}
        self._targets: Any = None
        if native is not None:
            targets = [(address(arrays[c.name]), form_of(native, c)) for c in columns]
            self._targets = native.RowTargets(targets)
            self._rows_put = native.rows_put
            self._address = self._targets.address

    def put(self, values: Sequence[Any], rows: np.ndarray) -> None:
        """Copy value i of each column to row rows[i]; values with a negative row are left out.

        Args:
            values: Values of each column. [n, *shape].
            rows: Row of each value over all places, or negative. [n], int64.
        Raises:
            DataError: A shape or dtype does not fit, or a value is not finite and must be; nothing
                has changed.
        """
        if self._targets is not None and self._rows_put(self._address, values, rows) < 0:
            return
        for name, stored in self.check(values, rows).items():
            self._flat[name][rows[rows >= 0]] = stored

    def check(self, values: Sequence[Any], rows: np.ndarray) -> dict[str, np.ndarray]:
        """Convert values as `put` does, without storing them; arguments and errors as `put`.

        Returns:
            Column -> values in the stored form, without those left out. [kept, *shape].
        """
        kept = rows >= 0
        pairs = zip(self.columns, values, strict=True)
        stored = {c.name: as_stored(value, c, "the steps", len(rows))[kept] for c, value in pairs}
        check_finite(
            "the steps", self.columns, stored, lambda row: self._name_of(int(rows[kept][row]))
        )
        return stored

    def _name_of(self, row: int) -> str:
        place, step = divmod(row, self._length)
        env = place if self._places is None else int(np.flatnonzero(self._places == place)[0])
        return f"step {step} of environment {env}"

    def get(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Copy rows. Column -> [n, *shape]."""
        return {name: flat[rows] for name, flat in self._flat.items()}
