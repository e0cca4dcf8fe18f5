"""Train a small model under the launcher until something happens to a rank.

    faults_train.py FOLDER

FOLDER/plan.json: `sections` (the gear section of each rank), `steps` (None: without end), `raise_on` (the
rank whose fourth step raises). Every rank writes FOLDER/pid-RANK when it starts, and FOLDER/step-RANK after
its first step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path

import torch

import deepspeed_gear

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--local_rank", type=int)
folder = parser.parse_args().folder
rank = int(os.environ["RANK"])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
plan = json.loads((folder / "plan.json").read_text())
section = plan["sections"][rank]
if isinstance(section, dict):
    config: object = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "gear": section,
    }
else:
    config = section  # the path of a file
model = torch.nn.Linear(3, 2)
engine, *_ = deepspeed_gear.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in itertools.count() if plan["steps"] is None else range(plan["steps"]):
    batch = engine.gear_sample()
    loss = (engine(batch["observation"][:, 0]) - batch["action"][:, 0]).square().mean()
    engine.backward(loss)
    engine.step()
    if step == 0:
        (folder / f"step-{rank}").touch()
    if step == 3 and rank == plan["raise_on"]:
        raise RuntimeError("a fault in the user's training loop")
engine.destroy()
