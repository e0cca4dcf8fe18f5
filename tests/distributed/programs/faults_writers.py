"""Ranks with everything that keeps a name in shared memory: a table that takes writers, a board, a loader.

faults_writers.py FOLDER; reads FOLDER/section.json, writes FOLDER/ready-RANK, adds and samples until its end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from gear_support import SCHEMA, trajectory

from deepspeed_gear import PolicyBoard, Replay
from deepspeed_gear.actors.inference_loader import InferenceLoader

folder = Path(sys.argv[-1])  # behind what a launcher adds
section = json.loads((folder / "section.json").read_text())
dist.init_process_group("gloo")
rank = dist.get_rank()
replay = Replay(section, schemas={"main": SCHEMA})
board = PolicyBoard.create(torch.nn.Linear(2, 2), section["shared_memory"]["prefix"])
loader = InferenceLoader(replay, batch_size=2, timeout=0.0)
replay.add(trajectory(rank, 9))
dist.barrier()
(folder / f"ready-{rank}").touch()
for number in range(10**9):
    replay.add(trajectory(number, 9))
    replay.sample()
