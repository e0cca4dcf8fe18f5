"""Open rows: the rows of open trajectories of N environments, each with its own range."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from deepspeed_gear.data.trajectory_checks import as_stored, check_finite
from deepspeed_gear.schema import Column
from deepspeed_gear.store.native_rows import address, form_of


class OpenRows:
    """The arrays, of their creator, in which open trajectories of N environments grow. One process
    at a time. Each column has [places, length + 1, *shape], contiguous; the places of environments
    differ. [N], int64.
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
        self.first = places * (
            self.length + 1
        )  # row of each environment's first step, over all places

    @classmethod
    def private(
        cls, columns: Sequence[Column], num_envs: int, length: int, native: ModuleType | None
    ) -> OpenRows:
        """Return them in private memory, for trajectories of up to `length` steps."""
        arrays = {
            c.name: np.zeros((num_envs, length + 1, *c.shape), c.numpy_dtype) for c in columns
        }
        return cls(columns, arrays, np.arange(num_envs, dtype=np.int64), native)

    def of(self, name: str, env: int) -> np.ndarray:
        """Return an environment's rows of a column. [length + 1, *shape], a view."""
        return np.asarray(self.arrays[name][self.places[env]])

    def rows(self, columns: Sequence[Column]) -> ColumnRows:
        return ColumnRows(columns, self.arrays, self._native, self.places)


class ColumnRows:
    """Rows of some columns, by their numbers over all places (in errors: environments, if
    `places`).
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
        """Copy row i of each column's values, [n, *shape], to row rows[i]; negative ones are left
        out. DataError, nothing changed: a shape, dtype or value that must be finite does not fit.
        """
        if self._targets is not None and self._rows_put(self._address, values, rows) < 0:
            return
        for name, stored in self.check(values, rows).items():
            self._flat[name][rows[rows >= 0]] = stored

    def check(self, values: Sequence[Any], rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return what `put` would store in rows that are not left out. Column -> [kept, *shape]."""
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
        """Return copies of rows. Column -> [n, *shape]."""
        return {name: flat[rows] for name, flat in self._flat.items()}
