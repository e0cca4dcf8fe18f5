"""Access to the tables of a replay by name: additions, reads, removals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.context import Context
from deepspeed_gear.data.opaque_rows import decode
from deepspeed_gear.errors import ConfigError, NotReadyError, StoreError, StoreFullError
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.staleness import Staleness
from deepspeed_gear.schema import Column
from deepspeed_gear.store.eviction import Evictor, quiet
from deepspeed_gear.store.pins import SelectionPins
from deepspeed_gear.store.records import Control, Peer, SlotRetention
from deepspeed_gear.store.row_allocator import distinct
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import wait_until
from deepspeed_gear.writer.inserter import Inserter, refuse_read_only


class TableAccess:
    """Finds the tables of a replay by name, and adds to them."""

    def __init__(self, parts: ReplayParts) -> None:
        self._parts, self._config = parts, parts.plan.config
        self._inserters: dict[str, Inserter] = {}

    def find(self, name: str | None) -> Table:
        """Return a table; None: the only one that is sampled.

        Raises:
            ConfigError: There is no such table, or the name must be given.
        """
        tables, sampled = self._parts.tables, self._config.sampled_tables
        known = ", ".join(tables)
        if name is None and len(sampled) > 1:
            raise ConfigError("table", "must be given where there are several", None, f"one of {known}")
        name = sampled[0] if name is None else name
        if not isinstance(name, str) or name not in tables:
            raise ConfigError("table", f"must be one of {known}", name)
        return tables[name]

    @property
    def sampled(self) -> list[Table]:
        """The tables that are sampled."""
        return [self._parts.tables[name] for name in self._config.sampled_tables]

    def streams(self, table: Table) -> list[BatchStream]:
        """Return the streams that sample from a table."""
        return list(self._parts.streams[table.spec.name].values())

    def inserter(self, name: str | None) -> Inserter:
        """Return the inserter of a table."""
        table = self.find(name)
        if table.spec.name not in self._inserters:
            max_length = self._config.resolved_tables[table.spec.name].max_length
            made = inserter_of(table, self.streams(table), max_length, self._parts.context)
            self._inserters[table.spec.name] = made
        return self._inserters[table.spec.name]

    def add(self, trajectory: Mapping[str, Any], name: str | None) -> int:
        """Store a trajectory, after releasing what the device has read. Returns its id."""
        inserter = self.inserter(name)
        self._parts.releases.settle()
        try:
            return inserter.add(trajectory)
        except StoreFullError:
            if not self._parts.releases.drain():
                raise
            return inserter.add(trajectory)

    def note_writer(self, table: Table) -> None:
        """Mark this process as a writer: its selections must not wait for items that it would add."""
        for stream in self.streams(table):
            stream.note_writer()


_POLL_S = 500e-6


def inserter_of(
    table: Table, streams: list[BatchStream], max_length: int | None, context: Context
) -> Inserter:
    """Return the inserter of a table; its streams may sample new trajectories at their next selection.

    Args:
        streams: The streams that sample from it.
        max_length: Steps of the longest trajectory.
        context: Longest wait for free rows, and the check while it waits.
    """
    refuse_read_only(table)
    name, rules = f"table {table.spec.name}", [stream.spec.rule for stream in streams]
    checks = [partial(rule.check, name) for rule in rules if rule.weight is not None]
    custom = [stream.masses for stream in streams if stream.spec.rule.custom is not None]

    def committed(slot: int) -> None:
        for masses in custom:  # errors of a program's own masses are raised here, not in a selection
            masses.of(np.array([slot]))

    readers, more = SelectionPins(table), committed if custom else None
    return Inserter(table, readers, context, max_length, tuple(checks), more, True)


def add(
    table: Table, streams: list[BatchStream], trajectory: Mapping[str, Any], max_length: int | None
) -> int:
    """Store a trajectory. Returns its id."""
    context = Context(timeout_s=table.lock.timeout_s)
    return inserter_of(table, streams, max_length, context).add(trajectory)


def read(table: Table, ids: Sequence[int] | torch.Tensor) -> list[dict[str, Any]]:
    """Copy whole trajectories, under the lock, so that they are consistent."""
    numbers = arguments.integers("ids", ids)
    with table.lock:
        slots = table.slots_of(numbers)
        if (slots < 0).any() and table.spec.retention.max_times_sampled:
            slots = _with_used_up(table, numbers, slots)
        if (slots < 0).any():
            remedy = ""
            if table.spec.retention.max_times_sampled:
                remedy = "read samples before adding more: rows of evicted trajectories are reused"
            raise StoreError(
                f"table {table.spec.name}: id", "must be stored", int(numbers[slots < 0][0]), remedy
            )
        found = [{name: np.array(rows) for name, rows in table.rows(int(slot)).items()} for slot in slots]
    schema, name = table.spec.schema, f"table {table.spec.name}"
    return [{c.name: _as_column(rows[c.name], c, name) for c in schema} for rows in found]


def _with_used_up(table: Table, ids: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return the slots of ids, also those evicted because of `max_times_sampled` whose rows are not free yet.

    Args:
        table: With such a limit.
        ids: [n], int64.
        slots: Result of `Table.slots_of`. [n], int64.
    """
    evicted = table.extents.retired()
    times = table.views["retention"][evicted, SlotRetention.TIMES_SAMPLED]
    evicted = evicted[times >= table.spec.retention.max_times_sampled]
    place = dict(zip(table.slots[evicted, Slot.ID].tolist(), evicted.tolist(), strict=True))
    found = [place.get(number, -1) for number in ids.tolist()]
    return np.where(slots >= 0, slots, np.array(found, np.int64))


