"""What is paid besides the op: the parts of Replay.sample(), the goals of hindsight, opening a data
set.

    python benchmarks/fixed_cost.py [--json F] [--quick]

Every part is timed by itself, without the parts that it calls. "warm": windows of 20, B = 32, a
batch that fits the caches. "cold": whole trajectories, B = 512, where every batch has driven the
interpreter, NumPy and the tree out of the caches before the next call.
"""

from __future__ import annotations

import functools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from support.report import Report, Row, print_rows
from support.turns import median_us
from support.workloads import workload

from deepspeed_gear import Column, DatasetWriter, Replay, Schema
from deepspeed_gear.batching.gather import Gatherer
from deepspeed_gear.replay.batch_assembler import BatchAssembler
from deepspeed_gear.replay.batch_loader import BatchLoader
from deepspeed_gear.sampling.batch_stream import BatchStream, NativeStream

OP = "the native call: the selection and the gather"
PARTS: tuple[tuple[type, str, str], ...] = (
    (BatchLoader, "next", "sample(): metrics, position"),
    (BatchLoader, "_make", "which part is next"),
    (BatchStream, "take", "whether the selection is plain"),
    (NativeStream, "take", "its arguments and results"),
    (BatchAssembler, "assemble", "Batch"),
    (Gatherer, "take_gathered", "ring"),
)
FIXED_BOUND_US = 8.0
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

    @contextmanager
    def over(self, parts: Sequence[tuple[Any, str, str]]) -> Iterator[None]:
        """Time functions, wherever they are called from: the owner, the name and the
        title of each.
        """
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
        try:
            for owner, name, part in parts:
                setattr(owner, name, self.wrap(part, getattr(owner, name)))
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

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
    timers = Timers()
    with workload("W1", scale).replay(window, batch_size) as replay, timers.over(PARTS):
        loader = replay._loader
        assert isinstance(loader, BatchLoader)
        native = loader._streams[0]._native
        assert native is not None
        native._take = timers.wrap(OP, native._take)
        for _ in range(5):
            replay.sample()
        timers.spent.clear()
        for _ in range(count):
            replay.sample()
    return {part: float(np.median(times)) / 1e3 for part, times in timers.spent.items()}


def goals_us(batch_size: int, count: int) -> float:
    """Return the time of drawing the goals of a batch, where hindsight relabels four of five
    samples.
    """
    columns = [
        Column("goal", "float32", (3,), rows="T+1"),
        Column("reward", "float32", (), "reward"),
    ]
    section = {
        "tables": {"main": {"capacity_steps": 10_000}},
        "sampler": {"unit": "step"},
        "hindsight": {},
        "fields": {"goal": {"hindsight": "goal"}},
        "batch_size": batch_size,
    }
    with Replay(section, schemas={"main": Schema(columns)}) as replay:
        for _ in range(100):
            replay.add({"goal": np.zeros((51, 3), np.float32), "reward": np.zeros(50, np.float32)})
        records = replay.sample().host_resolutions.clone()
        draw = replay._parts.assembler._relabelling.draw
        return median_us(lambda: draw(1, records), count)


def opening_us(sampler: dict[str, str], num_trajectories: int, count: int) -> float:
    """Return the time of `Replay()` over a data set of trajectories of 10 steps, until it can
    sample.
    """
    columns = [Column("observation", "float32", (4,)), Column("reward", "float32")]
    rows = {"observation": np.zeros((10, 4), np.float32), "reward": np.zeros(10, np.float32)}
    with tempfile.TemporaryDirectory() as folder:
        with DatasetWriter(f"{folder}/data", Schema(columns)) as writer:
            for _ in range(num_trajectories):
                writer.add(rows)
        section = {
            "data": f"{folder}/data",
            "sampler": sampler,
            "fields": {"reward": {}},
            "batch_size": 32,
        }
        times = []
        for _ in range(count):
            begin = perf_counter_ns()
            replay = Replay(section)
            times.append((perf_counter_ns() - begin) / 1e3)
            replay.close()
    return float(np.median(times))


def one_sample_us(count: int) -> dict[str, float]:
    """Return the times of the calls for a batch of one sample, whose rows take no time.

    The samples are single steps of the five columns of W2, whose priorities are reported.
    """
    content = workload("W2", 0.02)
    calls: dict[str, Callable[[Replay], object]] = {
        "uniform": Replay.sample,
        "prioritized": Replay.sample,
        "prioritized, and update_priorities()": _sample_and_report,
    }
    found = {}
    for name, call in calls.items():
        section = content.steps_section(1, {"kind": name.partition(",")[0]})
        with content.filled(section) as replay:
            found[f"sample() of B = 1, 5 columns, {name}"] = median_us(partial(call, replay), count)
    return found


def _sample_and_report(replay: Replay) -> None:
    batch = replay.sample()
    replay.update_priorities(batch, batch.is_weight)


def calls(quick: bool) -> list[Row]:
    """Measure other calls. Returns a row each, with its bound."""
    trajectories, times = (100, 1) if quick else (100_000, 5)
    found = {
        name: (us, 2 * FIXED_BOUND_US if "update" in name else FIXED_BOUND_US)
        for name, us in one_sample_us(50 if quick else 5000).items()
    }
    found["goals of hindsight, B = 256"] = goals_us(256, 20 if quick else 2000), 20.0
    for kind, unit in (("uniform", "step"), ("prioritized", "trajectory"), ("prioritized", "step")):
        us = opening_us({"kind": kind, "unit": unit}, trajectories, times)
        name = f"Replay() over {trajectories:,} trajectories, {kind} by {unit}"
        found[name] = us, 500e3
    return [
        {"call": name, "us": us, "bound": b, "holds": us <= b} for name, (us, b) in found.items()
    ]


def parts(quick: bool) -> list[Row]:
    """Measure both cases. Returns a row per part, and one for everything but the op."""
    scale = 0.02 if quick else 1.0
    found = {
        case: measure(window, 32 if quick else size, 20 if quick else count, scale)
        for case, (window, size, count) in CASES.items()
    }
    names = [part for _, _, part in PARTS if part != OP]
    rows: list[Row] = [
        {"part": part, **{f"{case}_us": found[case][part] for case in CASES}} for part in names
    ]
    rows.sort(key=lambda row: -row["warm_us"])
    sums = {f"{case}_us": sum(found[case][part] for part in names) for case in CASES}
    op = {f"{case}_us": found[case][OP] for case in CASES}
    return [*rows, {"part": "sum without the op", **sums}, {"part": OP, **op}]


def main() -> None:
    """Run from the command line."""
    report = Report(__doc__)
    torch.set_num_threads(1)
    of_parts = parts(report.options.quick)
    of_calls = calls(report.options.quick)
    print_rows(of_parts)
    print_rows(of_calls)
    report.write([*of_parts, *of_calls])


if __name__ == "__main__":
    main()
