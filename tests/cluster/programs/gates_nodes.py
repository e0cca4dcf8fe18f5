"""Waits for a rate limiter on two nodes with two ranks each, and their ends. Part of rates_nodes.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from gear_support import SCHEMA, trajectory
from rate_cases import section_of

from deepspeed_gear import Replay
from deepspeed_gear.errors import GearError

BATCHES = 12


def tried(replay: Replay) -> list[Any]:
    """What comes of a sample, and after how many seconds."""
    begin = time.monotonic()
    try:
        what = sorted(replay.sample().trajectory_id.tolist())
    except GearError as error:
        what = f"{type(error).__name__}: {error}"
    return [what, time.monotonic() - begin]


def late(rank: int) -> list[Any]:
    """No process adds; then one rank does. At first none may add, then an actor might."""
    rate = {"min_size": 50, "timeout_s": 0.5}
    alone = section_of("uniform", "step", rate_limiter={**rate, "timeout_s": 60.0})
    with Replay(alone, schemas={"main": SCHEMA}) as replay:
        found: list[Any] = [tried(replay)]
    section = section_of("uniform", "step", rate_limiter=rate, writers=1)
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        found += [tried(replay), replay.can_sample()]
        if rank == 3:
            for number in range(2):
                replay.add(trajectory(number, 25))
        return [*found, replay.can_sample(), tried(replay)]


def collecting(rank: int) -> list[Any]:
    """A rank that writes must not wait for itself, and so no process does."""
    with Replay(section_of("uniform", max_times_sampled=1), schemas={"main": SCHEMA}) as replay:
        if rank == 3:
            writer = replay.writer()
        dist.barrier()
        found = [tried(replay), replay.can_sample()]
        for number in range(12 if rank == 3 else 0):
            writer.add(trajectory(number, 5))
        return [*found, replay.can_sample(), tried(replay), tried(replay)]


def acting(rank: int, folder: Path) -> dict[str, Any]:
    """Every rank adds as long as nothing can be sampled, also behind a checkpoint."""
    rate = {"min_size": 100, "samples_per_insert": 1.0, "error_buffer": 120.0}
    found: dict[str, Any] = {"batches": 0, "answers": [], "added": 0}
    with Replay(
        section_of("uniform", "step", remove="fifo", rate_limiter=rate), schemas={"main": SCHEMA}
    ) as replay:
        writer = replay.writer()
        while found["batches"] < BATCHES:
            answer = replay.can_sample()
            found["answers"].append(answer)
            if answer:
                replay.sample()
                found["batches"] += 1
                if found["batches"] == BATCHES // 2:
                    replay.load(folder / "saved", replay.save(folder / "saved"))
            else:
                found["added"] += 30 if rank == 1 else 5 + rank
                writer.add(trajectory(len(found["answers"]), 30 if rank == 1 else 5 + rank))
        return found


def ended(rank: int) -> list[Any]:
    """There are items for two batches; one node ends while the threads of both wait for the third."""
    section = {**section_of("uniform", max_times_sampled=1), "prefetch": 1}
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        for number in range(6):
            replay.add(trajectory(10 * rank + number, 5))
        dist.barrier()
        return [tried(replay) for _ in range(2 if rank >= 2 else 3)]