def remove(table: Table, ids: Sequence[int] | torch.Tensor) -> int:
    """Evict trajectories, or their whole groups; ignore ids that are not stored. Returns their number."""
    refuse_read_only(table)
    numbers = arguments.integers("ids", ids)
    with quiet(table, table.lock.timeout_s):
        slots = table.slots_of(numbers)
        return len(table.evict(distinct(slots[slots >= 0]), removed=True))


def clear(table: Table, streams: list[BatchStream]) -> None:
    """Retire all trajectories and end the epoch."""
    refuse_read_only(table)
    evictor = Evictor(table, SelectionPins(table), Context(timeout_s=table.lock.timeout_s))
    with quiet(table, table.lock.timeout_s):
        table.evict(np.nonzero(table.slots[:, Slot.STATE] == SlotState.COMMITTED)[0], removed=True)
        if table.groups is not None:
            table.groups.forget()
        for stream in streams:
            stream.state.end_epoch()
        evictor.free_retired()


def set_policy_version(table: Table, version: int, context: Context) -> None:
    """Set the policy version of a node's store; it never decreases.

    Args:
        context: Longest wait for open trajectories, and the check while it waits.
    Raises:
        ConfigError: The table has no versions.
        NotReadyError: This process has an open trajectory that is too old, or another one for too long.
    """
    name, retention = f"table {table.spec.name}", table.spec.retention
    if retention.version_column is None:
        rule, remedy = "must have versions", f"set gear.tables.{table.spec.name}.version"
        raise ConfigError(name, rule, None, remedy)
    staleness, lagging = Staleness(table), list[int]()
    rule = f"must have no open trajectory with a lag above {retention.max_lag} at version {version}"

    def try_set() -> bool:
        with table.lock:
            lagging[:] = staleness.open_lagging(version) if retention.waits else []
            if not lagging:
                known = int(table.control[Control.POLICY_VERSION])
                table.control[Control.POLICY_VERSION] = max(known, version)
        if table.memory.peer in lagging:
            raise NotReadyError(name, rule, None, "end this process's own trajectories first")
        return not lagging

    if not wait_until(try_set, context.timeout_s, _POLL_S, context.check):
        processes = [int(table.peers[peer, Peer.PID]) for peer in lagging]
        raise NotReadyError(name, f"{rule}, within {context.timeout_s:g} s", processes, "check these actors")


def _as_column(rows: np.ndarray, column: Column, table: str) -> Any:
    """Return copied rows as a tensor, or the value of an opaque column."""
    if column.is_opaque:
        return decode(rows, column, f"{table}: column {column.name}")
    tensor = torch.from_numpy(np.ascontiguousarray(rows)).reshape(rows.shape)
    return tensor.view(torch.bfloat16) if column.dtype == "bfloat16" else tensor
