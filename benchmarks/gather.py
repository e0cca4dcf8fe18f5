"""How fast batches are gathered, against a C loop of memcpy over the same rows.

    python benchmarks/gather.py --json F                  one thread: the op, and complete samples
    python benchmarks/gather.py --ranks 2 --json F        also: ranks at once

docs/performance-batches.md says what the columns mean.
"""

from __future__ import annotations

import numpy as np
from support.ranks import run_ranks
from support.report import Report, Row, judge, print_rows, say
from support.subject import Subject
from support.turns import against_limit, block_size, in_turns, of_ranks, rank_blocks
from support.workloads import SIZES, WINDOWS, workload

KINDS = ("limit", "op", "sample", "index_select")
OP_BOUND = {"whole": 1.15, "frames": 1.15, "100": 1.4, "20": 2.2}  # times the limit, for B >= 128
FIXED_BOUND_US = (
    60.0  # of sample() above the op; judged at the smallest batch, where it is not hidden
)
RANKS_BOUND = 0.9  # of the rate of as many memcpy loops
RANKS_CASES = (
    ("W1", "whole", 128),
    ("W1", "whole", 512),
    ("W1", "100", 512),
    ("W1", "20", 1024),
    ("W3", "frames", 256),
)


def alone(name: str, window: str, batch_size: int, scale: float, repeats: int) -> list[Row]:
    """Measure one thread: blocks of each kind in turn, each batch timed by itself."""
    subject = Subject(workload(name, scale), window, batch_size)
    runs = {kind: getattr(subject, kind) for kind in KINDS}
    ms = in_turns(runs, dict.fromkeys(KINDS, block_size(subject.limit)), repeats)
    subject.close()
    rows = against_limit(
        {"workload": name, "window": window, "what": "", "B": batch_size}, "what", ms
    )
    op = rows["op"]
    sample = rows["sample"]
    if batch_size >= 128:
        judge(op, op["ratio"], OP_BOUND[window], op["ratio"] <= OP_BOUND[window])
    fixed = 1e3 * float(np.median(ms["sample"] - ms["op"]))
    if batch_size == min(SIZES[name]):
        judge(sample, fixed, FIXED_BOUND_US, fixed <= FIXED_BOUND_US)
    sample["above_op_us"] = fixed
    return list(rows.values())


def at_once(ranks: int, name: str, window: str, batch_size: int, scale: float, repeats: int) -> Row:
    """Measure ranks that sample at once, each `batch_size` samples, against as many memcpy loops at
    once.
    """
    found = run_ranks(ranks, on_a_rank, name, window, batch_size, scale, repeats)
    ms, cpu = of_ranks(found)
    what = "two_ranks" if ranks == 2 else f"{ranks}_ranks"
    case = {"workload": name, "window": window, "what": "", "B": batch_size}
    row = against_limit(case, "what", {what: ranks * ms["sample"], "limit": ranks * ms["limit"]})[
        what
    ]
    if window in ("whole", "frames"):  # in short windows the op itself may take longer than that
        judge(row, row["ratio"], 1 / RANKS_BOUND, row["ratio"] <= 1 / RANKS_BOUND)
    return {**row, "rate_ratio": 1 / row["ratio"], "cpu_ratio": cpu["sample"] / cpu["limit"]}


def on_a_rank(
    name: str, window: str, batch_size: int, scale: float, repeats: int
) -> dict[str, list[float]]:
    """Measure one of the ranks. Returns the times of its blocks."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    subject = Subject(workload(name, scale), window, batch_size * world_size, seed=rank)
    count = torch.tensor(block_size(subject.limit))
    dist.broadcast(count, 0)
    times = rank_blocks({"limit": subject.limit, "sample": subject.sample}, int(count), repeats)
    subject.close()
    return times


def main() -> None:
    """Run from the command line."""
    report = Report(
        __doc__,
        ranks=(1, "measure this many ranks at once as well"),
        only=(tuple(sorted(SIZES)), "workloads"),
        repeats=(15, "blocks of each kind"),
    )
    quick = report.options.quick
    ranks = report.options.ranks
    scale, repeats = (0.02, 2) if quick else (1.0, report.options.repeats)
    rows: list[Row] = []
    for name in report.options.only:
        for window in WINDOWS[name]:
            for size in SIZES[name][:1] if quick else SIZES[name]:
                rows += alone(name, window, size, scale, repeats)
                say(f"{name} {window} B={size}")
    for name, window, size in RANKS_CASES[-1:] if quick else RANKS_CASES:
        if ranks > 1 and name in report.options.only:
            rows.append(at_once(ranks, name, window, size, scale, repeats))
            say(f"{ranks} ranks: {name} {window} B={size}")
    print_rows(rows, "workload window what B ms limit_ms ratio judged bound holds more")
    report.meanwhile()
    report.write(rows)


if __name__ == "__main__":
    main()
