"""A Replay whose batches go to a device: the same by every way, from selections kept until they are
read.

The device is the CPU, where a way that is named runs the code of a GPU on a lane that is done at
once, or, as a busy stream is, only when a test says so.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_stub import DEVICE, DeviceStub, DeviceTensor, StubStream
from gear_support import SCHEMA, config_of, trajectory, write_dataset
from replay_support import same, streams_of
from torch import Tensor

from deepspeed_gear import Batch, Column, Replay, Schema
from deepspeed_gear.batching.transfer.cuda_streams import Event, HostEvent, HostStream
from deepspeed_gear.batching.transfer.device_gather import STAGED, WAYS
from deepspeed_gear.config import parse
from deepspeed_gear.config.resume_options import resume_digest, shared_options
from deepspeed_gear.errors import ConfigError, StoreFullError
from deepspeed_gear.ops import load_backend
from deepspeed_gear.replay import async_priority_updates, batch_assembler, device_transfer

WINDOW = {"offset": -2, "length": 5}
FIELDS = {
    "observation": {**WINDOW, "pad": "edge", "scale": 0.5},
    "action": WINDOW,
    "code": {**WINDOW, "align": "left", "pad": -1},
    "next": {"column": "observation", "offset": "n_step", "length": 3},
    "reward": {},
    "task": {},
    "timestep": WINDOW,
    "return_to_go": WINDOW,
}
GOAL = {"column": "desired", "hindsight": "achieved"}
GOALS = Schema([*SCHEMA, Column("desired", "float32", (3,)), Column("achieved", "float32", (3,))])
STEPS = {"kind": "uniform", "unit": "step"}


class LateLane(HostStream):
    """A lane whose work is done when `finish` says so, inside of a `with` statement."""

    def __init__(self) -> None:
        super().__init__()
        self.is_late = False
        self._waiting: list[HostEvent] = []

    def record(self) -> Event:
        if not self.is_late:
            return super().record()
        self._waiting.append(HostEvent())
        return self._waiting[-1]

    def consumer(self) -> tuple[Any, Event]:
        return None, HostStream().record()

    def hand_over(self, event: Event, tensors: Any) -> None:
        """Give a batch away whose work is still under way, as a stream would."""

    def finish(self) -> None:
        while self._waiting:
            self._waiting.pop(0).finish()

    def end(self) -> None:
        self.is_late = False
        self.finish()

    def __enter__(self) -> None:
        self.is_late = True

    def __exit__(self, *_: object) -> None:
        self.end()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateLane]:
    lane = LateLane()
    monkeypatch.setattr(device_transfer, "lane_of", lambda device: lane)
    yield lane
    lane.end()


def row(number: int, steps: int, **flags: bool) -> dict[str, Any]:
    goals = np.arange(steps)[:, None] + np.array([0.0, 100.0 * number, 1000.0])
    return {**trajectory(number, steps, **flags), "desired": -goals, "achieved": goals}


def online(way: str, device: Any = "cpu", **options: Any) -> Replay:
    given = {
        "fields": FIELDS,
        "batch_size": 8,
        "n_step": {"n": 1, "gamma": 1.0},
        "transfer": {"way": way},
    }
    if "hindsight" in options:
        del given["n_step"]
    section = config_of(**{**given, **options})
    replay = Replay(section, schemas=dict.fromkeys(section["tables"], GOALS), device=device)
    for number, steps in enumerate([1, 4, 9, 20]):
        for table in replay.tables:
            replay.add(row(number, steps, terminated=number % 2 == 0), table)
    return replay


def assert_same(got: Batch, expected: Batch) -> None:
    assert got == expected
    assert same(got, expected)
    assert torch.equal(got.goal_step, expected.goal_step)


PRIORITIZED = {"kind": "prioritized", "alpha": 0.6, "beta": 0.4, "unit": "step"}
ROOM = {"capacity_steps": 500, "capacity_trajectories": 20}
MIXTURE = {
    "tables": {"a": ROOM, "b": ROOM},
    "sampler": {"kind": "mixture", "shares": {"a": 0.25, "b": 0.75}, "of": STEPS},
}


def noisy(batch: Batch, keys: Tensor) -> Batch:
    batch["action"] = batch["action"] + (keys % 7)[:, None, None]
    return batch.map(lambda tensor: tensor)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"n_step": {"n": 3, "gamma": 0.9}},
        {"n_step": {"n": 2, "gamma": 0.5}, "prefetch": 2, "gradient_accumulation_steps": 2},
        {"n_step": {"n": 1, "gamma": 1.0}, "sampler": PRIORITIZED},
        {"n_step": {"n": 3, "gamma": 0.9}, "prefetch": 1, **MIXTURE},
        {"hindsight": {}, "fields": {"goal": GOAL, "action": WINDOW}},
        {"transform": noisy, "prefetch": 1},
    ],
    ids=["plain", "prefetch", "prioritized", "mixture", "hindsight", "transform"],
)
def test_every_way_gives_the_same_batches(way: str, options: dict[str, Any]) -> None:
    transform = options.get("transform")
    options = {name: value for name, value in options.items() if name != "transform"}
    with online(way, **options) as replay, online("auto", **options) as plain:
        replay.transform = plain.transform = transform
        assert "transfer" in replay.statistics()
        assert "transfer" not in plain.statistics()
        for _ in range(9):
            assert_same(replay.sample(), plain.sample())


@pytest.mark.parametrize("way", WAYS)
def test_passes_over_a_data_set(way: str, tmp_path: Path) -> None:
    """Also a mapped file, whose columns the CPU reaches."""
    path = write_dataset(tmp_path / "data", [5, 9, 1, 7, 30, 2, 8], split={"eval": 0.4})
    section = config_of(path, fields={"action": WINDOW, "reward": {}}, batch_size=4, sampler=STEPS)
    with Replay({**section, "transfer": {"way": way}}) as replay, Replay(section) as plain:
        assert_same(replay.sample(), plain.sample())
        passed = [batch.clone() for batch in replay.iterator("eval")]
        for got, expected in zip(passed, plain.iterator("eval"), strict=True):
            assert_same(got, expected)
        assert len(passed) > 1
        assert_same(replay.sample(), plain.sample())


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_batches_that_the_user_may_hold_are_not_touched(way: str, prefetch: int) -> None:
    with online(way, prefetch=prefetch) as replay:
        held = [(batch := replay.sample(), batch.clone())]
        for _ in range(40):
            batch = replay.sample()
            time.sleep(0.002)  # the thread prepares as many as it may
            held.append((batch, batch.clone()))
            for kept, copy in held[-2:]:
                assert_same(kept, copy)


def test_memory_that_the_device_reads_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device where no way is named; else batches are staged, for the reason
    that is shown.
    """
    monkeypatch.setattr(
        "deepspeed_gear.replay.batch_assembler.is_wanted", lambda config, device: True
    )
    with online("auto") as replay:
        transfer = replay.statistics()["transfer"]
        replay.sample()
    assert transfer == {"way": "direct", "refused": {}, "registered_bytes": 0, "not_registered": {}}
    monkeypatch.setattr(device_transfer.DeviceTransfer, "_is_reached", lambda self, name: False)
    with online("auto") as replay:
        transfer = replay.statistics()["transfer"]
        replay.sample()
    assert transfer["way"] == "staged"
    assert transfer["refused"] == {"direct": "the device reads no column in place"}


