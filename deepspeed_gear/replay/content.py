"""Changing and reading what a table holds; changes reach the streams at their next cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from deepspeed_gear.errors import DataError, StoreError, StoreFullError
from deepspeed_gear.selection.cut import KEY
from deepspeed_gear.selection.stream import Stream, reclaim
from deepspeed_gear.store.table import COMMITTED, STATE, Table


def add(table: Table, streams: list[Stream], trajectory: Mapping[str, Any], max_length: int | None) -> int:
    """Store a trajectory and queue its masses. Returns its id."""
    arrays, num_steps = table.check(trajectory)
    if max_length is not None and num_steps > max_length:
        raise DataError(
            f"table {table.spec.name}: trajectory",
            f"must have at most max_length = {max_length} steps",
            num_steps,
        )
    for stream in streams:
        stream.spec.rule.check(f"table {table.spec.name}", arrays)
    with table.lock:
        try:
            slot = table.reserve(num_steps)
        except StoreFullError:
            reclaim(table, streams)
            slot = table.reserve(num_steps)
    try:
        table.write(slot, arrays)
    except BaseException:
        with table.lock:
            table.free(np.array([slot]))
        raise
    with table.lock:
        number = table.commit(slot, int(streams[0].position[KEY]) if streams else 0)
        slots = np.array([slot])
        try:
            masses = [stream.masses.of(slots) for stream in streams]
        except BaseException:  # a program's own masses may fail
            table.retire(slot)
            raise
        for stream, mass in zip(streams, masses, strict=True):
            stream.queue(slots, mass)
            if stream.draws is not None:
                stream.draws.forget(slots)
    return number


def read(table: Table, ids: Sequence[int] | torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Copy whole trajectories, under the lock, so that none is torn."""
    numbers = np.asarray(ids, np.int64).reshape(-1)
    with table.lock:
        slots = table.slots_of(numbers)
        if (slots < 0).any():
            raise StoreError(f"table {table.spec.name}: id", "must be stored", int(numbers[slots < 0][0]))
        found = [{name: np.array(rows) for name, rows in table.rows(int(slot)).items()} for slot in slots]
    schema = table.spec.schema
    return [{name: _as_column(rows, schema[name].torch_dtype) for name, rows in t.items()} for t in found]


def remove(table: Table, streams: list[Stream], ids: Sequence[int] | torch.Tensor) -> int:
    """Retire trajectories; ids that are not stored are ignored. Returns how many there were."""
    _check_writable(table)
    with table.lock:
        slots = table.slots_of(np.asarray(ids, np.int64).reshape(-1))
        slots = np.unique(slots[slots >= 0])
        _retire(table, streams, slots)
    return len(slots)


def clear(table: Table, streams: list[Stream]) -> None:
    """Retire everything and end the epoch."""
    _check_writable(table)
    with table.lock:
        _retire(table, streams, np.nonzero(table.slots[:, STATE] == COMMITTED)[0])
        for stream in streams:
            stream.restart()
        reclaim(table, streams)


def _retire(table: Table, streams: list[Stream], slots: np.ndarray) -> None:
    for slot in slots.tolist():
        table.retire(slot)
    for stream in streams:
        stream.queue(slots, np.zeros(len(slots), np.int64))


def _check_writable(table: Table) -> None:
    if table.spec.dataset is not None:
        raise StoreError(
            f"table {table.spec.name}",
            "must have a capacity to be changed",
            None,
            "it holds a read-only data set",
        )


def _as_column(rows: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(rows)).reshape(rows.shape)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor
