"""This project on several ranks of one node, each a process of its own."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.ranks import run_ranks, start_ranks

from deepspeed_gear import Replay
from peers import gear_language
from peers.interface import Array, NotOfferedError, Pack

ITEM = {"number": {"dtype": "int64"}}


def epoch(count: int, batch: int, ranks: int, used: int, workers: int = 0) -> list[list[int]]:
    """As `System.epoch`."""
    if workers:
        raise NotOfferedError("a replay is used in the process that made it; a thread prefetches")
    return run_ranks(ranks, _epoch, count, batch, used)


def shared(priorities: Array, processes: int, batches: int) -> list[Array]:
    """As `System.shared`."""
    return run_ranks(processes, _shared, priorities, batches)


def restart() -> list[list[int]]:
    """As `System.restart`."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start_ranks(2, _hold, folder)
        while len(os.listdir(folder)) < len(processes):
            if not all(process.is_alive() for process in processes):
                raise RuntimeError("a rank ended with an error")
            time.sleep(0.05)
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
        found = epoch(10, 1, 2, 0)  # at once
        for process in processes:
            process.join()
        return found


def packs(lengths: Array, tokens: int, ranks: int = 1) -> list[list[Pack]]:
    """As `System.packs`."""
    return run_ranks(ranks, _packs, lengths, tokens)


def _replay(sampler: dict[str, Any], batch: int, count: int) -> Replay:
    table = {"capacity_steps": 100, "max_length": 1, "schema": {"columns": ITEM}}
    replay = Replay({"tables": {"main": table}, "sampler": sampler, "micro_batch_size": batch})
    if dist.get_rank() == 0:
        for number in range(count):
            replay.add({"number": np.array([number])})
    dist.barrier()
    return replay


def _epoch(count: int, batch: int, used: int) -> list[int]:
    with _replay({"kind": "epoch"}, batch, count) as replay:
        for _ in range(used):
            replay.sample()
        state = replay.state_dict()
        replay.sample()  # is not used
        replay.load_state_dict(state)
        found: list[int] = []
        while True:
            taken = replay.sample()
            found += taken["number"][taken.epoch == 0].flatten().tolist()
            over = torch.tensor(int((taken.epoch > 0).any()))
            dist.all_reduce(over)
            if over:
                return found


def _shared(priorities: Array, batches: int) -> Array:
    with _replay({"kind": "prioritized", "alpha": 1.0}, 64, len(priorities)) as replay:
        replay.set_priorities(np.arange(len(priorities)), priorities)
        return np.concatenate(
            [replay.sample()["number"].flatten().numpy().copy() for _ in range(batches)]
        )


def _hold(folder: str) -> None:
    os.setsid()  # a group of its own, with its helpers
    with _replay({"kind": "epoch"}, 1, 10) as replay:
        replay.sample()
        Path(folder, str(dist.get_rank())).touch()
        time.sleep(1000)  # until it is killed


def _packs(lengths: Array, tokens: int) -> list[Pack]:
    section = gear_language.section(tokens, len(lengths))
    with Replay(section) as replay:
        if dist.get_rank() == 0:
            for number, length in enumerate(lengths.tolist()):
                gear_language.add(replay, number, length)
        dist.barrier()
        found = []
        for step in replay.rollout():
            for micro in step:
                number = micro["number"][0].numpy().copy()
                number[micro.sequence[0].numpy() < 0] = -1
                position = micro.position_ids[0].numpy().copy()
                bounds = micro.cu_seqlens.numpy().copy()
                found.append(Pack(number, position, bounds))
        return found
