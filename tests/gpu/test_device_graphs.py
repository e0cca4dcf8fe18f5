"""DeviceReplay on a GPU: the batches of the host, whole steps in CUDA graphs, and no wait for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_gear import DeviceReplay

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
COLUMNS = {
    "observation": {"dtype": "float32", "shape": [11], "role": "observation", "rows": "T+1"},
    "action": {"dtype": "float32", "shape": [3], "role": "action"},
    "reward": {"dtype": "float32", "role": "reward"},
    "terminated": {"dtype": "bool", "role": "terminated"},
    "frame": {"dtype": "uint8", "shape": [7, 9]},
}
FIELDS = {
    "observation": {"offset": -2, "length": 5},
    "following": {"column": "observation", "offset": "n_step"},
    "action": {},
    "reward": {},
    "frame": {"scale": 0.00392156862745098, "as": "float16"},
}
SAMPLERS = {
    "uniform": {"kind": "uniform", "unit": "step"},
    "prioritized": {"kind": "prioritized", "unit": "step", "beta": {"linear": [0.4, 1.0, 20]}},
    "table": {"kind": "prioritized", "normalize": "table", "stratified": True},
}
ENVS, STEPS, BATCH = 8, 4, 64


def section(sampler: str) -> dict[str, Any]:
    table = {"capacity_steps": 4000, "max_length": STEPS, "remove": "fifo", "placement": "device"}
    table["schema"] = {"columns": COLUMNS}
    options = {"sampler": SAMPLERS[sampler], "fields": FIELDS, "batch_size": BATCH, "seed": 7}
    return {"tables": {"main": table}, "n_step": {"n": 3, "gamma": 0.9}, **options}


def columns(turn: int, device: str) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(turn)
    made = {
        "observation": torch.randn(ENVS, STEPS + 1, 11, generator=random),
        "action": torch.randn(ENVS, STEPS, 3, generator=random),
        "reward": torch.randn(ENVS, STEPS, generator=random),
        "terminated": torch.rand(ENVS, STEPS, generator=random) < 0.1,
        "frame": torch.randint(0, 256, (ENVS, STEPS, 7, 9), generator=random, dtype=torch.uint8),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def facts(batch: Any) -> list[Tensor]:
    fields = [*(batch[name] for name in batch), *(batch.mask[name] for name in batch.mask)]
    return [t.cpu().clone() for t in (batch.id, batch.anchor, batch.number, batch.weight, *fields)]


def step(replay: DeviceReplay, batch: Any, added: dict[str, Tensor]) -> None:
    """One whole step: everything that a graph holds. The priorities are exact on any device."""
    replay.add_(added)
    replay.sample_(batch)
    if replay.config.item_sampler.kind == "prioritized":
        replay.update_priorities_(batch, batch["reward"].abs() + 0.5)


def run_on(device: str, sampler: str, turns: int, wrap: Callable[..., Any]) -> list[list[Tensor]]:
    found = []
    with DeviceReplay(section(sampler), device) as replay:
        batch, added = replay.new_batch(), columns(0, device)
        run = wrap(replay, batch, added)
        for turn in range(turns):
            for name, tensor in columns(turn, device).items():
                added[name].copy_(tensor)
            run()
            found.append([*facts(batch), replay.table.state[:16].cpu()])
        replay.check()
    return found


def plainly(replay: DeviceReplay, batch: Any, added: dict[str, Tensor]) -> Callable[[], None]:
    return lambda: step(replay, batch, added)


def captured(replay: DeviceReplay, batch: Any, added: dict[str, Tensor]) -> Callable[[], None]:
    """Capture a step; what the warm-up has changed is put back."""
    before = replay.state_dict()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(replay, batch, added)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(replay, batch, added)
    replay.load_state_dict(before)
    return graph.replay


def assert_equal(got: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for turn, (a, b) in enumerate(zip(got, expected, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y), turn


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_gpu_gives_the_batches_of_the_host(sampler: str) -> None:
    """Also when the ring is full many times over."""
    expected = run_on("cpu", sampler, 300, plainly)
    assert_equal(run_on(DEVICE, sampler, 300, plainly), expected)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_captured_step_gives_the_same_batches(sampler: str) -> None:
    assert_equal(run_on(DEVICE, sampler, 300, captured), run_on("cpu", sampler, 300, plainly))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_compiled_step_gives_the_same_batches(sampler: str, mode: str) -> None:
    def compiled(replay: DeviceReplay, batch: Any, added: dict[str, Tensor]) -> Callable[[], None]:
        torch._dynamo.reset()
        run = torch.compile(lambda: step(replay, batch, added), fullgraph=True, mode=mode)
        return lambda: run()

    assert_equal(run_on(DEVICE, sampler, 40, compiled), run_on("cpu", sampler, 40, plainly))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_table_without_masses_gives_batches_without_samples(sampler: str) -> None:
    """And ends no kernel; a graph that was captured of such a step draws as soon as there is something."""

    def run(device: str, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> list[list[Tensor]]:
        found = []
        with DeviceReplay(section(sampler), device) as replay:
            batch, added = replay.new_batch(), columns(0, device)
            lengths = torch.zeros(ENVS, dtype=torch.int64, device=device)

            def whole() -> None:
                replay.add_(added, lengths)
                replay.sample_(batch)
                if sampler != "uniform":
                    replay.update_priorities_(batch, batch["reward"].abs() + 0.5)

            before = replay.state_dict()
            for _ in range(3):
                whole()
            replay.load_state_dict(before)
            replay.add_(added, lengths)
            step = wrap(whole)
            for steps in (0, 0, STEPS):
                lengths.fill_(steps)
                step()
                found.append([*facts(batch), batch.valid.cpu(), replay.table.state[:16].cpu()])
        return found

    def capture(whole: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            whole()
        return graph.replay

    expected = run("cpu", lambda whole: whole)
    assert [bool(facts[-2].any()) for facts in expected] == [False, False, True]
    assert_equal(run(DEVICE, lambda whole: whole), expected)
    assert_equal(run(DEVICE, capture), expected)


def test_nothing_waits_for_the_device() -> None:
    """Behind a kernel that sleeps for a second, every call returns within a millisecond."""
    with DeviceReplay(section("prioritized"), DEVICE) as replay:
        batch, added = replay.new_batch(), columns(0, DEVICE)
        for _ in range(3):
            step(replay, batch, added)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)
        behind = torch.cuda.Event()
        took = {}
        for name, action in {
            "add_": lambda: replay.add_(added),
            "sample_": lambda: replay.sample_(batch),
            "update_priorities_": lambda: replay.update_priorities_(batch, batch.weight),
            "sample": replay.sample,
        }.items():
            begin = time.perf_counter()
            action()
            took[name] = time.perf_counter() - begin
        behind.record()
        assert not behind.query(), "the device has not come to it yet"
        torch.cuda.synchronize()
        first = took.pop("sample")  # it allocates its ring of batches
        assert first < 0.1
        assert max(took.values()) < 1e-3, took


def test_a_table_of_another_device_is_refused() -> None:
    refused = pytest.raises(ValueError, match="must be on cuda")
    with DeviceReplay(section("uniform"), DEVICE) as replay, refused:
        replay.add_(columns(0, "cpu"))
