"""What the store costs in memory, and what a second rank adds.

python benchmarks/memory.py [--json F] [--quick]
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from support.ranks import run_ranks
from support.report import Disturbance, document, print_table, write_json
from support.workloads import workload

STORE_BOUND, RANKS_BOUND = 1.05, 0.05


@dataclass
class Row:
    """One measurement.

    Args:
        value: What has the bound.
        bound: What it must not exceed.
        extra: More about it.
    """

    what: str
    value: float
    bound: float
    holds: bool
    extra: dict[str, Any]


def store(scale: float) -> Row:
    """Compare the bytes of the whole store of W1 with the bytes of its columns."""
    stored = workload("W1", scale)
    with stored.replay("20", 128) as replay:
        found = replay.statistics()
    ratio = found["store_bytes"] / found["payload_bytes"]
    kept = ("store_bytes", "payload_bytes", "huge_bytes")
    return Row(
        "store over payload, W1", ratio, STORE_BOUND, ratio <= STORE_BOUND, {k: found[k] for k in kept}
    )


def memory_of_rank(scale: float) -> dict[str, int]:
    """Hold W1, touch all of it by sampling, and read what the kernel counts for this process. Collective."""
    before = proportional_memory()
    stored = workload("W1", scale)
    with stored.replay("whole", 8 * dist.get_world_size()) as replay:
        for _ in range(3 * len(replay) // (8 * dist.get_world_size()) + 1):
            replay.sample()
        for column in stored.schema:  # each rank maps every page, whatever it has drawn
            replay.tables["main"].tensor(column.name).sum()
        dist.barrier()
        after = proportional_memory()
        dist.barrier()
    return {key: after[key] - before[key] for key in after}


def proportional_memory() -> dict[str, int]:
    """Return this process's share of memory in bytes: a page that n processes map counts 1/n in each."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {key: found[key] for key in ("Pss", "Pss_Shmem", "Pss_Anon")}


def ranks(scale: float) -> Row:
    """Compare the shared memory of two ranks with that of one."""
    one, two = (run_ranks(n, memory_of_rank, scale) for n in (1, 2))
    total = {n: sum(of_rank["Pss_Shmem"] for of_rank in found) for n, found in ((1, one), (2, two))}
    added = total[2] / total[1] - 1
    private = max(of_rank["Pss_Anon"] for of_rank in two)
    extra = {"shared_bytes_1": total[1], "shared_bytes_2": total[2], "private_bytes_a_rank": private}
    return Row("added by a second rank, W1", added, RANKS_BOUND, added < RANKS_BOUND, extra)


def run(quick: bool = False) -> list[Row]:
    """Measure everything; `quick`: few trajectories."""
    scale = 0.02 if quick else 1.0
    return [store(scale), ranks(scale)]


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
    print_table(
        ("what", "value", "bound", "holds", "more"),
        [(r.what, r.value, r.bound, r.holds, " ".join(f"{k}={v}" for k, v in r.extra.items())) for r in rows],
    )
    if options.json is not None:
        lines = [{**{k: v for k, v in asdict(row).items() if k != "extra"}, **row.extra} for row in rows]
        write_json(options.json, document(disturbance, lines))


if __name__ == "__main__":
    main()
