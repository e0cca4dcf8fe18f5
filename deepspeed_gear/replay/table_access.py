"""Calls of a replay on a table: read, remove and clear trajectories, set a policy version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.data.ragged import Ragged
from deepspeed_gear.errors import (
    ConfigError,
    NotReadyError,
    StoreError,
)
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.mass_rules import check_weight
from deepspeed_gear.sampling.staleness import Staleness
from deepspeed_gear.schema import Column
from deepspeed_gear.store.eviction import Evictor, quiet
from deepspeed_gear.store.native_rows import as_tensor
from deepspeed_gear.store.records import Peer, SlotRetention
from deepspeed_gear.store.row_allocator import distinct
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import Context, wait_until
from deepspeed_gear.writer.inserter import Inserter, refuse_read_only

_POLL_S = 500e-6


def inserter_of(
    table: Table, streams: Iterable[BatchStream], max_length: int | None, context: Context
) -> Inserter:
    """Return the inserter of a table, whose streams may sample its trajectories."""
    refuse_read_only(table)
    streams = list(streams)
    rules = [stream.spec.rule for stream in streams]
    weights = [rule.weight[0] for rule in rules if rule.weight is not None]
    checks = [partial(check_weight, f"table {table.spec.name}", column) for column in weights]
    custom = [stream.masses for stream in streams if stream.spec.rule.custom is not None]

    def committed(slot: int) -> None:
        # Errors of a program's own masses are raised here, not in a selection.
        for masses in custom:
            masses.of(np.array([slot]))

    return Inserter(table, context, max_length, tuple(checks), committed if custom else None, True)


def read(table: Table, ids: Sequence[int] | torch.Tensor) -> list[dict[str, Any]]:
    """Copy whole trajectories, under the lock, so that they are consistent."""
    numbers = arguments.integers("ids", ids)
    with table.lock:
        slots = table.slots_of(numbers)
        if (slots < 0).any() and table.spec.retention.max_times_sampled:
            # Also those evicted because of `max_times_sampled` whose rows are not free yet.
            evicted = table.extents.retired()
            times = table.views["retention"][evicted, SlotRetention.TIMES_SAMPLED]
            evicted = evicted[times >= table.spec.retention.max_times_sampled]
            if table.groups is not None and table.shared_prompts is not None:
                # Prompts that others hold may be freed already.
                shared, holders = table.shared_prompts[evicted].T
                is_same = table.groups.numbers(holders) == table.groups.numbers(evicted)
                evicted = evicted[(shared == 0) | (is_same & np.isin(holders, evicted))]
            place = dict(zip(table.slots[evicted, Slot.ID].tolist(), evicted.tolist(), strict=True))
            used_up = np.array([place.get(number, -1) for number in numbers.tolist()], np.int64)
            slots = np.where(slots >= 0, slots, used_up)
        if (slots < 0).any():
            remedy = "it may have been evicted, or is stored on another node"
            if table.spec.retention.max_times_sampled:
                remedy = "read samples before adding more: rows of evicted trajectories are reused"
            absent = int(numbers[slots < 0][0])
            raise StoreError(f"table {table.spec.name}: id", "must be stored", absent, remedy)
        copies = [
            {name: np.array(rows) for name, rows in table.rows(int(slot)).items()} for slot in slots
        ]
        items = [item_values(table, rows, nullcontext()) for rows in copies]
    return [values(table, *both) for both in zip(copies, items, strict=True)]


def item_values(table: Table, rows: Mapping[str, np.ndarray], lock: Any) -> dict[str, Any]:
    """Return the media and ragged values of a trajectory by column.

    `lock` is the table's, unless it is held. A late column that was not filled has no values.
    """
    if table.media is None:
        return {}
    spec = table.media.spec
    items = dict[str, Any]()
    if spec.column is not None:
        items[spec.column] = table.media.named(rows[spec.column], lock)
    step_column = table.schema.step_columns[0]
    num_steps = len(rows[step_column.name]) - (step_column.rows == "T+1")
    for column in spec.ragged:
        number = rows[column.name].reshape(1)
        given = table.media.ragged(column, number, lock)
        empty = Ragged(
            torch.zeros(0, dtype=column.values.torch_dtype), np.zeros(num_steps + 1, int)
        )
        items[column.name] = given.get(int(number[0]), empty)
    return items


def values(
    table: Table, rows: Mapping[str, np.ndarray], items: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a trajectory's columns as programs give them; tensors share memory with the rows.

    `items` are the values of the columns whose rows have numbers of items.
    """

    def value(column: Column, rows: np.ndarray) -> Any:
        if column.name in items:
            return items[column.name]
        if column.is_opaque:
            return decode(rows, column, f"table {table.spec.name}: column {column.name}")
        return as_tensor(np.ascontiguousarray(rows).reshape(rows.shape), column.dtype)

    return {column.name: value(column, rows[column.name]) for column in table.spec.schema}


def remove(table: Table, ids: Sequence[int] | torch.Tensor) -> int:
    """Evict trajectories, or their whole groups; return their number. Unknown ids are ignored."""
    refuse_read_only(table)
    numbers = arguments.integers("ids", ids)
    with quiet(table, table.lock.timeout_s):
        slots = table.slots_of(numbers)
        return len(table.evict(distinct(slots[slots >= 0]), removed=True))


def clear(table: Table, streams: Iterable[BatchStream]) -> None:
    """Evict all trajectories of a table and end the epoch."""
    refuse_read_only(table)
    with quiet(table, table.lock.timeout_s):
        table.evict(np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0], removed=True)
        if table.groups is not None:
            table.groups.forget()
        for stream in streams:
            stream.state.end_epoch()
        Evictor(table, Context(timeout_s=table.lock.timeout_s)).free_retired()


def set_policy_version(table: Table, version: int, context: Context) -> None:
    """Set the policy version of this node's store, which never decreases.

    See `Replay.set_policy_version`.
    """
    name = f"table {table.spec.name}"
    retention = table.spec.retention
    if retention.version_column is None:
        rule = "must have versions"
        remedy = f"set gear.tables.{table.spec.name}.version"
        raise ConfigError(name, rule, None, remedy)
    staleness = Staleness(table)
    lagging = list[int]()
    rule = f"must have no open trajectory with a lag above {retention.max_lag} at version {version}"

    def try_set() -> bool:
        with table.lock:
            lagging[:] = staleness.open_lagging(version) if retention.waits else []
            if not lagging:
                table.raise_policy_version(version)
        if table.memory.peer in lagging:
            raise NotReadyError(name, rule, None, "end this process's own trajectories first")
        return not lagging

    if not wait_until(try_set, context.timeout_s, _POLL_S, context.check):
        processes = [int(table.peers[peer, Peer.PID]) for peer in lagging]
        raise NotReadyError(
            name, f"{rule}, within {context.timeout_s:g} s", processes, "check these actors"
        )
