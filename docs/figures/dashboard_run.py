"""The run of dashboard.svg and of the frames in docs/how-to/watch-a-run.md: two ranks on one table.

deepspeed --num_gpus 2 docs/figures/dashboard_run.py FOLDER [SECONDS]

writes the values of DeepSpeed's monitor to FOLDER/demo. Rank 0 adds trajectories, both train by
priority, and rank 1 is slowed down after half of the time.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import deepspeed_gear
from deepspeed_gear import Batch

BATCH = 256
SLOW_S = 0.06
COLUMNS = {
    "observation": {"dtype": "float32", "shape": [3]},
    "reward": {"dtype": "float32", "role": "reward"},
}
GEAR = {
    "tables": {
        "main": {
            "capacity_steps": 60_000,
            "capacity_trajectories": 1_800,
            "remove": "fifo",
            "schema": {"columns": COLUMNS},
        }
    },
    "fields": {"observation": {}, "reward": {}},
    "sampler": {"kind": "prioritized", "unit": "step", "alpha": 0.6, "beta": 0.4},
    "shared_memory": {"run": "demo"},
}


class Critic(torch.nn.Module):
    """A linear value of an observation."""

    def __init__(self) -> None:
        super().__init__()
        self.value = torch.nn.Linear(3, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the squared error of each sample. [B]."""
        return (self.value(batch["observation"]).squeeze(-1) - batch["reward"]) ** 2


def trajectory() -> dict[str, torch.Tensor]:
    """Return an episode of random length and rewards."""
    steps = int(torch.randint(5, 60, ()))
    return {"observation": torch.randn(steps, 3), "reward": torch.randn(steps) ** 3}


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    seconds = float(arguments[1]) if len(arguments) > 1 else 100.0
    monitor = {"enabled": True, "output_path": arguments[0], "job_name": "demo"}
    optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
    config = {"train_batch_size": BATCH, "optimizer": optimizer, "csv_monitor": monitor}
    model = Critic()
    engine, *_ = deepspeed_gear.initialize(
        model=model, model_parameters=model.parameters(), config={**config, "gear": GEAR}
    )
    leads = engine.global_rank == 0
    for _ in range(50 if leads else 0):
        engine.gear.add(trajectory())
    dist.barrier()
    begin_s = time.monotonic()
    goes_on = torch.ones(1)
    while goes_on:
        is_second_half = time.monotonic() - begin_s > seconds / 2
        if is_second_half and not leads:
            time.sleep(SLOW_S)
        batch = engine.gear_sample()
        errors = engine(batch)
        engine.backward((errors * batch.is_weight).mean())
        engine.step()
        engine.gear.update_priorities(batch, errors.detach())
        if leads and engine.global_steps % 3 == 0:
            engine.gear.add(trajectory())
        goes_on[0] = float(time.monotonic() - begin_s < seconds)
        dist.broadcast(goes_on, 0)
    engine.destroy()


if __name__ == "__main__":
    main()