def test_a_way_that_is_impossible_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_transfer.DeviceTransfer, "_is_reached", lambda self, name: False)
    reason = "the device reads no column in place; use auto or staged"
    with pytest.raises(ConfigError, match=rf"way must be possible here, got 'direct'; {reason}"):
        online("direct")


@pytest.mark.parametrize(
    "options", [{"way": "copies"}, {"register_bytes": -1}, {"calibrate": True}, {"speed": 1}]
)
def test_wrong_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"gear\.transfer.*{next(iter(options))}"):
        parse(config_of(transfer=options))
    # The way changes no batch: a checkpoint fits, and ranks may differ.
    one, other = (parse({**config_of(), "transfer": {"way": way}}) for way in ("direct", "auto"))
    assert shared_options(one) == shared_options(other)
    assert resume_digest(one) == resume_digest(other)


# ---- selections that a device still reads --------------------------------------------------------


def consumed(replay: Replay) -> int:
    return int(streams_of(replay)["train"].state.consumed[0])


@pytest.mark.parametrize("way", WAYS)
def test_a_selection_is_kept_until_its_event(late: LateLane, way: str) -> None:
    """What is staged is read when the call returns."""
    with online(way) as replay, late:
        replay.sample()
        replay.sample()
        assert consumed(replay) == (2 if way == STAGED else 0)
        late.finish()
        replay.sample()
        assert consumed(replay) == (3 if way == STAGED else 2)


