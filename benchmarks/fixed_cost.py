"""Where the microseconds of Replay.sample() go that are not the op's.

    python benchmarks/fixed_cost.py [--json F] [--quick]

Every part is timed by itself, without the parts that it calls. "warm": windows of 20, B = 32, a batch that
fits the caches. "cold": whole trajectories, B = 512, where every batch has driven the interpreter, NumPy and
the tree out of the caches before the next call.
"""

from __future__ import annotations

import argparse
import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from support.report import Disturbance, document, print_table, write_json
from support.workloads import workload

from deepspeed_gear.batching.gather import Gatherer
from deepspeed_gear.replay.batch_assembler import BatchAssembler
from deepspeed_gear.replay.batch_loader import BatchLoader
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.select import SelectionMaker
from deepspeed_gear.sampling.selection_readers import SelectionReaders
from deepspeed_gear.sampling.sum_tree import ItemMasses
from deepspeed_gear.store.store_lock import StoreLock

OP = "the op: gather_"
PARTS: tuple[tuple[type, str, str], ...] = (
    (BatchLoader, "next", "sample(): metrics, position"),
    (BatchLoader, "_make", "which selection and part are next"),
    (BatchStream, "get", "looking for the selection in the ring"),
    (StoreLock, "__enter__", "taking the lock"),
    (StoreLock, "__exit__", "giving the lock back"),
    (SelectionReaders, "late", "room in the ring of selections"),
    (SelectionMaker, "select", "the selection's words"),
    (SelectionMaker, "_drawn", "draw_"),
    (ItemMasses, "resolve", "resolve_"),
    (BatchAssembler, "assemble", "records, Batch"),
    (Gatherer, "gather", "ring, autograd versions"),
    (Gatherer, "fill", OP),
)
CASES = {"warm": ("20", 32, 3000), "cold": ("whole", 512, 150)}


class Timers:
    """Times of nested calls, each without those that it makes. One thread."""

    def __init__(self) -> None:
        self.spent: dict[str, list[int]] = defaultdict(list)
        self._inner = [0]
        self._cost = 0
        self._cost = self._calibrate()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a timer."""

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._inner.append(0)
            begin = perf_counter_ns()
            try:
                return function(*arguments, **options)
            finally:
                taken = perf_counter_ns() - begin
                self.spent[name].append(taken - self._inner.pop())
                self._inner[-1] += taken + self._cost

        return timed

    def _calibrate(self) -> int:
        """Return what a timer adds to the time of the caller, in ns."""
        functions = (lambda: None), self.wrap("", lambda: None)
        costs = []
        for function in functions:
            blocks = []
            for _ in range(50):
                begin = perf_counter_ns()
                for _ in range(100):
                    function()
                blocks.append((perf_counter_ns() - begin) / 100)
            costs.append(min(blocks))
        return max(0, int(costs[1] - costs[0] - min(self.spent.pop(""))))


def measure(window: str, batch_size: int, count: int, scale: float) -> dict[str, float]:
    """Return the median microseconds of each part of a sample."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in PARTS]
    timers = Timers()
    with workload("W1", scale).replay(window, batch_size) as replay:
        try:
            for owner, name, part in PARTS:
                setattr(owner, name, timers.wrap(part, getattr(owner, name)))
            for _ in range(5):
                replay.sample()
            timers.spent.clear()
            for _ in range(count):
                replay.sample()
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)
    return {part: float(np.median(times)) / 1e3 for part, times in timers.spent.items()}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure both cases. Returns a row per part, and one for everything but the op."""
    scale = 0.02 if quick else 1.0
    found = {
        case: measure(window, 32 if quick else size, 20 if quick else count, scale)
        for case, (window, size, count) in CASES.items()
    }
    parts = [part for _, _, part in PARTS if part != OP]
    rows: list[dict[str, Any]] = [
        {"part": part, **{f"{case}_us": found[case][part] for case in CASES}} for part in parts
    ]
    rows.sort(key=lambda row: -row["warm_us"])
    sums = {f"{case}_us": sum(found[case][part] for part in parts) for case in CASES}
    return [
        *rows,
        {"part": "sum without the op", **sums},
        {"part": OP, **{f"{c}_us": found[c][OP] for c in CASES}},
    ]


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
    print_table(("part", "warm us", "cold us"), [list(row.values()) for row in rows])
    if options.json is not None:
        write_json(options.json, document(disturbance, rows))


if __name__ == "__main__":
    main()
