"""Samples under hindsight relabelling on the ranks of a plain group: relabelled_ranks.py FOLDER SECTION."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from deepspeed_gear import Replay

folder, section = Path(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("gloo")
rows: dict[str, list[np.ndarray]] = {}
with Replay(section) as replay:
    for _ in range(5):
        batch = replay.sample()
        for name in ("sample_number", "trajectory_id", "anchor", "goal_step"):
            rows.setdefault(name, []).append(batch.part(name).numpy())
        rows.setdefault("goal", []).append(batch["goal"].numpy().copy())
np.savez(folder / f"{dist.get_rank()}.npz", **{name: np.concatenate(row) for name, row in rows.items()})
dist.barrier()
dist.destroy_process_group()
