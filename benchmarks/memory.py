"""What a second rank adds to the memory of a store.

python benchmarks/memory.py [--json F] [--quick]
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from support.ranks import run_ranks
from support.report import Report, Row, print_rows
from support.workloads import workload

RANKS_BOUND = 0.05


def memory_of_rank(scale: float) -> dict[str, int]:
    """Hold W1, touch all of it by sampling, and read what the kernel counts for this process.
    Collective.
    """
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
    """Return this process's share of memory in bytes: a page that n processes map counts 1/n in
    each.
    """
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {key: found[key] for key in ("Pss", "Pss_Shmem", "Pss_Anon")}


def ranks(scale: float) -> Row:
    """Compare the shared memory of two ranks with that of one."""
    one, two = (run_ranks(n, memory_of_rank, scale) for n in (1, 2))
    total = {n: sum(of_rank["Pss_Shmem"] for of_rank in found) for n, found in ((1, one), (2, two))}
    added = total[2] / total[1] - 1
    row = {"what": "added by a second rank, W1", "value": added, "bound": RANKS_BOUND}
    row |= {"holds": added < RANKS_BOUND, "shared_bytes_1": total[1], "shared_bytes_2": total[2]}
    return {**row, "private_bytes_a_rank": max(of_rank["Pss_Anon"] for of_rank in two)}


def main() -> None:
    """Run from the command line."""
    report = Report(__doc__)
    scale = 0.02 if report.options.quick else 1.0
    rows = [ranks(scale)]
    print_rows(rows, "what value bound holds more")
    report.write(rows)


if __name__ == "__main__":
    main()
