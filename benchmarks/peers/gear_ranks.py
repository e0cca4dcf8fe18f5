"""This project on several ranks of one node, each a process of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from deepspeed_gear import Replay
from peers.interface import Array

ITEM = {"number": {"dtype": "int64"}}


def epoch(count: int, batch: int, ranks: int, used: int) -> list[list[int]]:
    """As `System.epoch`."""
    return _on_ranks(ranks, _epoch, count, batch, used)


def shared(priorities: Array, processes: int, batches: int) -> list[Array]:
    """As `System.shared`."""
    return _on_ranks(processes, _shared, priorities, batches)


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
        return np.concatenate([replay.sample()["number"].flatten().numpy().copy() for _ in range(batches)])


def _rank(
    rank: int, world: int, store: str, results: Any, run: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results.put((rank, run(*arguments)))
    dist.destroy_process_group()


def _on_ranks(world: int, run: Callable[..., Any], *arguments: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        results = multiprocessing.get_context("spawn").Queue()
        context = multiprocessing.spawn(
            _rank, (world, f"{folder}/store", results, run, arguments), nprocs=world, join=False
        )
        found = dict(results.get(timeout=120) for _ in range(world))
        context.join()
    return [found[rank] for rank in range(world)]
