"""Tables with rates that actors of the nodes fill at full speed. Part of rates_nodes.py.

A phase has a `section`, numbers of `actors` of each rank and of `batches`, and `lose`: the batch behind which
the actors of rank 2 are killed, or null. Each actor writes when each of its additions began and ended and how
many steps it had; each rank when each of its samples was asked for and was there, and of which trajectories
it is.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from gear_support import SCHEMA, trajectory
from process_support import in_child, kill

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.errors import StoreError

ENTRY = struct.Struct("=3d")


def act(section: dict[str, Any], log: Path, seed: int) -> None:
    """Add trajectories of random lengths until the ranks have ended; every fourth is as long as may be."""
    random, longest = np.random.default_rng(seed), section["tables"]["main"]["max_length"]
    with TrajectoryWriter.attach(section, wait_s=120.0) as writer, log.open("wb", buffering=0) as file:
        for number in range(10**6):
            steps = longest if number % 4 == 0 else int(random.integers(1, longest + 1))
            made, begin = trajectory(seed * 10**6 + number, steps), time.monotonic()
            try:
                writer.add(made)
            except StoreError:
                return
            file.write(ENTRY.pack(begin, time.monotonic(), steps))


def learn(section: dict[str, Any], batches: int, lose: int | None, actors: list[int]) -> list[Any]:
    """Take so many global batches."""
    seen = []
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        dist.barrier()
        time.sleep(1.0)  # actors come as far ahead as they may
        for number in range(batches):
            begin = time.monotonic()
            batch = replay.sample()
            seen.append((begin, time.monotonic(), batch.trajectory_id.tolist()))
            for actor in actors if number == lose and dist.get_rank() == 2 else []:
                kill(actor)
        dist.barrier()
    return seen


def start(phases: dict[str, Any], rank: int, out: Path) -> dict[str, list[int]]:
    """Start the actors of this rank for each phase, before there are threads. Returns their process ids."""
    found = {}
    for name, phase in phases.items():
        ids = [10 * rank + index for index in range(phase["actors"][rank])]
        found[name] = [
            in_child(lambda n=name, p=phase, i=i: act(p["section"], out / f"{n}.actor{i}", i + 1))
            for i in ids
        ]
    return found
