"""The column arrays of a table: rows of its own store, and rows received from other nodes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
import torch

from deepspeed_gear.schema import Column
from deepspeed_gear.store.table_spec import RETURN_TO_GO, TableSpec

Arrays = dict[str, np.ndarray]  # by the names of columns, and the derived one by RETURN_TO_GO


def mapped_columns(spec: TableSpec, views: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays, Arrays]:
    """Map the columns of a store in this process.

    In memory, arrivals lie after the store's own rows, in one region. A mapped data set is read-only, so its
    arrivals have separate regions. A row is written by one process only, before others read it.

    Args:
        views: The regions of its store by name.
    Returns:
        The store's own rows, [num_rows or num_slots, *shape]; writable rows for what arrives from other
        nodes, [arrival_rows or arrival_slots, *shape]; and those that batches are gathered from.
    """
    own, arrivals, gathered = Arrays(), Arrays(), Arrays()
    for column in spec.schema:
        gathered[column.name] = views[f"column/{column.name}"] if spec.in_memory else part_of(spec, column)
    if spec.return_to_go:
        gathered[RETURN_TO_GO] = views[RETURN_TO_GO]
    per_trajectory = {column.name for column in spec.schema if column.rows == "1"}
    for name, region in gathered.items():
        end = len(region)
        if spec.in_memory:
            end = spec.num_slots if name in per_trajectory else spec.num_rows
        own[name], arrivals[name] = region[:end], region[end:]
        if spec.has_arrivals and not spec.in_memory:
            arrivals[name] = gathered[name] = views[f"arrival/{name}"]
    return own, arrivals, gathered


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
