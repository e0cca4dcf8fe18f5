"""A table: the life of a slot, what may be added, who may attach, what death leaves behind."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gear_support import SHM, prefix, shared_files, trajectory
from store_support import StoreScene, store_trajectory

from deepspeed_gear.data.trajectory_checks import check_trajectory
from deepspeed_gear.errors import ConfigError, DataError, StoreError, StoreFullError
from deepspeed_gear.schema import DTYPES, Column, Schema
from deepspeed_gear.store.memory_layout import HEADER, Layout


@pytest.fixture
def scene(scenes: Any) -> Iterator[StoreScene]:
    yield (made := scenes(num_slots=5, num_rows=20))
    made.close()
    assert shared_files(prefix()) == []


# ---- the life of a slot; rows and returns to go: tests/property/test_compaction.py ---------------


@pytest.mark.parametrize(
    ("lengths", "fits"),
    [
        ([19], True),
        ([20], False),
        ([9, 9], True),
        ([9, 10], False),
        ([3] * 5, True),
        ([2] * 6, False),
    ],
)
def test_capacity(scene: StoreScene, lengths: list[int], fits: bool) -> None:
    """Five slots and 20 rows; a trajectory of T steps takes T + 1 rows."""
    for steps in lengths[:-1]:
        scene.add(steps)
    if fits:
        scene.add(lengths[-1])
        assert scene.table.num_steps == sum(lengths)
        return
    text = (
        "must have a free slot of 5"
        if len(lengths) == 6
        else r"must have \d+ free rows in a run, got"
    )
    before = scene.table.slots.copy()
    with pytest.raises(StoreFullError, match=text):
        scene.add(lengths[-1])
    assert (scene.table.slots == before).all()
    assert scene.table.num_steps == sum(lengths[:-1])


@pytest.mark.parametrize(
    ("method", "error"), [("write", MemoryError), ("commit", KeyboardInterrupt)]
)
def test_an_addition_that_fails_gives_its_rows_back(
    method: str, error: type[BaseException], scene: StoreScene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(scene.table, method, fail)
        with pytest.raises(error):
            scene.add(19)
    scene.add(19)


# ---- what may be added ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"observation": np.zeros((4, 3), np.float32)},
            r"column observation must have 5 rows \(T\+1\), got 4; column action .* the "
            r"observation after",
        ),
        (
            {"reward": torch.zeros(4, dtype=torch.complex64)},
            "column reward must be convertible to float32",
        ),
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
    ],
)
def test_wrong_trajectories_are_refused(
    scene: StoreScene, change: dict[str, Any], text: str
) -> None:
    """Names, shapes and lengths: tests/unit/data/test_dataset.py; values:
    tests/property/test_trajectory_checks.py.
    """
    before = scene.table.slots.copy()
    with pytest.raises(DataError, match=text):
        store_trajectory(scene.table, [], {**trajectory(0, 4), **change}, None)
    assert (scene.table.slots == before).all()


def test_trajectories_that_are_too_short_or_too_long(scene: StoreScene) -> None:
    with pytest.raises(DataError, match="must have at least one step, got 0"):
        scene.add(0)
    with pytest.raises(DataError, match="must have at most max_length = 3 steps, got 4"):
        store_trajectory(scene.table, [], trajectory(0, 4), 3)
    store_trajectory(scene.table, [], trajectory(0, 3), 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_round_trip(dtype: str) -> None:
    """Other values: tests/property/test_trajectory_checks.py."""
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


@pytest.mark.parametrize("value", [1e300, 3.4e38, 1j])
@pytest.mark.parametrize("make", [np.array, lambda x: torch.from_numpy(np.array(x)), list])
def test_what_is_no_bfloat16_is_refused(make: Any, value: complex) -> None:
    text = "(hold values that bfloat16 can hold, got|be convertible to bfloat16, got 'complex128')"
    with pytest.raises(DataError, match=f"column x must {text}"):
        check_trajectory(
            "t", Schema([Column("x", "bfloat16", allow_nan=True)]), {"x": make([1.0, value])}
        )


# ---- attaching -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "must belong to run 0+, got '9+'"),
        (
            lambda scene: scene.layout.total_bytes + 4096,
            r"must have \d+ bytes, got \d+; it is truncated",
        ),
        (
            lambda scene: scene.layout.total_bytes - 1,
            r"must have \d+ bytes, got \d+; it is truncated",
        ),
        (lambda scene: 100, "must be a gear store of at least 4096 bytes"),
    ],
)
def test_attach_refuses(
    scenes: Any, num_bytes: Callable[[StoreScene], int] | None, text: str
) -> None:
    """Damaged headers: test_memory_layout."""
    scene = scenes(lengths=[3])
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


def test_attach_refuses_another_layout(scene: StoreScene) -> None:
    with pytest.raises(ConfigError, match="must have the layout that this process expects"):
        scene.attach(1, expected=Layout.of([], {"table": "main"}))


# ---- what a first add imports --------------------------------------------------------------------


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


def test_a_full_store_takes_trajectories_without_slow_imports() -> None:
    command = [sys.executable, "-c", ADD_UNTIL_FULL, prefix()]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]
