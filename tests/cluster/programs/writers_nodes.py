"""Sample from tables with rates that actors of the nodes fill at full speed, one phase after the other.

The last argument names a JSON file: `phases` by name (`section`, `actors` of each node, `batches`, `lose`:
the batch behind which the actors of the last node are killed, or null), `out`. Each actor writes when each of
its additions began and ended and how many steps it had; each rank when each of its samples was asked for and
was there, and which trajectories it is of.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from gear_support import SCHEMA, in_child, kill, trajectory

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
        for number in range(batches):
            begin = time.monotonic()
            batch = replay.sample()
            seen.append((begin, time.monotonic(), batch.id.tolist()))
            if number == lose and dist.get_rank() == dist.get_world_size() - 1:
                for actor in actors:
                    kill(actor)
        dist.barrier()
    return seen


wanted = json.loads(Path(sys.argv[-1]).read_text())
rank, out = int(os.environ["RANK"]), Path(wanted["out"])
actors: dict[str, list[int]] = {}
for name, phase in wanted["phases"].items():
    ids = [10 * rank + index for index in range(phase["actors"][rank])]
    actors[name] = [
        in_child(lambda n=name, p=phase, i=i: act(p["section"], out / f"{n}.actor{i}", i + 1)) for i in ids
    ]
dist.init_process_group("gloo")
found = {
    name: learn(phase["section"], phase["batches"], phase["lose"], actors[name])
    for name, phase in wanted["phases"].items()
}
(out / f"rank{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
