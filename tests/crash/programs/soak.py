"""A long run of one rank and two writers: memory, file descriptors and /dev/shm must not grow.

    PYTHONPATH=$PWD:tests/support nice -n 10 python tests/crash/programs/soak.py --seconds 1800

One replay has a table with `remove: fifo` and one with `remove: uniform`. Each writer adds
trajectories of 1 to 5,000 steps to both and attaches anew from time to time; the rank samples both
with priorities and checks every row. The parent reads /proc of the three processes whenever EVERY
more trajectories were added, until the run has taken --seconds and has LEAST readings, however long
a slow machine takes for them. The first quarter is left out as the warm-up; of the others the
median of the last third is compared with that of the first. Prints a line of JSON.
"""

import gc
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from process_support import command_options, end_with
from torn import BATCH, COLUMNS, FIELDS, rows, start, wrong

from deepspeed_gear import Replay, TrajectoryWriter
from deepspeed_gear.store.records import Control

MOST_STEPS = 5000
WRITERS = 2
ATTACH_EVERY = 100
# trajectories added from one reading of /proc to the next, and readings
EVERY = 50
LEAST = 32
PREFIX = f"gearsoak{os.environ.get('GEAR_SOAK', '')}"
REMOVE = {"oldest": "fifo", "any": "uniform"}  # by table
SECTION: dict[str, Any] = {
    "tables": {
        name: {
            "capacity_steps": 60_000,
            "capacity_trajectories": 400,
            "max_length": MOST_STEPS,
            "writers": WRITERS + 1,
            "remove": remove,
            "schema": {"columns": COLUMNS},
        }
        for name, remove in REMOVE.items()
    },
    "sampler": {
        "kind": "mixture",
        "shares": {"oldest": 0.5, "any": 0.5},
        "of": {"kind": "prioritized", "unit": "step"},
    },
    "fields": FIELDS,
    "batch_size": BATCH,
    "shared_memory": {"prefix": PREFIX},
    "timeout_s": 60.0,
}
# Trajectories that were added, and how often writers have attached, in memory that all share; an
# entry each.
COUNTS = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)
ATTACHED = WRITERS


def read(pipe: Connection) -> None:
    """Sample, check and report priorities until the parent asks for what was found."""
    random = np.random.default_rng(7)
    found = {"batches": 0, "wrong": 0}
    with Replay(SECTION) as replay:
        pipe.send("made")
        while any(table.num_steps < 2 * MOST_STEPS for table in replay.tables.values()):
            time.sleep(0.01)
        while not pipe.poll():
            batch = replay.sample()
            found["wrong"] += wrong(batch)
            found["batches"] += 1
            replay.update_priorities(
                batch, torch.from_numpy(random.random(BATCH, np.float32) + 0.01)
            )
        found["added"] = sum(
            int(table.control[Control.INSERTED]) for table in replay.tables.values()
        )
    pipe.send(found)


def write(pipe: Connection, number: int) -> None:
    """Add to both tables at full speed until the end of the run."""
    random = np.random.default_rng(number)
    pool = [
        rows(int(random.integers(1 << 40)), int(random.integers(1, MOST_STEPS + 1)))
        for _ in range(200)
    ]
    TrajectoryWriter.attach(SECTION, table="any", wait_s=60).close()  # everything is imported now
    pipe.send("attached")
    while True:
        # closed writers are in reference cycles: their maps stay until these are gathered
        gc.collect()
        with (
            TrajectoryWriter.attach(SECTION, table="oldest", wait_s=60) as first,
            TrajectoryWriter.attach(SECTION, table="any", wait_s=60) as second,
        ):
            COUNTS[ATTACHED + number] += 1
            for _ in range(ATTACH_EVERY):
                for writer in (first, second):
                    writer.add(pool[int(random.integers(len(pool)))])
                    COUNTS[number] += 1


def measure(pid: int) -> dict[str, float]:
    """Return anonymous and shared resident memory in MiB, file descriptors, maps and threads of a
    process.
    """
    of = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (of / "status").read_text().splitlines())
    return {
        "anonymous_mib": int(status["RssAnon"].split()[0]) / 1024,
        "shared_mib": int(status["RssShmem"].split()[0]) / 1024,
        "descriptors": len(os.listdir(of / "fd")),
        "maps": (of / "maps").read_bytes().count(b"\n"),
        "threads": int(status["Threads"]),
    }


def shared_memory() -> dict[str, float]:
    """Return number and MiB of the run's files in /dev/shm."""
    sizes = [path.stat().st_blocks / 2048 for path in Path("/dev/shm").glob(f"{PREFIX}-*")]
    return {"files": len(sizes), "file_mib": sum(sizes)}


# ---- what may grow, and how far ------------------------------------------------------------------

# A writer that attaches anew has 6 descriptors and 4 maps fewer for an instant. Its shared memory
# is what it has touched since then, and is not judged.
MOST_GROWTH = {
    "anonymous_mib": 4.0,
    "descriptors": 6,
    "maps": 8,
    "threads": 0,
    "files": 0,
    "file_mib": 0.0,
}


def growth(series: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return by quantity the medians of the first and of the last third behind the warm-up."""
    kept = series[len(series) // 4 :]
    third = max(1, len(kept) // 3)
    parts = kept[:third], kept[-third:]
    return {
        key: [statistics.median(entry[key] for entry in part) for part in parts]
        for key in series[0]
    }


def grown(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Name what grew by more than it may."""
    return [
        f"{who}: {key} {first:g} -> {last:g}"
        for who, quantities in found.items()
        for key, (first, last) in quantities.items()
        if key in MOST_GROWTH and last - first > MOST_GROWTH[key]
    ]


def run(seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run rank and writers; return what was found, and what grew."""
    rank = start(read)
    processes = {"rank": rank[0]}
    try:
        assert rank[1].recv() == "made"
        for number in range(WRITERS):
            processes[f"writer {number}"], pipe = start(write, number)
            assert pipe.recv() == "attached"
        series: dict[str, list[dict[str, float]]] = {
            "/dev/shm": [],
            **{who: [] for who in processes},
        }
        begin = time.monotonic()
        told = 0.0
        while time.monotonic() - begin < seconds or len(series["rank"]) < LEAST:
            wanted = COUNTS[:WRITERS].sum() + EVERY
            while COUNTS[:WRITERS].sum() < wanted:
                time.sleep(0.01)
                for who, process in processes.items():
                    assert process.is_alive(), f"{who} has ended"
            for who, process in processes.items():
                series[who].append(measure(process.pid or 0))
            series["/dev/shm"].append(shared_memory())
            if time.monotonic() - begin > told:
                told += 60.0
                tell(json.dumps({who: entries[-1] for who, entries in series.items()}))
        for who, process in processes.items():
            if who != "rank":
                process.terminate()
                process.join()
        rank[1].send("end")
        counts = rank[1].recv()
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    found = {who: growth(entries) for who, entries in series.items()}
    left = [path.name for path in Path("/dev/shm").glob(f"{PREFIX}-*")]
    counts["attached"] = int(COUNTS[ATTACHED : ATTACHED + WRITERS].sum())
    return {**counts, "medians": found, "grown": grown(found), "left": left}


if __name__ == "__main__":
    seconds = command_options(__doc__, seconds=1800.0).seconds
    found = run(seconds, lambda text: print(text, file=sys.stderr, flush=True))
    end_with(found, "wrong", "grown", "left")