def blocks(action: Callable[[], Any], release: Callable[[], None]) -> None:
    """Check that an action waits until the device is released."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(action)
        assert not wait([done], 0.2).done
        release()
        done.result(20)


def test_sampling_waits_for_the_device_only_when_the_ring_of_cuts_is_full(late: LateLane) -> None:
    with online("direct") as replay, late:
        depth = streams_of(replay)["train"].spec.depth
        for _ in range(depth):
            replay.sample()
        assert consumed(replay) == 0
        blocks(replay.sample, late.finish)
        assert consumed(replay) == depth


def test_adding_waits_until_the_device_has_read_what_goes(late: LateLane) -> None:
    table = {"main": {"capacity_steps": 40, "capacity_trajectories": 4, "remove": "fifo"}}
    with online("direct", tables=table, batch_size=64) as replay, late:
        assert set(replay.sample().trajectory_id.tolist()) == {0, 1, 2, 3}
        blocks(lambda: replay.add(row(9, 9)), late.finish)
        assert 4 in replay.sample().trajectory_id.tolist()


def test_a_full_table_waits_for_what_the_device_still_reads(late: LateLane) -> None:
    """No process goes by himself; what was removed is free once it was read."""
    table = {"main": {"capacity_steps": 34, "capacity_trajectories": 4}}
    with online("direct", tables=table, batch_size=64) as replay, late:
        assert 3 in replay.sample().trajectory_id
        replay.remove([3])
        blocks(lambda: replay.add(row(9, 20)), late.end)
        assert len(replay) == 4
        with pytest.raises(StoreFullError):
            replay.add(row(9, 20))


def test_closing_waits_for_the_device(late: LateLane) -> None:
    """Behind it the memory is not there any more."""
    replay = online("direct")
    read = streams_of(replay)["train"].state.consumed

    def release() -> None:
        assert int(read[0]) == 0
        late.end()

    with late:
        replay.sample()
        blocks(replay.close, release)


def test_a_cut_from_before_a_load_is_not_taken_for_a_later_one(late: LateLane) -> None:
    with online("direct") as replay:
        start = replay.state_dict()
        first = replay.sample().clone()
        replay.sample()
        with late:
            replay.sample()
            assert consumed(replay) == 2
            blocks(lambda: replay.load_state_dict(start), late.end)
        assert consumed(replay) == 0
        assert_same(replay.sample(), first)


@pytest.mark.parametrize("way", WAYS)
def test_a_field_may_change_in_place_while_another_is_kept_for_backward(way: str) -> None:
    with online(way, n_step={"n": 2, "gamma": 0.9}) as replay:
        batch = replay.sample()
        other = replay.sample()
        factor = torch.ones(3, requires_grad=True)
        loss = (batch["observation"] * factor).sum()
        batch["action"].mul_(2)
        batch.valid.logical_not_()
        loss.backward()
        loss = (other["observation"] * factor).sum()
        other["observation"].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def fetched(values: Tensor) -> tuple[Tensor, Event]:
    host = torch.empty(len(values))
    host.copy_(values, non_blocking=True)
    return host, HostStream().record()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceStub]:
    # The stub needs no registration of memory.
    runtime = SimpleNamespace(
        reads_host_addresses=lambda: True,
        register=lambda begin, size: 0,
        unregister=lambda begin: 0,
    )
    blocks = SimpleNamespace(fetch=fetched, give_back=lambda host: None)
    monkeypatch.setattr(batch_assembler, "is_wanted", lambda config, device: True)
    made = DeviceStub()
    monkeypatch.setattr(device_transfer, "lane_of", lambda device: StubStream(made))
    monkeypatch.setattr(device_transfer, "CudaRuntime", lambda device: runtime)
    monkeypatch.setattr(
        device_transfer, "as_device_tensor", lambda column, device: DeviceTensor(column)
    )
    monkeypatch.setattr(
        device_transfer.DeviceTransfer, "_kernels", lambda self, config: load_backend("cpu")
    )
    monkeypatch.setattr(async_priority_updates, "PinnedBlocks", lambda: blocks)
    with made:
        yield made


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("steps", [False, True])
def test_neither_sampling_nor_a_report_waits_for_the_device(
    stub: DeviceStub, way: str, steps: bool
) -> None:
    options = {"sampler": PRIORITIZED, "transfer": {"way": way}, "device": DEVICE}
    fields = {**FIELDS, "reward": WINDOW}
    with online(way, fields=fields, n_step={"n": 3, "gamma": 0.9}, **options) as replay:
        assert replay.statistics()["transfer"]["way"] == way
        for turn in range(12):
            stub.waits.clear()
            batch = replay.sample()
            assert all(isinstance(batch[name], DeviceTensor) for name in batch)
            values = batch["reward"] if steps else batch["reward"].sum(1)
            mask = batch.mask["reward"] if steps else None
            replay.update_priorities(batch, values.abs() + 0.5, mask)
            assert stub.waits == [], turn
        assert stub.crossings == []  # between the training stream and the one that gathers
        # Samples are sorted by address on the device, where kernels read rows in their order.
        assert stub.elements.get("sort", 0) == (0 if way == STAGED else 8)
