"""Replicas with a table in the memory of each one's device.

The last argument is a task of gear sections and `out`, a folder. `shared`: batches of a data set, which are
those of a table in shared memory; `added`: tables to which each rank adds, and from which it draws alone, and
what all have saved, loaded on one replica; perhaps `engine`: training, and a checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engine_parts import BATCH, Model, ds_config
from gear_support import SCHEMA

import deepspeed_gear
from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.errors import GearError
from deepspeed_gear.ops.records import Resolution

DEVICE = os.environ.get("GEAR_TEST_DEVICE", "cpu")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
task = json.loads(sys.argv[-1])
out = Path(task["out"])


def columns(codes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return trajectories of this rank. [n, T + 1] -> [n, T or T + 1, ...] each."""
    count, steps = len(codes), codes.shape[1] - 1
    flags, action = torch.zeros(count, steps, dtype=torch.bool), codes[:, :steps, None].float()
    made = {
        "observation": codes[..., None].float().expand(-1, -1, 3),
        "action": action.expand(-1, -1, 2),
        "reward": codes[:, :steps].float(),
        "terminated": flags,
        "truncated": flags,
        "code": codes[:, :steps],
        "task": torch.full((count,), rank),
    }
    return {name: values.contiguous().to(DEVICE) for name, values in made.items()}


def gathered(value: Any) -> list[Any]:
    values = [value] * world
    dist.all_gather_object(values, value)
    return values


def batches_of_a_data_set(shared: dict[str, Any]) -> None:
    rest = {key: value for key, value in shared.items() if key != "data"}
    on_device = {**rest, "tables": {"main": {"data": shared["data"], "placement": "device"}}}
    with Replay(shared) as host, DeviceReplay(on_device, DEVICE) as device:
        for _ in range(12):
            expected, got = host.sample(), device.sample()
            assert torch.equal(got.trajectory_id.cpu(), expected.trajectory_id)
            assert torch.equal(got.sample_number.cpu(), expected.sample_number)
            assert torch.equal(got["observation"].cpu(), expected["observation"])


def tables_of_their_own(added: dict[str, Any]) -> None:
    numbers: list[int] = []
    with DeviceReplay(added, DEVICE, schemas={"main": SCHEMA}) as replay:
        replay.add_(columns(rank * 1000 + torch.arange(20).view(4, 5)))
        for _ in range(6):
            batch = replay.sample()
            assert set(batch["task"].tolist()) == {rank}
            numbers += batch.records[:, Resolution.SAMPLE_NUMBER].tolist()
            replay.update_priorities_(batch, torch.rand(batch.num_samples, device=DEVICE) + rank)
        replay.save(out / "saved")
        held = sum(gathered(replay.num_steps))
    every = sorted(number for part in gathered(numbers) for number in part)
    assert every == list(range(len(every))), "the ranks' samples have numbers of their own"
    alone = [dist.new_group([i]) for i in range(world)][rank]
    with DeviceReplay(added, DEVICE, process_group=alone, schemas={"main": SCHEMA}) as one:
        one.load(out / "saved")
        assert one.num_steps == held
        assert min(one.sample().records[:, Resolution.SAMPLE_NUMBER].tolist()) == len(every)
    dist.barrier()


def engine_of(section: dict[str, Any]) -> Any:
    model = Model(12)
    options = {"model": model, "model_parameters": model.parameters(), "config": ds_config(section, 2)}
    return deepspeed_gear.initialize(**options, schemas={"main": SCHEMA})[0]


def train(engine: Any, batches: int) -> np.ndarray:
    seen = []
    for _ in range(batches * 2):
        batch = engine.gear_sample()
        engine.backward(engine(batch))
        engine.step()
        engine.gear_update_priorities(batch, batch["reward"] + 1)
        seen.append(batch["code"].numpy().copy())
    return np.stack(seen)


def training(section: dict[str, Any]) -> None:
    """An engine trains from its devices, and goes on from a checkpoint."""
    engine, folder = engine_of(section), str(out / "checkpoints")
    assert isinstance(engine.gear, DeviceReplay)
    assert engine.gear_sample == engine.gear.sample
    for number in range(6):
        engine.gear.add_(columns(rank * 1000 + number * 10 + torch.arange(5).view(1, 5)))
    first = train(engine, 3)
    assert first.shape == (6, BATCH // 4)
    assert set((first // 1000).flatten().tolist()) == {rank}
    engine.save_checkpoint(folder)
    expected = train(engine, 3)
    engine.destroy()
    other = engine_of(section)
    other.load_checkpoint(folder)
    assert np.array_equal(train(other, 3), expected)
    dist.barrier()
    if rank == 0:
        file = next(Path(folder).glob("*/gear/main/shard-1/content.pt"))
        with file.open("rb+") as handle:
            handle.seek(file.stat().st_size // 2)
            handle.write(b"\xff\x00\xff\x00")
    dist.barrier()
    with pytest.raises(GearError, match=r"shard-1/content\.pt must be as it was saved"):
        other.load_checkpoint(folder)
    other.destroy()


batches_of_a_data_set(task["shared"])
tables_of_their_own(task["added"])
if "engine" in task:
    training(task["engine"])
dist.destroy_process_group()
