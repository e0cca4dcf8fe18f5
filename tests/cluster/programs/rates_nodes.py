"""Tables with rates and limits of draws: their batches, their writers, and waits for them.

The last argument names a JSON file: `cases` (section, folder and state by name), `phases` by name (none: no
waits either), `out`. A phase has a `section`, numbers of `actors` of each rank and of `batches`, and `lose`:
the batch after which the actors of rank 2 are killed, or null. Each actor writes when each of its additions
began and ended and how many steps it had; each rank when each of its samples was asked for and was there, of
which trajectories it is, and what came of waits: on two nodes with two ranks each.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from gear_support import SCHEMA, trajectory
from process_support import in_child, kill
from rate_cases import rest, section_of

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.errors import GearError, StoreError

ENTRY = struct.Struct("=3d")
BATCHES = 12
rank = int(os.environ["RANK"])

# ---- tables that actors of the nodes fill at full speed ----------------------------------------------


def act(section: dict[str, Any], log: Path, seed: int) -> None:
    """Add trajectories of random lengths until the ranks have ended; every fourth is as long as may be."""
    random, longest = np.random.default_rng(seed), section["tables"]["main"]["max_length"]
    with TrajectoryWriter.attach(section, wait_s=120.0) as writer, log.open("wb", buffering=0) as file:
        for number in range(10**6):
            steps = longest if number % 4 == 0 else int(random.integers(1, longest + 1))
            made, begin = trajectory(seed * 10**6 + number, steps), time.monotonic()
            try:
                writer.add(made)
            except StoreError:
                return
            file.write(ENTRY.pack(begin, time.monotonic(), steps))


def learn(section: dict[str, Any], batches: int, lose: int | None, actors: list[int]) -> list[Any]:
    """Take so many global batches."""
    seen = []
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        dist.barrier()
        time.sleep(1.0)  # actors come as far ahead as they may
        for number in range(batches):
            begin = time.monotonic()
            batch = replay.sample()
            seen.append((begin, time.monotonic(), batch.trajectory_id.tolist()))
            for actor in actors if number == lose and dist.get_rank() == 2 else []:
                kill(actor)
        dist.barrier()
    return seen


# ---- waits for a rate limiter, and their ends ----------------------------------------------------------


def tried(replay: Replay) -> list[Any]:
    """What comes of a sample, and after how many seconds."""
    begin = time.monotonic()
    try:
        what = sorted(replay.sample().trajectory_id.tolist())
    except GearError as error:
        what = f"{type(error).__name__}: {error}"
    return [what, time.monotonic() - begin]


def late() -> list[Any]:
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


def collecting() -> list[Any]:
    """A rank that writes must not wait for itself, and so no process does."""
    with Replay(section_of("uniform", max_times_sampled=1), schemas={"main": SCHEMA}) as replay:
        if rank == 3:
            writer = replay.writer()
        dist.barrier()
        found = [tried(replay), replay.can_sample()]
        for number in range(12 if rank == 3 else 0):
            writer.add(trajectory(number, 5))
        return [*found, replay.can_sample(), tried(replay), tried(replay)]


def acting(folder: Path) -> dict[str, Any]:
    """Every rank adds as long as nothing can be sampled, also after a checkpoint."""
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


def ended() -> list[Any]:
    """There are items for two batches; one node ends while the threads of both wait for the third."""
    section = {**section_of("uniform", max_times_sampled=1), "prefetch": 1}
    with Replay(section, schemas={"main": SCHEMA}) as replay:
        for number in range(6):
            replay.add(trajectory(10 * rank + number, 5))
        dist.barrier()
        return [tried(replay) for _ in range(2 if rank >= 2 else 3)]


wanted = json.loads(Path(sys.argv[-1]).read_text())
out, phases = Path(wanted["out"]), wanted["phases"]
actors = {  # are started before there are threads
    name: [
        in_child(lambda n=name, p=phase, i=i: act(p["section"], out / f"{n}.actor{i}", i + 1))
        for i in range(10 * rank, 10 * rank + phase["actors"][rank])
    ]
    for name, phase in phases.items()
}
dist.init_process_group("gloo")
found: dict[str, Any] = {
    "cases": {name: rest(section, Path(at), state) for name, (section, at, state) in wanted["cases"].items()},
    "phases": {
        name: learn(phase["section"], phase["batches"], phase["lose"], actors[name])
        for name, phase in phases.items()
    },
}
if phases:
    found |= {"late": late(), "collecting": collecting(), "acting": acting(out), "ended": ended()}
(out / f"{rank}.json").write_text(json.dumps(found))
dist.destroy_process_group()
