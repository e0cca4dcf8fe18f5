"""Sample without an engine, and check that every row is the one that the batch says.

    faults_sample.py MODE FOLDER SECTION [ROUNDS]

MODE `rounds`: build a Replay, take ten batches and close, ROUNDS times. `paused`: the same, but wait for
FOLDER/go while the store has a name. `lag`: the last rank stops after two batches. `leave`: end without
close.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch.distributed as dist

from deepspeed_gear import Replay
from deepspeed_gear.errors import PeerError
from deepspeed_gear.store.shared_memory import SharedMemory

mode, folder, section = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1


def wait_for(name: str) -> None:
    while not (folder / name).exists():
        time.sleep(0.01)


def sample(replay: Replay, count: int) -> None:
    for _ in range(count):
        batch = replay.sample()
        codes = batch.trajectory_id * 1000 + batch.anchor
        assert batch["code"][:, 0].equal(codes), (batch["code"], codes)
        assert batch["observation"][:, 0, 1].equal(codes.float() + 0.25)


if mode == "paused":
    unlink = SharedMemory.unlink

    def wait_and_unlink(memory: SharedMemory) -> None:
        (folder / "linked").write_text(memory.path.name)
        wait_for("go")
        unlink(memory)

    SharedMemory.unlink = wait_and_unlink  # type: ignore[method-assign]

if mode in ("rounds", "paused"):
    for _ in range(int(sys.argv[4])):
        with Replay(section) as replay:
            sample(replay, 10)
elif mode == "leave":
    left = Replay(section)
    sample(left, 3)
elif mode == "lag":
    replay = Replay(section)
    sample(replay, 2)
    if last:
        (folder / "stopped").touch()
        time.sleep(600)
    wait_for("stopped")
    try:
        sample(replay, 100)
    except PeerError as error:
        print("PEER", json.dumps(str(error)), flush=True)
    (folder / "reported").touch()
    wait_for("killed")
    sample(replay, 100)  # who is dead is not waited for
    print("GOES ON", flush=True)
    os._exit(0)  # the group has a dead rank
if dist.is_initialized() and mode != "leave":
    dist.barrier()
    dist.destroy_process_group()
