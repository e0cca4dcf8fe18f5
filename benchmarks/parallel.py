"""What a batch costs a rank in a grid: two replicas of two tensor ranks against two replicas; an inner stage.

    python benchmarks/parallel.py [--json F] [--quick]

Every rank takes turns with the others, as under an engine. CPU time is that of the thread; wall time says how
long a rank is held up, and counts what the other ranks do on the same cores.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from support.ranks import run_ranks
from support.report import Disturbance, document, print_table, write_json
from support.workloads import workload

from deepspeed_gear import Replay
from deepspeed_gear.distributed.read_needs import grid
from deepspeed_gear.engine.attach import nothing
from deepspeed_gear.replay import BatchInfo

GRIDS: dict[str, dict[str, int]] = {
    "dp2": {"data": 2},
    "tp2 x dp2": {"data": 2, "tensor": 2},
    "pp3": {"pipe": 3},
}
ENDS = {"inputs": ["observation"], "labels": ["action"]}
MICRO, WINDOW, STEPS = 128, "20", 2000
RATIO_BOUND, INNER_BOUND_US = 1.3, 20.0


def measure(name: str, micro: int, steps: int, scale: float) -> dict[str, float]:
    """Take batches on this rank; return medians in microseconds."""
    places, rank = grid(GRIDS[name]), dist.get_rank()
    place, load = places[rank], workload("W1", scale)
    section = load.section(WINDOW, 1, pipeline=ENDS)
    del section["batch_size"]
    info = BatchInfo(micro, 1, place.data_world, place.tensor_world, place.pipe_world)
    turns = "schedule" if place.pipe_world > 1 else "micro"
    with Replay(section, schemas={"main": load.schema}, info=info, place=place, turns=turns) as replay:
        if rank == 0:
            for trajectory in load.trajectories():
                replay.add(trajectory)
        dist.barrier()
        take = replay.sample if turns == "micro" else lambda: replay.agree(part)
        part = replay.sample if place.reads else nothing
        times = np.zeros((steps, 2))
        for step in range(steps):
            begin = time.perf_counter_ns(), time.thread_time_ns()
            take()
            times[step] = time.perf_counter_ns() - begin[0], time.thread_time_ns() - begin[1]
        begin_ns = time.perf_counter_ns()
        for _ in range(steps):
            nothing()
        plain_us = (time.perf_counter_ns() - begin_ns) / steps / 1e3
        dist.barrier()
    wall, cpu = np.median(times[steps // 10 :], axis=0) / 1e3
    return {"wall_us": float(wall), "cpu_us": float(cpu), "inner": not place.reads, "plain_us": plain_us}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure all grids. Returns a row per grid and kind of rank."""
    sizes = (8, 50, 0.01) if quick else (MICRO, STEPS, 0.5)
    rows: list[dict[str, Any]] = []
    for name, worlds in GRIDS.items():
        found = run_ranks(int(np.prod(list(worlds.values()))), measure, name, *sizes)
        for inner in (False, True):
            ranks = [each for each in found if each["inner"] == inner]
            if ranks:
                kind = "inner stage" if inner else "reads"
                means = {key: float(np.mean([each[key] for each in ranks])) for key in ("wall_us", "cpu_us")}
                rows.append({"grid": name, "ranks": kind, **means})
                if inner:
                    rows[-1]["gear_sample_us"] = ranks[0]["plain_us"]
    base = rows[0]["cpu_us"]
    for row in rows:
        if row["grid"] == "tp2 x dp2":
            row.update(
                ratio=row["cpu_us"] / base, bound=RATIO_BOUND, holds=row["cpu_us"] <= RATIO_BOUND * base
            )
        elif row["ranks"] == "inner stage":
            row.update(bound=INNER_BOUND_US, holds=row["gear_sample_us"] < INNER_BOUND_US)
    return rows


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    disturbance = Disturbance()
    rows = run(options.quick)
    heads = ("grid", "ranks", "wall_us", "cpu_us", "ratio", "gear_sample_us")
    print_table(heads, [[row.get(head) for head in heads] for row in rows])
    if options.json is not None:
        write_json(options.json, document(disturbance, rows))


if __name__ == "__main__":
    main()
