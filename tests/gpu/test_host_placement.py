"""Batches from the memory of a node to a GPU: every way gives the CPU's, waits for nothing and
tears nothing.

The same code runs on the CPU in tests/unit/replay/test_device_transfer.py; here is what only a GPU
can show.
"""

import mmap
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from device_steps import AT_ONCE_S, no_garbage
from gear_support import config_of
from replay_support import parts_of, streams_of

from deepspeed_gear import Batch, Column, Replay, Schema
from deepspeed_gear.batching.transfer.cuda_streams import CudaStream
from deepspeed_gear.batching.transfer.device_gather import DIRECT, STAGED, WAYS
from deepspeed_gear.errors import ConfigError, StoreError
from deepspeed_gear.store.cuda_registration import (
    OVER_BUDGET,
    CudaRuntime,
    Registration,
    as_device_tensor,
    memory_span,
    plan,
    span_of,
)
from deepspeed_gear.store.shared_memory import SharedMemory

# The first test builds both ops, where that has not been done before.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
SCHEMA = Schema(  # Hopper's
    [
        Column("observation", "float32", (11,), "observation", "T+1"),
        Column("action", "float32", (3,), "action"),
        Column("reward", "float32", (), "reward"),
        Column("terminated", "bool", (), "terminated"),
        Column("truncated", "bool", (), "truncated"),
    ]
)
WINDOW = {"offset": -19, "length": 20}
FIELDS = {
    "observation": {**WINDOW, "as": "engine", "scale": 0.5},
    "action": WINDOW,
    "frames": {"column": "observation", "offset": -3, "length": 4, "pad": "edge"},
    "return_to_go": {**WINDOW, "scale": 0.001},
    "timestep": WINDOW,
    "next_observation": {"column": "observation", "offset": "n_step"},
}
PRIORITIZED = {"kind": "prioritized", "alpha": 0.6, "beta": 0.4, "unit": "step"}
HERE = torch.device("cuda", 0)
SLEEP = 2_000_000_000  # cycles: about a second
BATCHES = 12


def trajectory(steps: int) -> dict[str, Any]:
    words = np.random.default_rng(steps)
    ends = np.arange(steps) == steps - 1
    return {
        "observation": words.random((steps + 1, 11), dtype=np.float32),
        "action": words.random((steps, 3), dtype=np.float32),
        "reward": words.random(steps, dtype=np.float32),
        "terminated": ends & (steps % 2 == 0),
        "truncated": ends & (steps % 2 == 1),
    }


def replay_of(device: str, gather: dict[str, Any] | None = None, **options: Any) -> Replay:
    section = {
        "fields": FIELDS,
        "n_step": {"n": 3, "gamma": 0.9},
        "batch_size": 64,
        "sampler": PRIORITIZED,
    }
    section |= {
        "tables": {"main": {"capacity_steps": 100_000}},
        "transfer": gather or {},
        **options,
    }
    replay = Replay(
        config_of(**section), schemas={"main": SCHEMA}, device=device, engine_dtype=torch.bfloat16
    )
    for steps in (1, 7, 500, 33, 1000, 20):
        replay.add(trajectory(steps))
    return replay


def assert_same(got: Batch, expected: Batch) -> None:
    assert list(got) == list(expected)
    for name in expected:
        assert got[name].is_cuda, name
        assert torch.equal(got[name].cpu(), expected[name]), name
        if name in expected.mask:
            assert torch.equal(got.mask[name].cpu(), expected.mask[name]), name
    for name in (
        "trajectory_id",
        "anchor",
        "sample_number",
        "is_weight",
        "epoch",
        "valid",
        "probability",
    ):
        assert torch.equal(getattr(got, name).cpu(), getattr(expected, name)), name
    assert not got.host_resolutions.is_cuda
    assert torch.equal(got.host_resolutions, expected.host_resolutions)


