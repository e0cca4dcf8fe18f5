"""Steps of a DeviceReplay, whole and alike on every device; `wrap` says how one is run."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed_gear import DeviceReplay

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
    "epoch": {"kind": "epoch", "unit": "step"},
}
#: Where whole trajectories are added; and how often each may be drawn.
LIMITED = {
    "highest": ({"kind": "top_k", "unit": "step"}, 0),
    "highest twice": ({"kind": "top_k"}, 2),
    "limited": ({"kind": "prioritized", "normalize": "table"}, 12),
}
ENVS = 8
STEPS = 4
BATCH = 64
AT_ONCE_S = 20e-3  # with whatever else the process does, where a device sleeps for a second


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Collect no garbage inside, which takes longer than what is timed there."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def section(sampler: str) -> dict[str, Any]:
    table = {"capacity_steps": 4000, "max_length": STEPS, "remove": "fifo", "placement": "device"}
    table["schema"] = {"columns": COLUMNS}
    kind, most = LIMITED.get(sampler) or (SAMPLERS[sampler], 0)
    table["max_times_sampled"] = most
    options = {"sampler": kind, "fields": FIELDS, "batch_size": BATCH, "seed": 7}
    return {"tables": {"main": table}, "n_step": {"n": 3, "gamma": 0.9}, **options}


def columns(turn: int, device: str) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(turn)
    made = {
        "observation": torch.randn(ENVS, STEPS + 1, 11, generator=random),
        "action": torch.randn(ENVS, STEPS, 3, generator=random),
        "reward": torch.randn(ENVS, STEPS, generator=random),
        "terminated": (torch.rand(ENVS, STEPS, generator=random) < 0.3)
        & (torch.arange(STEPS) == STEPS - 1),
        "frame": torch.randint(0, 256, (ENVS, STEPS, 7, 9), generator=random, dtype=torch.uint8),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def facts(batch: Any) -> list[Tensor]:
    """Everything in a batch, in memory of its own."""
    fields = [*(batch[name] for name in batch), *(batch.mask[name] for name in batch.mask)]
    return [
        t.cpu().clone()
        for t in (
            *(batch.trajectory_id, batch.anchor, batch.sample_number, batch.is_weight, batch.epoch),
            *fields,
        )
    ]


def step(replay: DeviceReplay, batch: Any, added: dict[str, Tensor]) -> None:
    """One whole step: everything that a graph holds. The priorities are exact on any device."""
    replay.add_(added)
    replay.sample_(batch)
    if replay.config.item_sampler.has_priorities:
        replay.update_priorities_(batch, batch["reward"].abs() + 0.5)


def run_on(device: str, sampler: str, turns: int, wrap: Callable[..., Any]) -> list[list[Tensor]]:
    """Take turns; return what each one gave, and the table's state behind it (the last of each)."""
    found = []
    with DeviceReplay(section(sampler), device) as replay:
        batch = replay.new_batch()
        added = columns(0, device)
        run = wrap(replay, batch, added)
        for turn in range(turns):
            for name, tensor in columns(turn, device).items():
                added[name].copy_(tensor)
            run()
            found.append([*facts(batch), replay.table.state[:16].cpu().clone()])
        if sampler in SAMPLERS:  # else batches without samples are part of it
            replay.check()
    return found


def plainly(replay: DeviceReplay, batch: Any, added: dict[str, Tensor]) -> Callable[[], None]:
    return lambda: step(replay, batch, added)


def assert_equal(got: list[list[Tensor]], expected: list[list[Tensor]]) -> None:
    for turn, (a, b) in enumerate(zip(got, expected, strict=True)):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y), turn
