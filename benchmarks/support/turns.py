"""Times of what takes turns: blocks of batches of each system, of one thread or of
ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, perf_counter_ns, thread_time_ns
from typing import Any

import numpy as np

from support.report import Row

Times = tuple[np.ndarray, np.ndarray]  # CPU and wall time of each batch, in ns
Run = Callable[[int], Times]  # makes so many batches
_BLOCK_S = 0.04  # time of one system before the next has its turn


def timed(
    run: Callable[[int], object], count: int, prepare: Callable[[int], object] | None = None
) -> Times:
    """Call `run(0)`, `run(1)`, ... and time each call; `prepare` is not in the time."""
    times = np.empty((2, count), np.int64)
    for turn in range(count):
        if prepare is not None:
            prepare(turn)
        cpu = thread_time_ns()  # a system call, unlike the wall clock: not within its time
        wall = perf_counter_ns()
        run(turn)
        times[1, turn] = perf_counter_ns() - wall
        times[0, turn] = thread_time_ns() - cpu
    return times[0], times[1]


def median_us(work: Callable[[], object], count: int) -> float:
    """Return the median wall time of a call in microseconds."""
    return float(np.median(timed(lambda _: work(), count)[1])) / 1e3


def block_size(run: Run) -> int:
    """Return how many batches make a block; the first ones warm up."""
    run(8)
    one = max(1e-6, float(np.median(run(8)[0])) / 1e9)
    return int(min(400, max(8, _BLOCK_S / one)))


def in_turns(
    runs: Mapping[str, Run], counts: Mapping[str, int], repeats: int
) -> dict[str, np.ndarray]:
    """Time one thread: blocks of each system in turn, each batch by itself.

    Args:
        runs: By the name of the system.
        counts: Batches of a block of each.
        repeats: Blocks of each.
    Returns:
        Median CPU time of the thread for a batch of each block, in ms. [repeats] each.
    """
    ms: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            ms[name].append(float(np.median(run(counts[name])[0])) / 1e6)
    return {name: np.array(values) for name, values in ms.items()}


def against_limit(case: Row, key: str, ms: Mapping[str, np.ndarray]) -> dict[str, Row]:
    """Return a row for each system, whose name it has under a key, beside the one that is named
    limit.

    Each has `ms` and `limit_ms`, medians of a batch, `ratio`, the median of those of neighbouring
    blocks, and room for a bound.
    """
    limit = ms["limit"]
    return {
        name: {
            **case,
            key: name,
            "ms": float(np.median(values)),
            "limit_ms": float(np.median(limit)),
            "ratio": float(np.median(values / limit)),
            **dict.fromkeys(("bound", "judged", "holds")),
        }
        for name, values in ms.items()
        if name != "limit"
    }


def rank_blocks(runs: Mapping[str, Run], count: int, repeats: int) -> dict[str, list[float]]:
    """Time this rank: blocks that all ranks begin together. Collective.

    Args:
        runs: By the name of the system.
        count: Batches of a block, the same on every rank, or they would wait for each other's
            selections.
        repeats: Blocks of each system.
    Returns:
        Wall milliseconds of a batch of each block, and under "_cpu" median CPU milliseconds.
    """
    import torch.distributed as dist

    times: dict[str, list[float]] = {name + more: [] for name in runs for more in ("", "_cpu")}
    for _ in range(repeats):
        for name, run in runs.items():
            dist.barrier()
            begin = perf_counter()
            cpu, _ = run(count)
            times[name].append((perf_counter() - begin) / count * 1e3)
            times[name + "_cpu"].append(float(np.median(cpu)) / 1e6)
    return times


def of_ranks(found: Sequence[Mapping[str, Any]]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return what all ranks together take for a batch, ms of each block, and the median CPU ms of
    one rank.

    Args:
        found: What `rank_blocks` has returned on each rank.
    """
    names = [name for name in found[0] if not name.endswith("_cpu")]
    ms = {name: 1 / sum(1 / np.array(of_rank[name]) for of_rank in found) for name in names}
    return ms, {
        name: float(np.median([of_rank[f"{name}_cpu"] for of_rank in found])) for name in names
    }
