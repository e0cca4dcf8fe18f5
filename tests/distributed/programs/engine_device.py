"""An engine whose table lies in the memory of each rank's device: training, a checkpoint, and its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_parts import BATCH, Model, ds_config, rank, task
from gear_support import SCHEMA

import deepspeed_gear
from deepspeed_gear import DeviceReplay
from deepspeed_gear.errors import GearError

given = task()


def made(section: dict[str, Any]) -> Any:
    model = Model(12)
    options = {"model": model, "model_parameters": model.parameters(), "config": ds_config(section, 2)}
    return deepspeed_gear.initialize(**options, schemas={"main": SCHEMA})[0]


def add(engine: Any, number: int) -> None:
    codes = (rank() * 1000 + number * 10 + torch.arange(5)).view(1, 5)
    flags = torch.zeros(1, 4, dtype=torch.bool)
    engine.gear.add_(
        {
            "observation": codes[..., None].float().expand(1, 5, 3),
            "action": codes[:, :4, None].float().expand(1, 4, 2),
            "reward": codes[:, :4].float(),
            "terminated": flags,
            "truncated": flags,
            "code": codes[:, :4],
            "task": torch.tensor([rank()]),
        }
    )


def train(engine: Any, batches: int) -> np.ndarray:
    seen = []
    for _ in range(batches * 2):
        batch = engine.gear_sample()
        loss = engine(batch)
        engine.backward(loss)
        engine.step()
        engine.gear_update_priorities(batch, batch["reward"] + 1)
        seen.append(batch["code"].numpy().copy())
    return np.stack(seen)


engine = made(given["section"])
assert isinstance(engine.gear, DeviceReplay)
assert engine.gear_sample == engine.gear.sample
for number in range(6):
    add(engine, number)
first = train(engine, 3)
assert first.shape == (6, BATCH // 4)
assert set((first // 1000).flatten().tolist()) == {rank()}
engine.save_checkpoint(given["out"])
expected = train(engine, 3)
engine.destroy()

other = made(given["section"])
other.load_checkpoint(given["out"])
assert np.array_equal(train(other, 3), expected)
torch.distributed.barrier()
if rank() == 0:
    file = next(Path(given["out"]).glob("*/gear/main/shard-1/content.pt"))
    with file.open("rb+") as handle:
        handle.seek(os.path.getsize(file) // 2)
        handle.write(b"\xff\x00\xff\x00")
torch.distributed.barrier()
refused = ""
try:
    other.load_checkpoint(given["out"])
except GearError as error:
    refused = str(error)
assert "shard-1/content.pt must be as it was saved" in refused, refused
other.destroy()
print(f"rank {rank()}: done", flush=True)
