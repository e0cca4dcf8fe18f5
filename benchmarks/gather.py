"""How fast batches are gathered, against a C loop of memcpy over the same rows.

    python benchmarks/gather.py --json F                  one thread: the op, and complete samples
    python benchmarks/gather.py --ranks 2 --json F        also: ranks at once

docs/performance-appendix.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from support.ranks import run_ranks
from support.report import Disturbance, document, print_table, write_json
from support.subject import Subject
from support.workloads import SIZES, WINDOWS, workload

KINDS = ("limit", "op", "sample", "index_select")
OP_BOUND = {"whole": 1.15, "frames": 1.15, "100": 1.4, "20": 2.2}  # times the limit, for B >= 128
FIXED_BOUND_US = 60.0  # of sample() above the op; judged at the smallest batch, where it is not hidden
RANKS_BOUND = 0.9  # of the rate of as many memcpy loops
_BLOCK_S = 0.04  # time of one kind before the next has its turn
RANKS_CASES = (
    ("W1", "whole", 128),
    ("W1", "whole", 512),
    ("W1", "100", 512),
    ("W1", "20", 1024),
    ("W3", "frames", 256),
)


@dataclass
class Row:
    """One measurement.

    Args:
        ms: Of a batch; median. CPU time of the thread for "op", "sample" and "index_select", wall time
            for the rest.
        limit_ms: Of the memcpy loop in the same run.
        ratio: Median of the ratios of neighbouring blocks.
        bound: What `judged` must not exceed; None where there is none.
        judged: The number that has the bound.
        extra: More about it.
    """

    workload: str
    window: str
    what: str
    B: int
    ms: float
    limit_ms: float
    ratio: float
    bound: float | None = None
    judged: float | None = None
    extra: dict[str, float] | None = None

    @property
    def holds(self) -> bool | None:
        return None if self.bound is None or self.judged is None else self.judged <= self.bound

    def to_json(self) -> dict[str, Any]:
        """Return the row with its extra numbers beside the others."""
        plain = {key: value for key, value in asdict(self).items() if key != "extra"}
        return {**plain, "holds": self.holds, **(self.extra or {})}


def alone(name: str, window: str, batch_size: int, scale: float, repeats: int) -> list[Row]:
    """Measure one thread: blocks of each kind in turn, each batch timed by itself."""
    subject = Subject(workload(name, scale), window, batch_size)
    measure = {kind: getattr(subject, kind) for kind in KINDS}
    count = _block(subject)
    blocks: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind in KINDS:
            blocks[kind].append(float(np.median(measure[kind](count)[0])) / 1e6)
    subject.close()
    ms = {kind: float(np.median(blocks[kind])) for kind in KINDS}
    limit = np.array(blocks["limit"])
    rows = []
    for kind in KINDS[1:]:
        ratios = np.array(blocks[kind]) / limit
        rows.append(Row(name, window, kind, batch_size, ms[kind], ms["limit"], float(np.median(ratios))))
    op, sample = rows[:2]
    if batch_size >= 128:
        op.bound, op.judged = OP_BOUND[window], op.ratio
    fixed = 1e3 * float(np.median(np.array(blocks["sample"]) - np.array(blocks["op"])))
    sample.extra = {"above_op_us": fixed}
    if batch_size == min(SIZES[name]):
        sample.bound, sample.judged = FIXED_BOUND_US, fixed
    return rows


def _block(subject: Subject) -> int:
    """Return how many batches make a block."""
    one = max(1e-6, float(np.median(subject.limit(8)[1])) / 1e9)
    return int(min(400, max(8, _BLOCK_S / one)))


def at_once(ranks: int, name: str, window: str, batch_size: int, scale: float, repeats: int) -> Row:
    """Measure ranks that sample at once, each `batch_size` samples, against as many memcpy loops at once."""
    found = run_ranks(ranks, rank_blocks, name, window, batch_size, scale, repeats)
    rates = {kind: sum(1 / np.array(of_rank[kind]) for of_rank in found) for kind in ("limit", "sample")}
    cpu = {
        kind: float(np.median([of_rank[kind + "_cpu"] for of_rank in found])) for kind in ("limit", "sample")
    }
    rate_ratio = float(np.median(rates["sample"] / rates["limit"]))
    ms = {kind: 1e3 * ranks / float(np.median(rate)) for kind, rate in rates.items()}
    what = "two_ranks" if ranks == 2 else f"{ranks}_ranks"
    row = Row(name, window, what, batch_size, ms["sample"], ms["limit"], 1 / rate_ratio)
    row.extra = {"rate_ratio": rate_ratio, "cpu_ratio": cpu["sample"] / cpu["limit"]}
    if window in ("whole", "frames"):  # in short windows the op itself may take longer than that
        row.bound, row.judged = 1 / RANKS_BOUND, row.ratio
    return row


def rank_blocks(
    name: str, window: str, batch_size: int, scale: float, repeats: int
) -> dict[str, list[float]]:
    """Measure on one rank: blocks that all ranks begin together. Returns seconds per batch of each block."""
    import torch
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    subject = Subject(workload(name, scale), window, batch_size * world_size, seed=rank)
    # Every rank takes the same number of batches, or they would wait for each other's selections for ever.
    count = torch.tensor(_block(subject))
    dist.broadcast(count, 0)
    times: dict[str, list[float]] = {"limit": [], "sample": [], "limit_cpu": [], "sample_cpu": []}
    for _ in range(repeats):
        for kind in ("limit", "sample"):
            measure = getattr(subject, kind)
            dist.barrier()
            begin = perf_counter()
            cpu, _ = measure(int(count))
            times[kind].append((perf_counter() - begin) / int(count))
            times[kind + "_cpu"].append(float(np.mean(cpu)) / 1e9)
    subject.close()
    return times


def run(
    *,
    quick: bool = False,
    ranks: int = 1,
    only: Sequence[str] = (),
    repeats: int = 15,
) -> list[Row]:
    """Measure everything that is asked for.

    Args:
        quick: Few trajectories, small batches and repeats: to see that it runs, not for numbers.
        ranks: Measure this many ranks at once as well, if more than 1.
        only: Workloads to measure; empty for all.
        repeats: Blocks of each kind.
    """
    scale, repeats = (0.02, 2) if quick else (1.0, repeats)
    names = [name for name in SIZES if not only or name in only]
    rows: list[Row] = []
    for name in names:
        for window in WINDOWS[name]:
            for size in SIZES[name][:1] if quick else SIZES[name]:
                rows += alone(name, window, size, scale, repeats)
                _say(f"{name} {window} B={size}")
    if ranks > 1:
        for name, window, size in RANKS_CASES[-1:] if quick else RANKS_CASES:
            if name in names:
                rows.append(at_once(ranks, name, window, size, scale, repeats))
                _say(f"{ranks} ranks: {name} {window} B={size}")
    return rows


def _say(text: str) -> None:
    print(f"gather: {text}", file=sys.stderr, flush=True)


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    columns = (
        "workload",
        "window",
        "what",
        "B",
        "ms",
        "limit ms",
        "ratio",
        "judged",
        "bound",
        "holds",
        "more",
    )
    lines = []
    for r in rows:
        more = " ".join(f"{key}={value:.3g}" for key, value in (r.extra or {}).items())
        lines.append(
            (r.workload, r.window, r.what, r.B, r.ms, r.limit_ms, r.ratio, r.judged, r.bound, r.holds, more)
        )
    print_table(columns, lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--ranks", type=int, default=1, help="measure this many ranks at once as well")
    parser.add_argument("--only", nargs="*", default=[], choices=sorted(SIZES), help="workloads")
    parser.add_argument("--repeats", type=int, default=15, help="blocks of each kind")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    disturbance = Disturbance()
    rows = run(
        quick=options.quick,
        ranks=options.ranks,
        only=options.only,
        repeats=options.repeats,
    )
    show(rows)
    taken = disturbance.taken()
    print(
        f"\nmeanwhile others used {taken['other_cores']} cores, the hypervisor took {taken['stolen_cores']}"
    )
    if options.json is not None:
        write_json(options.json, document(disturbance, [row.to_json() for row in rows]))


if __name__ == "__main__":
    main()
