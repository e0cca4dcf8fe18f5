"""A prioritized run in a plain gloo group; what is reported depends on the sample alone.

priority_ranks.py FOLDER CASES: each case is run to its end, and each rank writes what it has seen.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from batch_records import SAMPLES, Arrays, record, stacked
from gear_support import SCHEMA, trajectory
from replay_support import late_updates_of, streams_of
from store_support import check_whole

from deepspeed_gear import Batch, Replay
from deepspeed_gear.batching.transfer.cuda_streams import HostEvent
from deepspeed_gear.errors import DataError, PeerError

folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
LENGTHS = [1 + 7 * number % 23 for number in range(24)]
SAVED = 13
NAMES = (*SAMPLES, "probability", "is_weight", "epoch", "num_steps", "goal_step")
CHANGES = 9  # the global batch behind which trajectories come and go


def made(section: dict[str, Any]) -> Replay:
    replay = Replay(section, schemas={"main": SCHEMA})
    if rank == 0:
        for number, steps in enumerate(LENGTHS):
            replay.add(trajectory(number, steps))
    dist.barrier()
    return replay


def priorities(batch: Batch) -> torch.Tensor:
    """Depend on item and sample number: of an item that was drawn twice the last report must win."""
    word = (batch.trajectory_id * 7919 + batch.anchor * 104729 + batch.sample_number * 31) % 1009
    return (word + 1).double().pow(2) / 1e5


def run(replay: Replay, first: int, last: int, changes: bool) -> Arrays:
    rows, reports = [], replay.config.sampler.kind != "uniform"
    for step in range(first, last):
        for _ in range(replay.batch_info.accumulation):
            batch = replay.sample()
            rows.append(record(batch, NAMES))
            if rank == world - 1 and step + 1 == SAVED:
                time.sleep(0.2)  # the first rank saves already: it must wait for this report
            if reports:
                replay.update_priorities(batch, priorities(batch))
        if reports and step % 4 == 1 and rank == step // 4 % world:
            replay.set_priorities(
                [step], [float(step)], [0] if replay.config.sampler.unit == "step" else None
            )
        if changes and step == CHANGES:
            change(replay)
    return stacked(rows) if rows else {}


def change(replay: Replay) -> None:
    """Remove and add between two batches, in places that were used before; on one rank."""
    dist.barrier()
    if rank == 0:
        replay.remove([0, 3, 5, 8])
        for number in range(24, 28):
            replay.add(trajectory(number, LENGTHS[number % 9] + 2))
    dist.barrier()


def stopping(case: dict[str, Any]) -> None:
    """Rank 1 asks for nothing more: rank 0 gets an error that names it."""
    with made(case["section"]) as replay:
        for _ in range(3):
            replay.update_priorities(replay.sample(), torch.ones(replay.batch_info.micro))
        pids: list[Any] = [None] * world
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            begin, text = time.monotonic(), "nothing"
            try:
                for _ in range(20):
                    replay.sample()
            except PeerError as error:
                text = str(error)
            passed, timeout_s = time.monotonic() - begin, case["section"]["timeout_s"]
            assert f"local rank 1 (process {pids[1]}) has not requested the batch after them" in text, text
            assert timeout_s <= passed < timeout_s + 10, passed
        dist.barrier()


def running(name: str, case: dict[str, Any]) -> None:
    first, last = case.get("first", 0), case["last"]
    with made(case["section"]) as replay:
        if "load" in case:
            state = json.loads((Path(case["load"]) / "state.json").read_text())
            replay.load(case["load"], state)
        if "save" in case:
            run(replay, 0, first, case.get("changes", False))
            state = replay.save(case["save"])
            if rank == 0:
                (Path(case["save"]) / "state.json").write_text(json.dumps(state))
            dist.barrier()
        found = run(replay, first, last, case.get("changes", False))
        np.savez(folder / f"{name}.{world}.{rank}.npz", **found)
        dist.barrier()
        if rank == 0:
            check_whole(replay.tables["main"], list(streams_of(replay).values()))
        dist.barrier()


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a device."""

    is_cpu, is_cuda = False, True


class Later:
    """Memory of the host to which values come after some time."""

    def fetch(self, values: torch.Tensor) -> tuple[torch.Tensor, HostEvent]:
        event = HostEvent()
        threading.Timer(random.random() * 0.02, event.finish).start()
        return values.as_subclass(torch.Tensor).clone(), event

    def give_back(self, host: torch.Tensor) -> None: ...


def batches_of(section: dict[str, Any], is_late: bool) -> list[list[int]]:
    """Return what a rank sees whose device computes priorities late, or early."""
    found = []
    with Replay(section) as replay:
        late_updates_of(replay)._blocks = Later()
        for turn in range(20):
            batch = replay.sample()
            found.append(batch.sample_number.tolist() + batch.trajectory_id.tolist())
            values = (batch.sample_number % 13 + 1).float() * (batch.anchor + 1)
            if (turn + rank) % 5 != 4:  # no process has to report
                replay.update_priorities(batch, values.as_subclass(Elsewhere) if is_late else values)
    dist.barrier()
    return found


def reporting_late(sections: list[dict[str, Any]]) -> None:
    """Late reports give the batches of early ones, and errors on all ranks."""
    random.seed(rank)
    for section in sections:
        assert batches_of(section, True) == batches_of(section, False), section
    with Replay(sections[0]) as replay:
        late_updates_of(replay)._blocks = Later()
        batch = replay.sample()
        values = torch.full((batch.num_samples,), torch.nan if rank == 1 else 1.0)
        replay.update_priorities(batch, values.as_subclass(Elsewhere))
        wrong = pytest.raises(DataError if rank == 1 else PeerError, match="priority 0 must be finite")
        with tempfile.TemporaryDirectory() as where, wrong:
            replay.save(where)
        replay.sample()
    dist.barrier()


for name, case in cases.items():
    if name == "stopping":
        stopping(case)
    elif name == "late":
        reporting_late(case["sections"])
    else:
        running(name, case)
dist.destroy_process_group()
