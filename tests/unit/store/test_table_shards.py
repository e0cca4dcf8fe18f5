"""A table that holds a shard: a slice of the whole, rows that arrive from other nodes, ids of all
nodes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, trajectory, write_dataset
from store_support import note_death, reserve

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_writer import DatasetWriter
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Slot
from deepspeed_gear.schema import Column, Schema
from deepspeed_gear.store.memory_layout import RunIdentity
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO, Shard, TableSpec, table_layout

LENGTHS = [3, 1, 7, 2, 5, 4]
NAMES = [*SCHEMA.names, RETURN_TO_GO]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return Dataset.open(write_dataset(tmp_path / "set", LENGTHS))


@contextmanager
def table_of(spec: TableSpec) -> Iterator[Table]:
    table = Table.create(spec, [], {}, RunIdentity("0" * 32), load_backend("cpu"), 10.0)
    try:
        yield table
    finally:
        table.close()


def spec_of(
    dataset: Dataset, first: int, end: int, in_memory: bool, arrivals: tuple[int, int] = (0, 0)
) -> TableSpec:
    lo = first - dataset.first_id
    hi = end - dataset.first_id
    rows = dataset.row_of(hi) - dataset.row_of(lo)
    shard = Shard(0, 2, first, end)
    return TableSpec(
        "main", dataset.schema, end - first, rows, dataset, in_memory, True, 1, shard, *arrivals
    )


def whole_spec(dataset: Dataset, in_memory: bool) -> TableSpec:
    return TableSpec(
        "main", dataset.schema, len(dataset), dataset.num_rows, dataset, in_memory, True, 1
    )


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("arrivals", [(0, 0), (4, 3)])
@pytest.mark.parametrize(("first", "end"), [(0, 6), (0, 2), (2, 5), (5, 6), (3, 3), (6, 6), (0, 0)])
def test_a_shard_is_a_slice_of_the_whole(
    dataset: Dataset, in_memory: bool, arrivals: tuple[int, int], first: int, end: int
) -> None:
    ids = np.arange(-1, len(dataset) + 1)
    with (
        table_of(whole_spec(dataset, in_memory)) as whole,
        table_of(spec_of(dataset, first, end, in_memory, arrivals)) as shard,
    ):
        row = dataset.row_of(first)
        assert shard.slots[:, Slot.ID].tolist() == list(range(first, end))
        assert (shard.slots[:, Slot.FIRST_ROW] + row).tolist() == whole.slots[
            first:end, Slot.FIRST_ROW
        ].tolist()
        assert shard.num_trajectories == end - first
        assert shard.num_steps == sum(LENGTHS[first:end])
        assert shard.control[Control.NEXT_ID] == len(dataset)
        slots = shard.slots_of(ids)
        assert slots.tolist() == [i - first if first <= i < end else -1 for i in ids]
        for name in NAMES:
            part = slice(first, end) if name == "task" else slice(row, row + shard.spec.num_rows)
            np.testing.assert_array_equal(shard.columns[name], whole.columns[name][part])
        for number in range(first, end):
            rows = shard.rows(number - first)
            wanted = trajectory(number, LENGTHS[number], number % 2 == 0, number % 2 == 1)
            assert all(np.array_equal(rows[name], wanted[name]) for name in wanted)
        assert shard.values("task", np.arange(end - first)).tolist() == list(range(first, end))
        assert shard.tensor("code").tolist() == shard.columns["code"].tolist()


def test_processes_must_agree_on_the_shard(dataset: Dataset) -> None:
    everything = whole_spec(dataset, False)
    shards = [None, Shard(0, 1, 0, 6), Shard(0, 2, 0, 6), Shard(1, 2, 0, 6), Shard(0, 1, 1, 7)]
    specs = [replace(everything, shard=shard) for shard in shards]
    assert len({table_layout(spec, [], {}).digest for spec in specs}) == len(shards)


@pytest.mark.parametrize("arrivals", [(5, 3), (5, 0), (0, 3)])
@pytest.mark.parametrize("in_memory", [True, False])
def test_arrivals_are_gathered_from_the_first_arrival_on(
    dataset: Dataset, in_memory: bool, arrivals: tuple[int, int]
) -> None:
    with table_of(spec_of(dataset, 2, 4, in_memory, arrivals)) as table:
        row, slot = table.first_arrival
        assert (row, slot) == ((table.spec.num_rows, 2) if in_memory else (0, 0))
        assert table.gathers_own_rows == in_memory
        for name in NAMES:
            own = table.columns[name]
            before = table.columns[name].copy()
            received = table.arrivals[name]
            at = slot if name == "task" else row
            assert len(received) == arrivals[int(name == "task")]
            assert (received.dtype, received.shape[1:]) == (own.dtype, own.shape[1:])
            received[...] = 1
            gathered = table.gather_source(name)
            assert len(gathered) == at + len(received)
            assert (gathered[at:] == 1).all()
            np.testing.assert_array_equal(gathered[:at].numpy(), own[:at])
            np.testing.assert_array_equal(own, before)


def test_the_derived_column_and_a_column_of_its_name_are_two(tmp_path: Path) -> None:
    schema = Schema([Column("reward", "float32", (), "reward"), Column("return_to_go", "bfloat16")])
    with DatasetWriter(tmp_path / "set", schema) as writer:
        writer.add(
            {"reward": np.ones(3, np.float32), "return_to_go": np.full(3, 0x4040, np.uint16)}
        )
    dataset = Dataset.open(tmp_path / "set")
    for in_memory in (True, False):
        with table_of(spec_of(dataset, 0, 1, in_memory, (2, 1))) as table:
            assert table.columns[RETURN_TO_GO].tolist() == [3, 2, 1]
            table.arrivals["return_to_go"][...] = 0x4000
            found = table.gather_source("return_to_go")
            assert found.dtype == torch.bfloat16
            assert found.tolist() == ([3, 3, 3, 2, 2] if in_memory else [2, 2])
            assert table.gather_source(RETURN_TO_GO).tolist() == (
                [3, 2, 1, 0, 0] if in_memory else [0, 0]
            )


def test_a_table_without_returns_has_no_derived_column(dataset: Dataset) -> None:
    spec = TableSpec("main", SCHEMA, 6, dataset.num_rows, dataset, False, False, 1, None, 3, 1)
    assert f"arrival/{RETURN_TO_GO}" not in {region.name for region in spec.regions()}
    with table_of(spec) as table, pytest.raises(KeyError):
        table.columns[RETURN_TO_GO]


def capacity(index: int = 0, count: int = 1, arrivals: tuple[int, int] = (0, 0)) -> TableSpec:
    return TableSpec("main", SCHEMA, 5, 30, None, True, True, 2, Shard(index, count), *arrivals)


def add(table: Table, number: int, steps: int = 2) -> int:
    with table.lock:
        slot = reserve(table, steps)
        table.write(slot, trajectory(number, steps))
        return table.commit(slot)


@pytest.mark.parametrize(("index", "count"), [(0, 1), (0, 3), (2, 3)])
def test_ids_go_on_after_a_recovery_and_a_restore(index: int, count: int) -> None:
    with table_of(capacity(index, count)) as table:
        last = [add(table, i) for i in range(2)][-1]
        table.control[Control.NEXT_ID] = 0  # as if the commit had died before it counted
        note_death(table)
        with table.lock:
            pass
        assert table.control[Control.NEXT_ID] == 2
        assert add(table, 2) == last + count
        with table.lock:
            table.restored(7)
        assert add(table, 3) == 7 * count + index


def test_added_rows_leave_arrivals_alone() -> None:
    with table_of(capacity(1, 2, (4, 2))) as table:
        for name in NAMES:
            table.arrivals[name][...] = 1
        for number in range(5):
            add(table, number, 5)
        assert all((table.arrivals[name] == 1).all() for name in NAMES)
        first = table.slots[0, Slot.FIRST_ROW]
        steps = int(table.slots[0, Slot.NUM_STEPS])
        assert table.columns[RETURN_TO_GO][first : first + steps].tolist() == [15, 14, 12, 9, 5]
        with table.lock:
            table.restored(5)
        assert all((table.arrivals[name] == 1).all() for name in NAMES)
