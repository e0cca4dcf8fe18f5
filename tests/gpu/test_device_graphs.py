"""DeviceReplay on a GPU: the batches of the host, whole steps in CUDA graphs, and no wait for the
device.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_steps import (
    AT_ONCE_S,
    ENVS,
    LIMITED,
    SAMPLERS,
    STEPS,
    assert_equal,
    columns,
    facts,
    no_garbage,
    plainly,
    run_on,
    section,
    step,
)
from torch import Tensor
from torch._dynamo.utils import counters

from deepspeed_gear import DeviceReplay

# The first test builds both ops, where that has not been done before.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
DEVICE = "cuda"


def graph_of(replay: DeviceReplay, action: Callable[[], None]) -> Callable[[], None]:
    """Capture an action; what the warm-up has changed is put back."""
    before = replay.export_table()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            action()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    replay.import_table(before)
    return graph.replay


def captured(replay: DeviceReplay, batch: Any, added: dict[str, Tensor]) -> Callable[[], None]:
    return graph_of(replay, plainly(replay, batch, added))


@pytest.mark.parametrize(
    ("turns", "run"),
    [(300, plainly), (300, captured), pytest.param(6, plainly, marks=pytest.mark.sanitize)],
)
@pytest.mark.parametrize("sampler", [*SAMPLERS, *LIMITED])
def test_a_gpu_gives_the_batches_of_the_host(
    sampler: str, turns: int, run: Callable[..., Any]
) -> None:
    """Also when the ring is full many times over; a memory checker has the time for few turns."""
    assert_equal(run_on(DEVICE, sampler, turns, run), run_on("cpu", sampler, turns, plainly))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("sampler", [*SAMPLERS, *LIMITED])
def test_a_compiled_step_gives_the_same_batches(sampler: str, mode: str) -> None:
    def compiled(replay: DeviceReplay, batch: Any, added: dict[str, Tensor]) -> Callable[[], None]:
        torch._dynamo.reset()
        counters.clear()
        run = torch.compile(lambda: step(replay, batch, added), fullgraph=True, mode=mode)
        return lambda: run()

    assert_equal(run_on(DEVICE, sampler, 40, compiled), run_on("cpu", sampler, 40, plainly))
    assert counters["inductor"]["cudagraph_skips"] == 0, "torch has made no graph of it"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_table_without_masses_gives_batches_without_samples(sampler: str) -> None:
    """And ends no kernel; a graph that was captured of such a step draws as soon as there is
    something.
    """

    def run(device: str, captures: bool) -> list[list[Tensor]]:
        found = []
        with DeviceReplay(section(sampler), device) as replay:
            batch = replay.new_batch()
            added = columns(0, device)
            lengths = torch.zeros(ENVS, dtype=torch.int64, device=device)

            def whole() -> None:
                replay.add_(added, lengths)
                replay.sample_(batch)
                if sampler != "uniform":
                    replay.update_priorities_(batch, batch["reward"].abs() + 0.5)

            step = graph_of(replay, whole) if captures else whole
            replay.add_(added, lengths)
            for steps in (0, 0, STEPS):
                lengths.fill_(steps)
                step()
                state = replay.table.state[:16].cpu().clone()
                found.append([*facts(batch), batch.valid.cpu(), state])
        return found

    expected = run("cpu", captures=False)
    assert [bool(of_turn[-2].any()) for of_turn in expected] == [False, False, True]
    assert_equal(run(DEVICE, captures=False), expected)
    assert_equal(run(DEVICE, captures=True), expected)


def test_nothing_waits_for_the_device() -> None:
    """Behind a kernel that sleeps for a second, every call returns within a millisecond."""
    with DeviceReplay(section("prioritized"), DEVICE) as replay:
        batch = replay.new_batch()
        added = columns(0, DEVICE)
        for _ in range(3):
            step(replay, batch, added)
        replay.sample()  # allocates its ring of batches
        torch.cuda.synchronize()
        behind = torch.cuda.Event()
        took = {}
        with no_garbage():
            torch.cuda._sleep(2_000_000_000)
            for name, action in {
                "add_": lambda: replay.add_(added),
                "sample_": lambda: replay.sample_(batch),
                "update_priorities_": lambda: replay.update_priorities_(batch, batch.is_weight),
                "sample": replay.sample,
            }.items():
                took[name] = []
                for _ in range(3):
                    begin = time.perf_counter()
                    action()
                    took[name].append(time.perf_counter() - begin)
        behind.record()
        assert not behind.query(), "the device has not come to it yet"
        torch.cuda.synchronize()
        assert max(sorted(of_call)[1] for of_call in took.values()) < 1e-3, took
        assert max(map(max, took.values())) < AT_ONCE_S, "and none waits for the kernel"


def test_a_table_of_another_device_is_refused() -> None:
    refused = pytest.raises(ValueError, match="must be on cuda")
    with DeviceReplay(section("uniform"), DEVICE) as replay, refused:
        replay.add_(columns(0, "cpu"))


def environment_steps(sampler: str, rows: str, device: str, captures: bool) -> list[list[Tensor]]:
    """Return the batches of steps of environments, with removals, some environments left out, and
    ends.
    """
    made = section(sampler)
    found = []
    made["tables"]["main"] |= {"num_envs": ENVS, "rows": rows, "capacity_steps": 20 * ENVS}
    with DeviceReplay(made, device) as replay:
        batch = replay.new_batch()
        first = columns(0, device)
        row = {name: values[:, 0].contiguous() for name, values in first.items()}
        following = first["observation"][:, 1].contiguous()
        mask = torch.ones(ENVS, dtype=torch.bool, device=device)
        removed = torch.zeros(2, dtype=torch.int64, device=device)

        def whole() -> None:
            replay.add_steps_(row, {"observation": following}, mask=mask, autoreset="next_step")
            replay.remove_(removed)
            replay.sample_(batch)
            if sampler != "uniform":
                replay.update_priorities_(batch, batch["reward"].abs() + 0.5)

        run = graph_of(replay, whole) if captures else whole
        for turn in range(120):
            random = torch.Generator().manual_seed(turn)
            for name, values in columns(turn, "cpu").items():
                row[name].copy_(values[:, 0])
            following.copy_(columns(turn, "cpu")["observation"][:, 1])
            row["terminated"].copy_(torch.rand(ENVS, generator=random) < 0.2)
            mask.copy_(torch.rand(ENVS, generator=random) < 0.9)
            removed.copy_(torch.tensor([turn // 2, turn]))
            run()
            found.append([*facts(batch), replay.table.state[:16].cpu().clone()])
    return found


@pytest.mark.parametrize("rows", ["device", "host"])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_captured_steps_of_environments_give_the_batches_of_the_host(
    sampler: str, rows: str
) -> None:
    expected = environment_steps(sampler, "device", "cpu", False)
    assert_equal(environment_steps(sampler, rows, DEVICE, False), expected)
    assert_equal(environment_steps(sampler, rows, DEVICE, True), expected)
