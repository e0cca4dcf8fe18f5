"""A table: the life of a slot, what may be added, who may attach, what death leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SCHEMA, SHM, STEP, prefix, shared_files, trajectory, wait_until, write_dataset
from hypothesis import given
from hypothesis import strategies as st
from process_support import exit_status, in_child, kill
from store_support import StoreScene, reserve

from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.trajectory_checks import check_trajectory
from deepspeed_gear.errors import DataError, StoreError, StoreFullError
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import Slot, SlotState
from deepspeed_gear.replay import table_access
from deepspeed_gear.schema import DTYPES, Column, Schema
from deepspeed_gear.store.memory_layout import HEADER, Layout, RunIdentity
from deepspeed_gear.store.records import Control
from deepspeed_gear.store.row_allocator import distinct, is_among
from deepspeed_gear.store.table import Table
from deepspeed_gear.store.table_spec import RETURN_TO_GO, TableSpec


@pytest.fixture
def scene() -> Iterator[StoreScene]:
    scene = StoreScene(num_slots=5, num_rows=20)
    yield scene
    scene.close()
    assert shared_files(prefix()) == []


def read(table: Table, number: int) -> dict[str, np.ndarray]:
    slot = int(table.slots_of(np.array([number]))[0])
    assert slot >= 0
    return table.rows(slot)


def same(rows: dict[str, np.ndarray], wanted: dict[str, Any]) -> bool:
    return set(rows) == set(wanted) and all(np.array_equal(rows[name], wanted[name]) for name in wanted)


# ---- the life of a slot --------------------------------------------------------------------------


def test_reserve_commit_retire_free(scene: StoreScene) -> None:
    table = scene.table
    with table.lock:
        slot = reserve(table, 4)
        assert table.slots[slot, Slot.STATE] == SlotState.RESERVED
        assert table.num_trajectories == table.num_steps == 0
        assert table.slots_of(np.array([0])).tolist() == [-1]
        table.write(slot, trajectory(0, 4))
        assert table.commit(slot) == 0
        assert table.slots[slot, Slot.STATE] == SlotState.COMMITTED
        assert (table.num_trajectories, table.num_steps) == (1, 4)
        assert table.slots_of(np.array([1, 0, -1])).tolist() == [-1, slot, -1]
        table.extents.retire(slot)
        assert table.slots[slot, Slot.STATE] == SlotState.EVICTED
        assert table.num_trajectories == table.num_steps == 0
        assert table.slots_of(np.array([0])).tolist() == [-1]
        assert table.extents.retired().tolist() == [slot]
        table.extents.free(slot)
        assert table.slots[slot, Slot.STATE] == SlotState.FREE


def test_ids_are_for_ever_and_generations_count(scene: StoreScene) -> None:
    table = scene.table
    assert [scene.add(2) for _ in range(5)] == [0, 1, 2, 3, 4]
    slot = int(table.slots_of(np.array([3]))[0])
    generation = int(table.slots[slot, Slot.GENERATION])
    table_access.remove(table, [3])
    assert scene.add(2) == 5
    assert int(table.slots_of(np.array([5]))[0]) == slot
    assert table.slots[slot, Slot.GENERATION] == generation + 1


def test_rows_are_what_was_added_and_returns_to_go_are_derived(scene: StoreScene) -> None:
    returns = {1: [1], 5: [15, 14, 12, 9, 5], 3: [6, 5, 3]}
    for steps in returns:
        scene.add(steps)
    for number, (steps, wanted) in enumerate(returns.items()):
        assert same(read(scene.table, number), trajectory(number, steps))
        first = int(scene.table.slots[scene.table.slots_of(np.array([number]))[0], Slot.FIRST_ROW])
        assert scene.table.columns[RETURN_TO_GO][first : first + steps].tolist() == wanted


@pytest.mark.parametrize(
    ("lengths", "fits"),
    [([19], True), ([20], False), ([9, 9], True), ([9, 10], False), ([3] * 5, True), ([2] * 6, False)],
)
def test_capacity(scene: StoreScene, lengths: list[int], fits: bool) -> None:
    """Five slots and 20 rows; a trajectory of T steps takes T + 1 rows."""
    for steps in lengths[:-1]:
        scene.add(steps)
    if fits:
        scene.add(lengths[-1])
        assert scene.table.num_steps == sum(lengths)
        return
    text = "must have a free slot of 5" if len(lengths) == 6 else r"must have \d+ free rows in a run, got"
    before = scene.table.slots.copy()
    with pytest.raises(StoreFullError, match=text):
        scene.add(lengths[-1])
    assert (scene.table.slots == before).all()
    assert scene.table.num_steps == sum(lengths[:-1])


def test_changes_of_others_are_seen(scene: StoreScene) -> None:
    other, _ = scene.attach(1)
    table_access.add(scene.table, [], trajectory(0, 9), None)
    table_access.add(other, [], trajectory(1, 9), None)  # knows that 10 of the 20 rows are taken
    with pytest.raises(StoreFullError):
        table_access.add(scene.table, [], trajectory(2, 1), None)
    table_access.remove(other, [0])
    assert table_access.add(scene.table, [], trajectory(2, 9), None) == 2
    for number in (1, 2):
        assert same(read(other, number), trajectory(number, 9))
    other.close()


def test_a_refused_write_gives_its_rows_back(scene: StoreScene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(scene.table, "write", fail)
        with pytest.raises(MemoryError):
            scene.add(19)
    scene.add(19)


# ---- what may be added ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"foreign": np.zeros(4)}, "table main: column foreign must be in the schema; known are"),
        ({"action": None}, "table main: column action must be in every trajectory"),
        (
            {"action": np.zeros((5, 2), np.float32)},
            r"column action must have 4 rows \(T\), got 5; column obs",
        ),
        (
            {"observation": np.zeros((4, 3), np.float32)},
            r"column observation must have 5 rows \(T\+1\), got 4; column action .* the observation after",
        ),
        ({"action": np.zeros((4, 3), np.float32)}, r"column action must have shape \['T', 2\], got \[4, 3\]"),
        ({"action": np.zeros(4, np.float32)}, r"column action must have shape \['T', 2\], got \[4\]"),
        ({"task": np.zeros(1, np.int64)}, r"column task must have shape \[\], got \[1\]"),
        ({"reward": np.zeros(4, complex)}, "column reward must be convertible to float32, got 'complex128'"),
        ({"reward": torch.zeros(4, dtype=torch.complex64)}, "column reward must be convertible to float32"),
        (
            {"reward": torch.zeros(4).to_sparse()},
            "column reward must be a dense tensor, got 'torch.sp",
        ),
        (
            {"reward": torch.zeros(4, device="meta")},
            "column reward must be a tensor of numbers, got 'a meta",
        ),
        ({"reward": np.array(["a"] * 4)}, "column reward must be convertible to float32"),
        ({"reward": [[1], [1, 2], 3, 4]}, "column reward must be an array"),
        ({"terminated": np.full(4, 0.5)}, "column terminated must hold values that bool can hold, got 0.5"),
        ({"code": np.full(4, 0.5)}, "column code must hold values that int64 can hold, got 0.5"),
        ({"code": [0.5] * 4}, "column code must hold values that int64 can hold, got 0.5"),
        ({"reward": np.full(4, 1e300)}, r"column reward must hold values that float32 can hold, got 1e\+300"),
    ],
)
def test_wrong_trajectories_are_refused(scene: StoreScene, change: dict[str, Any], text: str) -> None:
    wrong = {k: v for k, v in {**trajectory(0, 4), **change}.items() if v is not None}
    before = scene.table.slots.copy()
    with pytest.raises(DataError, match=text):
        table_access.add(scene.table, [], wrong, None)
    assert (scene.table.slots == before).all()


def test_trajectories_that_are_too_short_or_too_long(scene: StoreScene) -> None:
    with pytest.raises(DataError, match="must have at least one step, got 0"):
        scene.add(0)
    with pytest.raises(DataError, match="must have at most max_length = 3 steps, got 4"):
        table_access.add(scene.table, [], trajectory(0, 4), 3)
    table_access.add(scene.table, [], trajectory(0, 3), 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_round_trip(dtype: str) -> None:
    """Other values: tests/property/test_ways_in.py."""
    schema = Schema([Column("x", dtype, (2,)), Column("one", dtype, (), "other", "1")])
    low, high = (0, 1) if dtype in ("bool", "uint8") else (-3, 3)
    given = {
        "x": torch.tensor([[low, high], [1, 0]]).to(DTYPES[dtype]),
        "one": torch.tensor(high).to(DTYPES[dtype]),
    }
    stored, num_steps = check_trajectory("t", schema, given)
    assert num_steps == 2
    for name, wanted in given.items():
        found = torch.from_numpy(stored[name].copy())
        assert torch.equal(found.view(torch.bfloat16) if dtype == "bfloat16" else found, wanted)


@pytest.mark.parametrize("value", [1e300, 3.4e38])
@pytest.mark.parametrize("make", [np.array, lambda x: torch.tensor(x, dtype=torch.float64), list])
def test_what_overflows_in_bfloat16_is_refused(make: Any, value: float) -> None:
    schema = Schema([Column("x", "bfloat16", allow_nan=True)])
    with pytest.raises(DataError, match="column x must hold values that bfloat16 can hold, got"):
        check_trajectory("t", schema, {"x": make([1.0, value])})


@pytest.mark.parametrize("complex_values", [np.ones(2, np.complex64), torch.ones(2, dtype=torch.complex64)])
def test_complex_values_are_no_bfloat16(complex_values: Any) -> None:
    schema = Schema([Column("x", "bfloat16", allow_nan=True)])
    with pytest.raises(DataError, match="column x must be convertible to bfloat16, got 'complex64'"):
        check_trajectory("t", schema, {"x": complex_values})


def test_between_one_column_of_t_rows_and_one_of_t_plus_1_the_latter_is_named() -> None:
    schema = Schema([Column("state", "float32", (), "observation", "T+1"), Column("action", "float32")])
    with pytest.raises(DataError, match=r"column state must have 4 rows \(T\+1\), got 3"):
        check_trajectory("t", schema, {"state": np.zeros(3), "action": np.zeros(3)})


# ---- data sets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_data_set_is_all_committed(tmp_path: Any, in_memory: bool) -> None:
    lengths = [3, 1, 7]
    dataset = Dataset.open(write_dataset(tmp_path / "d", lengths))
    spec = TableSpec("main", SCHEMA, 3, dataset.num_rows, dataset, in_memory, True, 1)
    table = Table.create(spec, [], {}, RunIdentity("n"), load_backend("cpu"), 5.0)
    assert (table.num_trajectories, table.num_steps) == (3, 11)
    assert table.slots_of(np.array([2, 0, 3, -1])).tolist() == [2, 0, -1, -1]
    for number, steps in enumerate(lengths):
        ends = {"terminated": number % 2 == 0, "truncated": number % 2 == 1}
        assert same(read(table, number), trajectory(number, steps, **ends))
    assert table.control[Control.NEXT_ID] == 3
    with pytest.raises(
        StoreError, match="must have a capacity to be added to or changed; it holds a read-only data set"
    ):
        table_access.add(table, [], trajectory(3, 2), None)
    with pytest.raises(StoreError, match="must have a capacity to be added to or changed"):
        table_access.remove(table, [0])
    table.close()


# ---- attaching -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "must belong to run 0+, got '9+'"),
        (lambda scene: scene.layout.total_bytes + 4096, r"must have \d+ bytes, got \d+; it is truncated"),
        (lambda scene: scene.layout.total_bytes - 1, r"must have \d+ bytes, got \d+; it is truncated"),
        (lambda scene: 100, "must be a gear store of at least 4096 bytes"),
    ],
)
def test_attach_refuses(num_bytes: Callable[[StoreScene], int] | None, text: str) -> None:
    """Damaged headers: test_memory_layout."""
    scene = StoreScene(lengths=[3])
    if num_bytes is None:
        np.ndarray((), HEADER, buffer=scene.table.memory.buffer)["run_id"] = b"9" * 32
    else:
        os.truncate(SHM / scene.name, num_bytes(scene))
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StoreError, match=text) as caught:
        scene.attach(1)
    assert scene.name in str(caught.value)
    del caught
    assert (SHM / scene.name).exists()
    assert len(os.listdir("/proc/self/fd")) <= files
    scene.close()


def test_attach_refuses_another_layout() -> None:
    scene = StoreScene()
    other = Layout.of([], {"table": "main"})
    with pytest.raises(StoreError, match="must have the layout that this process expects"):
        scene.attach(1, expected=other)
    scene.close()


# ---- death ---------------------------------------------------------------------------------------


def test_a_dead_writers_rows_come_back(scene: StoreScene) -> None:
    def write() -> None:
        table, _ = scene.attach(1)
        with table.lock:
            reserve(table, 15)
        signal.pause()

    child = in_child(write)
    wait_until(lambda: (scene.table.slots[:, Slot.STATE] == SlotState.RESERVED).any(), "reserving")
    with pytest.raises(StoreFullError):
        scene.add(15)
    kill(child)
    assert scene.add(15) == 0  # a reservation of the dead took no id
    assert scene.table.num_steps == 15


def test_counters_are_rebuilt_after_a_death_inside_the_lock(scene: StoreScene) -> None:
    scene.add(4)

    def die() -> None:
        table, _ = scene.attach(1)
        table.lock.__enter__()
        slot = reserve(table, 3)
        table.write(slot, trajectory(1, 3))
        table.slots[slot, 2] = 1  # its id, without the counter
        table.slots[slot, Slot.STATE] = SlotState.COMMITTED
        os.kill(os.getpid(), signal.SIGKILL)

    assert exit_status(in_child(die)) == -signal.SIGKILL
    with scene.table.lock:
        assert (scene.table.num_trajectories, scene.table.num_steps) == (2, 7)
        assert scene.table.control[Control.NEXT_ID] == 2
    assert same(read(scene.table, 1), trajectory(1, 3))
    assert read(scene.table, 1)["code"][0] == STEP


# ---- sets of slots, and what a first add imports -----------------------------------------------------


NUMBERS = st.lists(st.integers(-5, 5), max_size=20)
ADD_UNTIL_FULL = """
import sys
import numpy as np
from deepspeed_gear import Column, Replay, Schema, TrajectoryWriter
section = {
    "tables": {"main": {"capacity_steps": 100, "max_length": 20, "writers": 1}},
    "sampler": {"kind": "uniform", "unit": "step"},
    "fields": {"value": {}},
    "batch_size": 4,
    "shared_memory": {"prefix": sys.argv[1]},
}
schemas = {"main": Schema([Column("value", "int64")])}
for remove in ("fifo", "uniform"):
    section["tables"]["main"]["remove"] = remove
    with Replay(section, schemas=schemas), TrajectoryWriter.attach(section) as writer:
        for _ in range(20):
            writer.add({"value": np.arange(20)})
print("numpy.ma" in sys.modules)
"""


@given(NUMBERS, NUMBERS)
def test_sets_are_those_of_numpy(values: list[int], few: list[int]) -> None:
    array = np.array(values, np.int64)
    assert np.array_equal(distinct(array), np.unique(array))
    assert np.array_equal(is_among(array, few), np.isin(array, few))


def test_a_full_store_takes_trajectories_without_slow_imports() -> None:
    command = [sys.executable, "-c", ADD_UNTIL_FULL, prefix()]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["False"]
