"""Train until something happens to a rank, or say what is wrong with a config. Without DeepSpeed.

    faults_nodes.py FOLDER

FOLDER/plan.json: `refused` (for each attempt, the gear section of each rank) and `section` (what to train on
then; None: nothing), perhaps `steps`, and for how many seconds the rank `lingers` goes on behind them
(`linger`) while its thread prepares the next batch late; perhaps which rank fails at step 6 (`fails`;
`closes`: it closes its replay in the course of that), or closes its replay then and lives on (`ends`). Every
rank writes FOLDER/step-RANK after its third step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from deepspeed_gear import GearError, Replay
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.replay import BatchInfo

folder = Path(sys.argv[-1])
plan = json.loads((folder / "plan.json").read_text())
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
info = BatchInfo(4, 1, world)
for attempt, sections in enumerate(plan["refused"]):
    try:
        Replay(sections[rank], info=info)
    except GearError as error:
        sys.stdout.write(f"REFUSED {attempt}: {type(error).__name__}: {error}\n")

num_prepared = 0


def last_one_late(batch: Batch, keys: torch.Tensor) -> Batch:
    """Take a second for the batch behind the last that is used."""
    global num_prepared
    num_prepared += 1
    time.sleep(float(num_prepared == plan["steps"] + 1))
    return batch


def observations(replay: Replay) -> Iterator[torch.Tensor]:
    """Yield those of each micro batch, of packs or of windows."""
    while "pack" in plan["section"]:
        for micro in replay.step():
            yield micro["observation"]
    while True:
        yield replay.sample()["observation"]


if plan["section"] is not None:
    with Replay(plan["section"], info=info) as replay:
        if rank == plan.get("lingers"):
            replay.transform = last_one_late
        step, taken = 0, observations(replay)
        while plan.get("steps") is None or step < plan["steps"]:
            gradient = next(taken).sum()
            dist.all_reduce(gradient)
            assert torch.isfinite(gradient)
            if "lingers" in plan or "ends" in plan:
                time.sleep(0.2)  # so that batches wait
            step += 1
            if step == 3:
                (folder / f"step-{rank}").touch()
            if step == 6 and rank == plan.get("fails"):
                try:
                    raise ValueError("of this test")
                finally:
                    if plan["closes"]:
                        replay.close()
            if step == 6 and rank == plan.get("ends"):
                replay.close()
                time.sleep(60)
        if rank == plan.get("lingers"):
            time.sleep(plan["linger"])  # one call, as a long evaluation may be
dist.destroy_process_group()
