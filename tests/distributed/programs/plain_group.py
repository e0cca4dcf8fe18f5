"""Exchange and Replay in a plain gloo group, without DeepSpeed's engine: agreement, DDP, parts of the world.

plain_group.py FOLDER SECTION
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from batch_records import Arrays, record, stacked
from torch.nn.parallel import DistributedDataParallel

from deepspeed_gear import Batch, Replay
from deepspeed_gear.distributed.control_plane import ControlPlane, rendezvous
from deepspeed_gear.engine import engine_checkpoint
from deepspeed_gear.errors import CheckpointError, DataError, PeerError

folder, section = Path(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


def agreeing() -> None:
    """Many exchanges one after the other, at different times on each rank."""
    for round_ in range(8):
        exchange = ControlPlane()
        time.sleep(0.02 * ((rank + round_) % 3))
        assert exchange.gather((round_, rank)) == [(round_, r) for r in range(world)]
        assert exchange.broadcast(f"from {rank}", source=world - 1) == f"from {world - 1}"
        exchange.barrier()
        exchange.close()


def failing() -> None:
    """An error on one rank is raised there as it is, and with its text on the others; then all go on."""

    def action() -> int:
        if rank == 1:
            raise DataError("the file F", "must be there", None, "copy it")
        if rank == 2:
            raise ZeroDivisionError("a bug")
        return rank

    exchange = ControlPlane()
    for _ in range(2):
        try:
            exchange.agree("looking at F", action)
            raise AssertionError("nobody heard of it")
        except DataError:
            assert rank == 1
        except ZeroDivisionError:
            assert rank == 2
        except PeerError as error:
            text = str(error)
            assert rank not in (1, 2)
            assert text == "the file F must be there; copy it [raised on rank 1: looking at F]"
    assert exchange.agree("nothing", lambda: rank) == rank
    exchange.close()


def meeting() -> None:
    """Keys in the store where ranks have met belong to this start of them, like those of torch's groups."""
    default, connection = dist.distributed_c10d._get_default_store(), rendezvous(20.0)
    connection.set(f"gear/{rank}", "here")
    assert default.get(f"gear/{(rank + 1) % world}") == b"here"
    assert connection.get(f"gear/{(rank + 1) % world}") == b"here"
    dist.barrier()


def resuming() -> None:
    """A checkpoint of which one rank has no part is refused on all; none may wait for another in its load."""
    text = ""
    try:
        engine_checkpoint.load(None, folder, None if rank == 1 else {})  # type: ignore[arg-type]  # it is not touched
    except CheckpointError as error:
        text = str(error)
    assert "got 'none on ranks [1]'" in text, text


def transform(batch: Batch, keys: torch.Tensor) -> Batch:
    batch["key"] = keys
    return batch


def recorded(replay: Replay, count: int) -> Arrays:
    replay.transform = transform
    return stacked([record(replay.sample()) for _ in range(count)])


def training() -> None:
    """DDP over all ranks; every rank has its own part of each global batch."""
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    with Replay(section) as replay:
        np.savez(folder / f"all.{rank}.npz", **recorded(replay, 6))
        batch = replay.sample()
        (model(batch["observation"] / 1e5) - batch["action"] / 1e5).square().mean().backward()
    assert model.module.weight.grad is not None


def parts_of_the_world() -> None:
    """Two pairs, each with a Replay of its own."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for _ in range(3):
        with Replay(section, process_group=pairs[rank // 2]) as replay:
            assert replay.num_replicas == 2
            found = recorded(replay, 6)
    np.savez(folder / f"pair.{rank}.npz", **found)


agreeing()
failing()
meeting()
resuming()
training()
parts_of_the_world()
dist.barrier()
dist.destroy_process_group()