def page_bytes_of(column: str) -> int:
    """The whole pages that a column lies in; a table begins with a page on every device."""
    with replay_of("cpu") as replay:
        span = span_of(streams_of(replay)["train"].table.gather_source(column))
    return (-(-span.end // mmap.PAGESIZE) - span.begin // mmap.PAGESIZE) * mmap.PAGESIZE


@pytest.fixture(scope="module")
def expected() -> list[Batch]:
    with replay_of("cpu") as replay:
        return [replay.sample().clone() for _ in range(BATCHES)]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("way", ["auto", *WAYS])
def test_every_way_gives_the_batches_of_the_cpu(
    expected: list[Batch], way: str, prefetch: int
) -> None:
    with replay_of("cuda", {"way": way}, prefetch=prefetch) as replay:
        told = replay.statistics()["transfer"]
        assert told["way"] == (DIRECT if way == "auto" else way)
        for batch in expected:
            assert_same(replay.sample(), batch)
        assert replay.take_metrics()["bytes"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_registered_is_staged(expected: list[Batch], way: str) -> None:
    """The column of observations alone fits."""
    most = page_bytes_of("observation")
    with replay_of("cuda", {"way": way, "register_bytes": most}) as replay:
        told = replay.statistics()["transfer"]
        assert told["registered_bytes"] == (0 if way == STAGED else most)
        if way != STAGED:
            assert set(told["not_registered"]["main"].values()) == {OVER_BUDGET}
            assert set(told["not_registered"]["main"]) > {"action", "terminated"}
            assert "observation" not in told["not_registered"]["main"]
        for batch in expected:
            assert_same(replay.sample(), batch)


def test_nothing_registered_means_staged(expected: list[Batch]) -> None:
    with replay_of("cuda", {"register_bytes": 0}) as replay:
        assert replay.statistics()["transfer"]["way"] == STAGED
        assert_same(replay.sample(), expected[0])
    with pytest.raises(ConfigError, match=r"gear\.transfer\.way must be possible here"):
        replay_of("cuda", {"way": DIRECT, "register_bytes": 0})


@pytest.mark.parametrize("way", WAYS)
def test_sampling_waits_for_nothing(expected: list[Batch], way: str) -> None:
    """Behind a kernel that sleeps, sampling returns at once, and its result comes in the stream's
    order.
    """
    with replay_of("cuda", {"way": way}) as replay:
        for batch in expected[:6]:
            assert_same(replay.sample(), batch)
        torch.cuda._sleep(SLEEP // 20)
        for _ in range(2):  # make as many blocks of pinned memory, which waits for the device
            replay.sample()
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP)
        taken = []
        for _ in range(2):
            begin = time.perf_counter()
            batch = replay.sample()
            taken.append(time.perf_counter() - begin)
            copies = [batch[name].clone() for name in batch]
        behind = torch.cuda.Event()
        behind.record()
        assert not behind.query()
        assert max(taken) < AT_ONCE_S
        torch.cuda.synchronize()
        for copy, name in zip(copies, expected[9], strict=True):
            assert torch.equal(copy.cpu(), expected[9][name])


@pytest.mark.parametrize("way", WAYS)
def test_sample_and_update_return_within_a_millisecond(way: str) -> None:
    """Behind a kernel that sleeps on the training stream, with batches prepared that need nothing
    of it.
    """
    with replay_of("cuda", {"way": way}, prefetch=2) as replay:
        for _ in range(6):
            batch = replay.sample()
            replay.update_priorities(batch, batch["return_n"].abs())
        torch.cuda.synchronize()
        time.sleep(0.5)  # batches are prepared
        taken: dict[str, list[float]] = {"sample": [], "update": []}
        with no_garbage():
            torch.cuda._sleep(SLEEP)
            for _ in range(2):
                begin = time.perf_counter()
                batch = replay.sample()
                taken["sample"].append(time.perf_counter() - begin)
                td = batch["return_n"].abs()
                begin = time.perf_counter()
                replay.update_priorities(batch, td)
                taken["update"].append(time.perf_counter() - begin)
        behind = torch.cuda.Event()
        behind.record()
        assert not behind.query()
        torch.cuda.synchronize()
        assert max(map(min, taken.values())) < 1e-3, taken
        assert max(map(max, taken.values())) < AT_ONCE_S, "and none waits for the kernel"


def test_host_memory_is_not_captured(expected: list[Batch]) -> None:
    """A graph would read the same batch again and again; the refusal changes nothing."""
    with replay_of("cuda") as replay:
        batch = replay.sample()
        for name, action in {
            "sample": replay.sample,
            "update_priorities": lambda: replay.update_priorities(batch, batch.is_weight),
        }.items():
            refused = pytest.raises(StoreError, match=f"{name} cannot be captured")
            with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
                action()
        assert_same(replay.sample(), expected[1])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_priorities_and_transforms_of_a_gpu_give_the_batches_of_the_cpu(prefetch: int) -> None:
    def transform(batch: Batch, words: torch.Tensor) -> Batch:
        batch["action"] = (
            batch["action"] + words.remainder(7)[:, None, None]
        )  # they are where the batch is
        return batch

    found = []
    for device in ("cpu", "cuda"):
        with replay_of(device, prefetch=prefetch) as replay:
            replay.transform = transform
            found.append([])
            for _ in range(BATCHES):
                batch = replay.sample()
                found[-1].append(batch.clone())
                replay.update_priorities(batch, batch["return_n"].abs())
    for got, batch in zip(found[1], found[0], strict=True):
        assert_same(got, batch)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_ring_entry_is_not_written_before_its_user_has_read_it(
    expected: list[Batch], way: str, prefetch: int
) -> None:
    """The user's stream is late: its copies of early batches run when later ones were asked for."""
    with replay_of("cuda", {"way": way}, prefetch=prefetch) as replay:
        copies = []
        for _ in expected:
            batch = replay.sample()
            torch.cuda._sleep(SLEEP // 20)
            copies.append({name: batch[name].clone() for name in batch})
        torch.cuda.synchronize()
    for copy, batch in zip(copies, expected, strict=True):
        assert all(torch.equal(copy[name].cpu(), batch[name]) for name in batch)


def test_a_cut_is_kept_until_the_lane_has_read_it() -> None:
    with replay_of("cuda", {"way": DIRECT}) as replay:
        placing = parts_of(replay).assembler.transfer
        assert placing is not None
        consumed = streams_of(replay)["train"].state.consumed
        replay.sample()
        with placing.lane.running():
            torch.cuda._sleep(SLEEP // 20)
        # makes the blocks of pinned memory that a late lane keeps, which waits for it
        replay.sample()
        torch.cuda.synchronize()
        replay.sample()
        assert int(consumed[0]) == 2
        torch.cuda.synchronize()
        with placing.lane.running():
            torch.cuda._sleep(SLEEP)
        replay.sample()
        assert int(consumed[0]) == 3
        parts_of(replay).releases.settle()
        assert int(consumed[0]) == 3
        torch.cuda.synchronize()
        parts_of(replay).releases.settle()
        assert int(consumed[0]) == 4


# ---- parts of it ---------------------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.create(1 << 20)
    yield made
    made.close()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64]
)
def test_registered_memory_is_a_tensor_of_the_device(
    memory: SharedMemory, dtype: torch.dtype
) -> None:
    data = torch.from_numpy(np.frombuffer(memory.buffer, np.uint8))
    data.copy_(torch.randint(0, 2, data.shape, dtype=torch.uint8))
    column = data[128 : 128 + 8000].view(dtype).view(-1, 4)
    wanted = plan({"column": span_of(column)}, memory_span(memory))
    found = Registration(memory, wanted, CudaRuntime(HERE))
    assert found.left_out == {}
    there = as_device_tensor(column, HERE)
    assert there.is_cuda
    assert there.dtype == dtype
    assert there.data_ptr() == column.data_ptr()
    assert torch.equal(there.cpu(), column)
    data[128] ^= 1  # no copy
    assert torch.equal(there.cpu().view(torch.uint8), column.view(torch.uint8))
    torch.cuda.synchronize()
    found.close()
    del data, column, there


def test_a_failed_registration_leaves_no_error_behind(memory: SharedMemory) -> None:
    """No page is registered twice."""
    wanted = plan({"all": memory_span(memory)}, memory_span(memory))
    first = Registration(memory, wanted, CudaRuntime(HERE))
    second = Registration(memory, wanted, CudaRuntime(HERE))
    assert first.left_out == {}
    assert "failed" in second.left_out["all"]
    assert torch.ones(3, device="cuda").sum().item() == 3
    second.close()
    first.close()
    third = Registration(memory, wanted, CudaRuntime(HERE))
    assert third.left_out == {}
    third.close()


def test_small_tensors_are_brought_without_a_wait() -> None:
    lane = CudaStream(torch.device("cuda"))
    small = [torch.arange(5), torch.ones(3, dtype=torch.bool)]
    with lane.running():
        lane.bring(small)  # makes the pinned block, which waits for the device
    torch.cuda.synchronize()
    with lane.running():
        torch.cuda._sleep(SLEEP // 4)
        begin = time.perf_counter()
        there = lane.bring(small)
        assert time.perf_counter() - begin < 1e-3
    event = lane.record()
    assert not event.query()
    lane.hand_over(event, there)
    assert [tensor.tolist() for tensor in there] == [[0, 1, 2, 3, 4], [True] * 3]
