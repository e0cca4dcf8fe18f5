"""Replicas with a table in the memory of each one's device.

device_ranks.py DATA_SECTION ADDED_SECTION FOLDER: uniform batches of a data set, equal to those of a table in
shared memory; tables to which each rank adds, and from which it draws alone; what all have saved, loaded
on one replica.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from gear_support import SCHEMA

from deepspeed_gear import DeviceReplay, Replay
from deepspeed_gear.ops.records import Resolution

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
DEVICE = os.environ.get("GEAR_TEST_DEVICE", "cpu")


def on_device(section: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in section.items() if key != "data"}
    return {**rest, "tables": {"main": {"data": section["data"], "placement": "device"}}}


shared = json.loads(sys.argv[1])
with Replay(shared) as host, DeviceReplay(on_device(shared), DEVICE) as device:
    for _ in range(12):
        expected, got = host.sample(), device.sample()
        assert torch.equal(got.trajectory_id.cpu(), expected.trajectory_id)
        assert torch.equal(got.sample_number.cpu(), expected.sample_number)
        assert torch.equal(got["observation"].cpu(), expected["observation"])

added = json.loads(sys.argv[2])

numbers: list[int] = []
with DeviceReplay(added, DEVICE, schemas={"main": SCHEMA}) as replay:
    codes = rank * 1000 + torch.arange(20).view(4, 5)
    flags = torch.zeros(4, 4, dtype=torch.bool)
    columns = {
        "observation": codes[..., None].float().expand(4, 5, 3),
        "action": codes[:, :4, None].float().expand(4, 4, 2),
        "reward": codes[:, :4].float(),
        "terminated": flags,
        "truncated": flags,
        "code": codes[:, :4],
        "task": torch.full((4,), rank),
    }
    replay.add_({name: values.contiguous().to(DEVICE) for name, values in columns.items()})
    for _ in range(6):
        batch = replay.sample()
        assert set(batch["task"].tolist()) == {rank}
        numbers += batch.records[:, Resolution.SAMPLE_NUMBER].tolist()
        replay.update_priorities_(batch, torch.rand(batch.num_samples, device=DEVICE) + rank)
    replay.save(sys.argv[3])
    steps = replay.num_steps
gathered: list[list[int]] = [[] for _ in range(world)]
dist.all_gather_object(gathered, numbers)
every = sorted(number for part in gathered for number in part)
assert every == list(range(len(every))), "the ranks' samples have numbers of their own"
held: list[int] = [0] * world
dist.all_gather_object(held, steps)
alone = [dist.new_group([i]) for i in range(world)][rank]
with DeviceReplay(added, DEVICE, process_group=alone, schemas={"main": SCHEMA}) as one:
    one.load(sys.argv[3])
    assert one.num_steps == sum(held)
    assert min(one.sample().records[:, Resolution.SAMPLE_NUMBER].tolist()) == len(every)
dist.barrier()
print("done", flush=True)
dist.destroy_process_group()
