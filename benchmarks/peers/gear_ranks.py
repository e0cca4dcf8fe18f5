"""This project on several ranks of one node, each a process of its own."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from deepspeed_gear import Replay
from peers import gear_language
from peers.interface import Array, NotOfferedError, Pack

ITEM = {"number": {"dtype": "int64"}}
_HELD: list[Replay] = []  # what a rank holds that waits for its end


def epoch(count: int, batch: int, ranks: int, used: int, workers: int = 0) -> list[list[int]]:
    """As `System.epoch`."""
    if workers:
        raise NotOfferedError("a replay is used in the process that made it; a thread prefetches")
    return _on_ranks(ranks, _epoch, count, batch, used)


def shared(priorities: Array, processes: int, batches: int) -> list[Array]:
    """As `System.shared`."""
    return _on_ranks(processes, _shared, priorities, batches)


def restart() -> list[list[int]]:
    """As `System.restart`."""
    with tempfile.TemporaryDirectory() as folder:
        results, context = _start(2, _held, (), folder)
        for _ in range(2):
            results.get(timeout=100)
        for process in context.processes:
            os.killpg(process.pid, signal.SIGKILL)
        found = epoch(10, 1, 2, 0)  # at once
        for process in context.processes:
            process.join()
        return found


def packs(lengths: Array, tokens: int, ranks: int = 1) -> list[list[Pack]]:
    """As `System.packs`."""
    return _on_ranks(ranks, _packs, lengths, tokens)


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


def _held() -> None:
    os.setsid()  # a group of its own, with its helpers
    replay = _replay({"kind": "epoch"}, 1, 10)
    replay.sample()
    _HELD.append(replay)


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
                position, bounds = micro.position_ids[0].numpy().copy(), micro.cu_seqlens.numpy().copy()
                found.append(Pack(number, position, bounds))
        return found


def _rank(
    rank: int, world: int, store: str, results: Any, run: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results.put((rank, run(*arguments)))
    while _HELD:
        time.sleep(1)  # until it is killed
    dist.destroy_process_group()


def _start(world: int, run: Callable[..., Any], arguments: tuple[Any, ...], folder: str) -> tuple[Any, Any]:
    results: Any = multiprocessing.get_context("spawn").Queue()
    given = (world, f"{folder}/store", results, run, arguments)
    return results, multiprocessing.spawn(_rank, given, nprocs=world, join=False)


def _on_ranks(world: int, run: Callable[..., Any], *arguments: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        results, context = _start(world, run, arguments, folder)
        found = dict(results.get(timeout=120) for _ in range(world))
        context.join()
    return [found[rank] for rank in range(world)]
