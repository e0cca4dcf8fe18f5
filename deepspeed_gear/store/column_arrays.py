"""The column arrays of a table: rows of its own store, and rows received from other nodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import torch

from deepspeed_gear.schema import Column
from deepspeed_gear.store.table_spec import RETURN_TO_GO, TableSpec


class ColumnArrays:
    """The columns of a table in this process, and the derived one under the name RETURN_TO_GO.

    In memory, received rows (arrivals) lie after the store's own, in one region. A mapped data set is
    read-only, so its arrivals have separate regions.

    Thread and process safety: none of its own. A row is written by one process only, before others read it.
    """

    def __init__(self, spec: TableSpec, views: Mapping[str, np.ndarray]) -> None:
        """Map the columns of a store.

        Args:
            views: The regions of its store by name.
        """
        self._spec = spec
        self._per_trajectory = {column.name for column in spec.schema if column.rows == "1"}
        self._held: dict[str, np.ndarray] = {}
        self._arrivals: dict[str, np.ndarray] = {}
        self._collected: dict[str, np.ndarray] = {}
        for column in spec.schema:
            if spec.in_memory:
                self._add_together(column.name, views[f"column/{column.name}"])
            else:
                self._add_apart(column.name, part_of(spec, column), views)
        if spec.return_to_go and spec.in_memory:
            self._add_together(RETURN_TO_GO, views[RETURN_TO_GO])
        elif spec.return_to_go:
            self._add_apart(RETURN_TO_GO, views[RETURN_TO_GO], views)

    @property
    def by_name(self) -> dict[str, np.ndarray]:
        """The store's own rows of every stored column. [num_rows or num_slots, *shape]."""
        return {column.name: self._held[column.name] for column in self._spec.schema}

    def held(self, name: str) -> np.ndarray:
        """Return the store's own rows of a column. [num_rows or num_slots, *shape]."""
        return self._held[name]

    def arrivals(self, name: str) -> np.ndarray:
        """Return the writable rows for a column's arrivals. [arrival_rows or arrival_slots, *shape]."""
        return self._arrivals[name]

    def gather_source(self, name: str) -> np.ndarray:
        """Return the rows of a column that batches are gathered from. [rows, *shape]."""
        return self._collected[name]

    def _add_together(self, name: str, region: np.ndarray) -> None:
        own = self._spec.num_slots if name in self._per_trajectory else self._spec.num_rows
        self._held[name], self._arrivals[name], self._collected[name] = region[:own], region[own:], region

    def _add_apart(self, name: str, held: np.ndarray, views: Mapping[str, np.ndarray]) -> None:
        self._held[name] = self._collected[name] = held
        self._arrivals[name] = np.empty((0, *held.shape[1:]), held.dtype)
        if self._spec.has_arrivals:
            self._arrivals[name] = self._collected[name] = views[f"arrival/{name}"]


def part_of(spec: TableSpec, column: Column) -> np.ndarray:
    """Return a store's slice of the mapped file of a data set's column.

    Args:
        spec: The table, of a data set.
    Returns:
        [num_rows or num_slots, *shape]; its first row is the store's row 0.
    """
    assert spec.dataset is not None
    whole = spec.dataset.columns[column.name]
    if column.rows == "1":
        return whole[spec.held]
    first = spec.dataset.row_of(spec.held.start)
    return whole[first : first + spec.num_rows]


def as_tensor(array: np.ndarray, dtype: str = "") -> torch.Tensor:
    """View an array as a tensor, also a read-only one: the caller must not write to it.

    Args:
        array: Stored values. [rows, *shape].
        dtype: Of the column; bfloat16 is stored as uint16.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(np.asarray(array))
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
