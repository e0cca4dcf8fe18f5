"""Draw from shards of very unequal mass, and from a table that the ranks of all nodes fill.

Both have an opaque column, whose values are in the batches of every node.

The last argument names a JSON file: `data`, `batches`, `out`. Rank 0 writes what all ranks have drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from gear_support import SCHEMA, trajectory

from deepspeed_gear import Column, Replay, Schema

BATCH = 60
NUM_ADDED = 12  # trajectories of each rank


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def unequal(data: str, batches: int) -> list[int]:
    """Return how often each trajectory was drawn."""
    sampler = {"kind": "prioritized", "unit": "trajectory", "alpha": 1.0, "beta": 0.4}
    section = {"data": data, "sampler": sampler, "batch_size": BATCH, "seed": 11}
    with Replay({**section, "fields": {"task": {}, "metadata": {}}}) as replay:
        count = len(replay.datasets["main"])
        ids = np.arange(count)
        replay.sample()
        replay.set_priorities(ids.tolist(), (10.0 ** (ids * 4 // count - 2) * (1 + ids % 3)).tolist())
        drawn = np.zeros(count, np.int64)
        for _ in range(batches):
            batch = replay.sample()
            np.add.at(drawn, batch.trajectory_id.numpy(), 1)
            assert batch.opaque("metadata") == [{"number": key} for key in batch.trajectory_id.tolist()]
    return np.sum(gathered(drawn), axis=0).tolist()


def filled() -> dict[str, Any]:
    """Let every rank add trajectories; return what is drawn and in which order."""
    rank, found = dist.get_rank(), {}
    table = {"capacity_steps": 3000, "capacity_trajectories": 90, "max_length": 30}
    fields = {"code": {"length": 3}, "task": {}, "observation": {"offset": -1, "length": 2}, "name": {}}
    schema = Schema([*SCHEMA, Column("name", "bytes", rows="1", max_bytes=20)])
    for kind in ("uniform", "fifo", "lifo"):
        sampler = {"kind": kind, "unit": "trajectory" if kind == "uniform" else "step"}
        section = {"tables": {"main": table}, "sampler": sampler, "fields": fields, "batch_size": BATCH}
        with Replay(section, schemas={"main": schema}) as replay:
            mine = {}
            for index in range(NUM_ADDED):
                name = 100 * rank + index
                values = {**trajectory(name, 5 + index), "name": b"\xff%d" % name}
                mine[replay.add(values)] = name
            names = {key: name for part in gathered(mine) for key, name in part.items()}
            assert len(names) == NUM_ADDED * dist.get_world_size()
            dist.barrier()
            seen: list[list[int]] = []
            for _ in range(6):
                batch = replay.sample()
                for key, code, mask in zip(
                    batch.trajectory_id.tolist(),
                    batch["code"].tolist(),
                    batch.mask["code"].tolist(),
                    strict=True,
                ):
                    assert code[0] // 1000 == names[key], (code, key)
                    assert mask[0]
                ids = batch.trajectory_id.tolist()
                assert batch.opaque("name") == [b"\xff%d" % names[key] for key in ids]
                seen += np.stack([batch.sample_number, batch.trajectory_id, batch.anchor], axis=1).tolist()
                removed = [key for key in mine if key % 7 == 0]
                replay.remove(removed)
                mine = {key: name for key, name in mine.items() if key not in removed}
                dist.barrier()
        found[kind] = sorted(row for part in gathered(seen) for row in part)
    return found


wanted = json.loads(Path(sys.argv[-1]).read_text())
dist.init_process_group("gloo")
result = {"drawn": unequal(wanted["data"], wanted["batches"]), **filled()}
if dist.get_rank() == 0:
    Path(wanted["out"]).write_text(json.dumps(result))
dist.destroy_process_group()
