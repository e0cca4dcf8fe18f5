"""What `gear watch` costs the job that it watches: batches with it and without, in turns.

python benchmarks/watch_cost.py [--turns 3] [--seconds 10] [--every 1.0] [--json F] [--quick]

Two ranks sample a prioritized table as fast as they can, which no training does, while the watch
runs every other turn. The CPU time of a batch is that of the ranks alone: where the machine has
fewer free cores than processes, the watch takes a part of theirs, and the wall time shows it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from support.report import Report, print_rows

from deepspeed_gear import Column, Replay, Schema

BATCH = 256
RANKS = 2
NAME = os.environ.setdefault("WATCH_COST_RUN", f"watch-cost-{os.getpid()}")  # on all ranks
START_S = 300.0  # longest wait for the first frame


def section(items: int) -> dict[str, Any]:
    """Return a gear section with a table of so many steps."""
    return {
        "tables": {"main": {"capacity_steps": items, "capacity_trajectories": items // 50}},
        "fields": {"observation": {}},
        "sampler": {"kind": "prioritized", "unit": "step", "alpha": 0.6, "beta": 0.4},
        "batch_size": BATCH,
        "shared_memory": {"run": NAME, "prefix": NAME},
    }


def watch(page: Path, every_s: float) -> subprocess.Popen[bytes]:
    """Start a watch, and return when it has written its first frame."""
    page.unlink(missing_ok=True)
    program = [sys.executable, "-m", "deepspeed_gear.cli.main", "watch", NAME]
    child = subprocess.Popen([*program, "--html", str(page), "--every", str(every_s)])
    until = time.monotonic() + START_S
    while not page.exists():
        assert child.poll() is None, "the watch has ended"
        assert time.monotonic() < until, "the watch has written no frame"
        time.sleep(0.05)
    return child


def cpu_s(process: int) -> float:
    """Return the CPU time of a running process."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def sample_for(replay: Replay, seconds: float) -> tuple[int, float, float]:
    """Sample until rank 0's time is over; return batches, wall and CPU time of this rank."""
    begin = time.perf_counter()
    cpu = time.process_time()
    count = 0
    goes_on = torch.ones(1)
    while goes_on:
        for _ in range(50):
            batch = replay.sample()
            replay.update_priorities(batch, torch.ones(batch.num_samples))
        count += 50
        goes_on[0] = float(time.perf_counter() - begin < seconds)
        dist.broadcast(goes_on, 0)
    return count, time.perf_counter() - begin, time.process_time() - cpu


def rank(index: int, port: int, items: int, turns: int, seconds: float, every_s: float) -> None:
    """Run the turns on a rank; rank 0 starts and ends the watches, and prints the rows."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=index, world_size=RANKS)
    schema = Schema([Column("observation", "float32", (8,))])
    rows = []
    config = section(items)
    folder = tempfile.TemporaryDirectory()
    with Replay(config, schemas={"main": schema}) as replay, folder as at:
        if index == 0:
            for _ in range(items // 50):
                replay.add({"observation": np.zeros((50, 8), np.float32)})
        dist.barrier()
        sample_for(replay, min(seconds, 2.0))
        for turn in range(2 * turns):
            watched = bool(turn % 2)
            child = watch(Path(at, "page.html"), every_s) if watched and index == 0 else None
            dist.barrier()
            used = 0.0 if child is None else cpu_s(child.pid)
            batches, wall_s, own_s = sample_for(replay, seconds)
            if child is not None:
                used = cpu_s(child.pid) - used
                child.terminate()
                child.wait()
            cpu = torch.tensor(own_s)
            dist.all_reduce(cpu)
            rows.append(
                {
                    "turn": turn // 2,
                    "watched": watched,
                    "batches_per_s": batches / wall_s,
                    "cpu_us": 1e6 * float(cpu) / RANKS / batches,
                    "watch_cpu": used / wall_s,
                    "load": os.getloadavg()[0],
                }
            )
    if index == 0:
        torch.save(rows, os.environ["WATCH_COST_ROWS"])
    dist.destroy_process_group()


def measure(items: int, turns: int, seconds: float, every_s: float) -> list[dict[str, Any]]:
    """Return a row for each turn."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.pt")
        os.environ["WATCH_COST_ROWS"] = str(rows)
        port = 20000 + os.getpid() % 10000
        processes.spawn(rank, (port, items, turns, seconds, every_s), nprocs=RANKS)
        found: list[dict[str, Any]] = torch.load(rows)
    return found


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        turns=(3, "turns with the watch, and as many without"),
        seconds=(10.0, "of a turn"),
        every=(1.0, "seconds between two frames"),
    )
    given = report.options
    items = 20_000 if given.quick else 1_000_000
    turns = 1 if given.quick else given.turns
    rows = measure(items, turns, 0.5 if given.quick else given.seconds, given.every)
    print_rows(rows)
    report.write(rows, items=items, batch=BATCH, ranks=RANKS)


if __name__ == "__main__":
    main()
