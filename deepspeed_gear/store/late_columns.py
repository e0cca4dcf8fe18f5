"""Late columns: fill them once after their trajectory is stored; which trajectories lack one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import deepspeed_gear.arguments as arguments
from deepspeed_gear.data.media_digests import MediaItem
from deepspeed_gear.data.nested_columns import flatten
from deepspeed_gear.data.ragged import encode_ragged
from deepspeed_gear.data.stored_values import as_stored, check_finite
from deepspeed_gear.errors import DataError, StoreError
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.schema import Column
from deepspeed_gear.store.eviction import Evictor, quiet
from deepspeed_gear.store.prompt_ledger import LeaseRecord
from deepspeed_gear.store.records import SharedPrompt, SlotRetention
from deepspeed_gear.store.table import Table
from deepspeed_gear.timeouts import Context


def fill(
    table: Table,
    trajectory_id: int,
    columns: Mapping[str, Any],
    timeout_s: float,
    lineage: str | None = None,
) -> None:
    """Write late columns of a stored trajectory; batches from the next selection on may read them.

    The rows are written with the lock held, so the slot cannot become another trajectory's; rows of
    a process that dies in between are never visible, and may be written again. With a `lineage`,
    `Table.lineage` when the id was given, nothing happens if the trajectory is gone.

    Raises:
        DataError: A column is not late, has been written, does not fit, or is not finite and must
            be; nothing has changed.
        StoreError: The trajectory is not stored on this node.
    """
    name = f"table {table.spec.name}"
    schema = table.spec.schema
    trajectory_id = arguments.count("trajectory_id", trajectory_id, least=0)
    arrays = {}
    ragged = _RaggedValues(table, timeout_s)
    for column_name, value in flatten(name, columns, frozenset(schema.names)).items():
        if column_name not in schema or not schema[column_name].late:
            late = ", ".join(column.name for column in schema.late_columns) or "none"
            raise DataError(
                f"{name}: column {column_name}",
                f"must be one of the late columns: {late}",
                remedy='only a column with "late": true in the schema can be filled later',
            )
        if schema[column_name].is_ragged:
            value = ragged.number(name, schema[column_name], value)
        arrays[column_name] = as_stored(value, schema[column_name], name)
    check_finite(name, schema, arrays)
    while not _filled(table, trajectory_id, arrays, ragged, timeout_s, lineage):
        ragged.add()


def _filled(
    table: Table,
    trajectory_id: int,
    arrays: Mapping[str, np.ndarray],
    ragged: _RaggedValues,
    timeout_s: float,
    lineage: str | None,
) -> bool:
    """Write columns of a stored trajectory in the stored form, as `fill`.

    Returns:
        False, and nothing is written: the pages lack a ragged value.
    """
    name = f"table {table.spec.name}"
    schema = table.spec.schema
    bits = schema.late_bits(arrays)
    with quiet(table, timeout_s):
        slot = int(table.slots_of(np.array([trajectory_id]))[0])
        if lineage is not None and (slot < 0 or lineage != table.lineage):
            return True
        if slot < 0:
            rule = "must be stored on this node"
            remedy = "it may have been evicted"
            raise StoreError(f"{name}: id", rule, trajectory_id, remedy)
        retention = table.views["retention"]
        if retention[slot, SlotRetention.OPEN]:
            raise DataError(
                f"{name}: id {trajectory_id}",
                "must have ended before late columns are written",
                remedy="end the trajectory first",
            )
        present = int(retention[slot, SlotRetention.PRESENT])
        written = [column for column in arrays if present & schema.late_bits([column])]
        if written:
            rule = "must be written once"
            raise DataError(
                f"{name}: column {written[0]}",
                rule,
                f"id {trajectory_id} has it",
                "a late column cannot be changed",
            )
        rows = table.own_rows(slot)
        shared = table.shared_prompt(slot)[0]
        own = dict(arrays)
        for column, array in arrays.items():
            first = 0 if schema[column].rows == "1" else shared  # what is before is another one's
            own[column] = array[first:] if first else array
            num_steps = int(table.num_steps_of(np.array([slot]))[0])
            num_given = ragged.lengths.get(column, num_steps)
            if rows[column].shape != own[column].shape or num_given != num_steps:
                rule = f"must have the rows of {num_steps} steps"
                raise DataError(
                    f"{name}: column {column}",
                    rule,
                    num_given if column in ragged.lengths else len(array),
                    "give a row for each step of the stored trajectory",
                )
        if not ragged.are_held():
            return False
        _write(rows, own)
        if table.groups is not None:
            table.groups.note_time(slot)
        retention[slot, SlotRetention.PRESENT] |= bits  # the commit point
        table.extents.note(slot)
    return True


class _RaggedValues:
    """Values of ragged columns that are filled: their items, and the pages that hold them.

    A row names an item only once the pages hold it. No row names it before, so another process may
    evict it between `add` and the write: then it is added again.
    """

    def __init__(self, table: Table, timeout_s: float) -> None:
        self._table = table
        self._timeout_s = timeout_s
        self._items = dict[int, MediaItem]()
        self.lengths = dict[str, int]()  # steps, by column

    def number(self, name: str, column: Column, value: Any, steps: int | None = None) -> int:
        """Encode the value of a trajectory; return the number of its item. DataError: no fit."""
        assert self._table.media is not None
        spec = self._table.media.spec
        item = spec.ragged_item(f"{name}: column {column.name}", column, value, steps)
        self._items[item.number] = item
        self.lengths[column.name] = len(spec.ragged_value(column, item.content))
        return item.number

    def are_held(self) -> bool:
        """Return whether the pages hold all items. Requires the lock."""
        if self._table.media is None or not self._items:
            return True
        return bool((self._table.media.find(np.array([*self._items])) >= 0).all())

    def add(self) -> None:
        """Add the items to the pages, as `Evictor.add_items`."""
        evictor = Evictor(self._table, Context(timeout_s=self._timeout_s))
        evictor.add_items(self._items, np.array([*self._items]))


def _write(rows: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> None:
    for column, array in arrays.items():
        rows[column][...] = array


def fill_each(
    table: Table,
    column: Column,
    resolutions: np.ndarray,
    values: Any,
    lineage: str,
    offset: int = 0,
) -> None:
    """Write a late column of many trajectories, as `fill` with `lineage`; count those that have it.

    Args:
        table: The table.
        column: The late column.
        resolutions: Of the trajectories, as `absent`. [n, Resolution.NUM_WORDS], int64.
        values: Rows of one trajectory after the other; of a ragged column a Ragged, or what becomes
            one, for each trajectory. Row i takes the one that is `offset` before it in its
            trajectory, or zeros. Of a prompt that another trajectory holds they are left out.
        lineage: `Table.lineage` of the resolutions.
        offset: Steps between a row and its value.
    Raises:
        DataError: A value does not fit, or is not finite and must be; nothing is written.
    Cost: A copy of the rows, with the lock held.
    """
    name = f"table {table.spec.name}"
    schema = table.spec.schema
    ragged = _RaggedValues(table, table.lock.timeout_s)
    if column.is_ragged:
        pairs = zip(values, resolutions[:, Resolution.NUM_STEPS].tolist(), strict=True)
        values = np.array([ragged.number(name, column, *pair) for pair in pairs], np.int64)
    slots = np.empty(len(resolutions), np.int64)
    counts = resolutions[:, Resolution.NUM_STEPS] + int(column.rows == "T+1")
    counts = np.ones_like(counts) if column.rows == "1" else counts
    array = np.ascontiguousarray(as_stored(values, column, name, int(counts.sum())))
    shared = 0 * counts
    if table.shared_prompts is not None:
        shared = table.shared_prompts[resolutions[:, Resolution.SLOT], SharedPrompt.STEPS]
    if shared.any():
        resolutions = resolutions.copy()
        resolutions[:, Resolution.NUM_STEPS] -= np.minimum(
            shared, resolutions[:, Resolution.NUM_STEPS]
        )
        shared = np.minimum(shared, 0 if column.rows == "1" else counts)
        if column.rows != "1":
            array = _without_prompts(counts, shared, array, offset)
            offset = 0
            counts -= shared
    native = table.ops.native
    store = table.extents.handle.address
    bit = schema.late_bits([column.name])
    given = schema.names.index(column.name), bit, resolutions, array, offset, slots
    while True:
        with quiet(table, table.lock.timeout_s):
            if lineage != table.lineage:
                return
            if ragged.are_held():
                num, repeated, wrong = native.late_rows_write(store, *given)
                if wrong >= 0:  # the row of a value; nothing is written
                    break
                if repeated:
                    assert table.fills is not None
                    table.fills.count_repeated(schema.late_columns.index(column), repeated)
                if table.groups is not None:
                    table.groups.note_time(slots[:num])
                native.late_rows_mark(store, bit, slots[:num])  # the commit points
                return
        ragged.add()
    at = int(np.searchsorted(ends := np.cumsum(counts), wrong, "right"))
    step = wrong - ends[at] + counts[at] + offset + shared[at]
    place = f"step {step} of id {resolutions[at, Resolution.ID]}"
    check_finite(name, schema, {column.name: array[wrong : wrong + 1]}, lambda _: place)


def fill_leased(table: Table, column: Column, lease: LeaseRecord, value: Any) -> None:
    """Write a late column of a trajectory that a `FillLedger` has leased, as `fill_each`."""
    record = np.zeros((1, Resolution.NUM_WORDS), np.int64)
    record[0, Resolution.ID] = lease.number
    record[0, Resolution.SLOT] = lease.entry
    record[0, Resolution.NUM_STEPS] = lease.num_steps
    values = [value] if column.rows == "1" else value
    fill_each(table, column, record, values, lease.origin)


def check_leased(table: Table, column: Column, lease: LeaseRecord, value: Any) -> None:
    """Raise DataError for a value that `fill_leased` would refuse."""
    name = f"table {table.spec.name}"
    if column.is_ragged:
        encode_ragged(value, column, f"{name}: column {column.name}", lease.num_steps)
        return
    rows = None if column.rows == "1" else lease.num_steps + int(column.rows == "T+1")
    check_finite(name, table.spec.schema, {column.name: as_stored(value, column, name, rows)})


def _without_prompts(
    counts: np.ndarray, shared: np.ndarray, values: np.ndarray, offset: int
) -> np.ndarray:
    """Return the values of the rows that trajectories hold themselves, without `shared` first ones.

    Of 5 rows of which 2 are shared, with an offset of 1, the rows [2, 5) have the values [1, 4).
    `counts` of rows, [n], of which the values are one trajectory's after the other.
    """
    owner = np.repeat(np.arange(len(counts)), counts)
    rows = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    source = rows - offset
    is_own = rows >= shared[owner]
    moved = np.zeros_like(values)
    has_value = np.flatnonzero((source >= 0) & (source < counts[owner]))
    moved[has_value] = values[has_value - offset]
    return np.asarray(moved[is_own])


def absent(table: Table, *names: str) -> np.ndarray:
    """Return resolutions of trajectories that lack a late column, by group and id.

    They are as of a selection, but with the slot that holds a shared prompt as MASS. Requires the
    lock.
    """
    retention = table.views["retention"]
    bits = table.spec.schema.late_bits(names)
    is_whole = (table.slots[:, Slot.STATE] == SlotState.COMMITTED) & (
        retention[:, SlotRetention.OPEN] == 0
    )
    slots = np.nonzero(is_whole & (retention[:, SlotRetention.PRESENT] & bits != bits))[0]
    found = np.zeros((len(slots), Resolution.NUM_WORDS), np.int64)
    found[:, Resolution.ID] = table.slots[slots, Slot.ID]
    found[:, Resolution.NUM_STEPS] = table.num_steps_of(slots)
    if table.shared_prompts is not None:
        found[:, [Resolution.ANCHOR, Resolution.MASS]] = table.shared_prompts[slots]
    numbers = found[:, Resolution.ID] if table.groups is None else table.groups.numbers(slots)
    found[:, Resolution.SLOT] = slots
    found[:, Resolution.SAMPLE_NUMBER] = numbers
    return found[np.lexsort((found[:, Resolution.ID], numbers))]
