"""Native handle of a store: addresses in shared memory, which the owner of the memory keeps mapped."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from deepspeed_gear.schema import Column
from deepspeed_gear.store.column_arrays import ColumnArrays
from deepspeed_gear.store.memory_layout import HOLDER_OFFSET, MUTEX_OFFSET
from deepspeed_gear.store.shared_memory import SharedMemory
from deepspeed_gear.store.table_spec import Shard, TableSpec

ROWS_CODES = {"T": 0, "T+1": 1, "1": 2}
_KINDS = {"f": "f", "i": "i", "u": "u", "b": "b"}
_CHECKS = {"float16": 1, "bfloat16": 2, "float32": 3, "float64": 4}  # store/finite.h
TRAIN_POSITION = "stream/train/position"


def open_store(
    native: ModuleType,
    spec: TableSpec,
    memory: SharedMemory,
    views: dict[str, np.ndarray],
    columns: ColumnArrays,
) -> Any:
    """Return the native Store of a table with a capacity.

    Args:
        native: The native module.
        spec: The table.
        memory: Of the store.
        views: Its regions.
        columns: Its columns.
    """
    base = address(np.frombuffer(memory.buffer, np.uint8, 1))
    shard, retention = spec.shard or Shard(), spec.retention
    store = native.Store(
        mutex=base + MUTEX_OFFSET,
        holder=base + HOLDER_OFFSET,
        **{name: address(views[name]) for name in ("control", "links", "log", "retention", "slots")},
        num_slots=spec.num_slots,
        num_rows=spec.capacity_rows,
        log_size=len(views["log"]),
        id_index=shard.index,
        id_count=shard.count,
        peer=memory.peer,
        most_trajectories=retention.max_trajectories,
        most_steps=retention.max_steps,
        position=address(views[TRAIN_POSITION]) if TRAIN_POSITION in views else 0,
        least_free_rows=spec.least_free_rows,
    )
    store.set_columns(
        [
            (address(columns.by_name[column.name]), ROWS_CODES[column.rows], form_of(native, column))
            for column in spec.schema
        ]
    )
    roles = [spec.schema.role(role) for role in ("terminated", "truncated")]
    store.set_ends(*(0 if column is None else address(columns.by_name[column.name]) for column in roles))
    return store


def form_of(native: ModuleType, column: Column) -> Any:
    """Return the RowForm of a column's rows.

    Buffers are compared with its kind, size and shape; its check refuses NaN and infinities.
    """
    dtype = column.numpy_dtype
    check = _CHECKS[column.dtype] if column.must_be_finite else 0
    return native.RowForm(_KINDS[dtype.kind], dtype.itemsize, check, column.shape)


def address(array: np.ndarray) -> int:
    """Return the address of an array."""
    return int(array.ctypes.data)
