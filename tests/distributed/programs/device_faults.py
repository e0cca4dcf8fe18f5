"""What goes wrong between replicas with tables on their devices: a named error on every rank that lives."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from gear_support import SCHEMA

from deepspeed_gear import DeviceReplay
from deepspeed_gear.errors import GearError, LostNodeError, PeerError, StoreError

dist.init_process_group("gloo")
rank = dist.get_rank()
replay = DeviceReplay(json.loads(sys.argv[1]), "cpu", schemas={"main": SCHEMA})


def error_of(kind: type[GearError]) -> str:
    try:
        replay.sample()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


assert "must hold an item that can be drawn, over all replicas" in error_of(StoreError)
if rank == 0:  # the other replica's part stays empty
    flags = torch.zeros(2, 4, dtype=torch.bool)
    columns = {
        "observation": torch.zeros(2, 5, 3),
        "action": torch.zeros(2, 4, 2),
        "reward": torch.zeros(2, 4),
        "terminated": flags,
        "truncated": flags,
        "code": torch.arange(8).view(2, 4),
        "task": torch.zeros(2, dtype=torch.int64),
    }
    replay.add_(columns)
begin = replay.export_table()
assert set(replay.sample()["code"].tolist()) <= set(range(8))
middle = replay.export_table()
replay.import_table(begin if rank == 0 else middle)
assert "must be at the same global batch" in error_of(PeerError)
replay.import_table(middle)
replay.sample()
if rank == 1:
    os._exit(0)
start = time.monotonic()
text = error_of(LostNodeError)
assert text.startswith("rank 1 ("), text
assert time.monotonic() - start < replay.config.timeout_s + 10
assert "rank 1 (" in error_of(LostNodeError), "it stays lost"
print("done", flush=True)
os._exit(0)  # the group of all ranks has lost one
