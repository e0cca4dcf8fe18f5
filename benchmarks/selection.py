"""How fast items are selected: prioritized and uniform batches against a C loop and against cpprb.

    python benchmarks/selection.py --json F                one thread: batches, memory
    python benchmarks/selection.py --ranks 2 --json F      also: ranks at once on one store

A batch is sampled, gathered and weighted, and its priorities are updated. The performance pages say what the
columns mean.
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
from support.transitions import SAMPLERS, Cpprb, Gear, has_cpprb, limit_of, w2

SIZES = (256, 4096)
LIMIT_BOUND = {
    ("prioritized", 256): 1.2,
    ("prioritized", 4096): 1.25,
    ("uniform", 256): 1.5,
    ("uniform", 4096): 1.5,
}
CPPRB_BOUND = 2.5  # times as fast
RANKS_BOUND = 8000.0  # batches a second of all ranks
MEMORY_BOUND = 1.25  # store over payload
_BLOCK_S = 0.04  # time of one system before the next has its turn


@dataclass
class Row:
    """One measurement.

    Args:
        what: "batch", "ranks" or "memory".
        system: "gear" or "cpprb".
        B: Samples of a batch on each rank.
        items: How many there are.
        ms: Of a batch; median CPU time of the thread. With several ranks: wall time over the batches of all.
        limit_ms: Of the limit in the same run, likewise.
        ratio: To the limit: median of the ratios of neighbouring blocks.
        bound: What `judged` must not exceed; None where there is none.
        judged: The number that has the bound.
        extra: More about it.
    """

    what: str
    system: str
    sampler: str
    B: int
    ranks: int
    items: int
    ms: float | None = None
    limit_ms: float | None = None
    ratio: float | None = None
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


def alone(sampler: str, batch: int, scale: float, repeats: int) -> list[Row]:
    """Measure one thread: blocks of each system in turn, each batch timed by itself."""
    content = w2(scale)
    gear = Gear(content, sampler, batch)
    systems: dict[str, Any] = {"limit": limit_of(gear, content, batch), "gear": gear}
    if has_cpprb():
        systems["cpprb"] = Cpprb(content, sampler, batch)
    else:
        _say("cpprb is not installed: left out")
    blocks: dict[str, list[float]] = {name: [] for name in systems}
    counts = {name: _block(system) for name, system in systems.items()}
    for _ in range(repeats):
        for name, system in systems.items():
            blocks[name].append(float(np.median(system.run(counts[name])[0])) / 1e6)
    store = gear.replay.statistics()
    gear.close()
    ms = {name: float(np.median(values)) for name, values in blocks.items()}
    rows = []
    for name in list(systems)[1:]:
        ratio = float(np.median(np.array(blocks[name]) / np.array(blocks["limit"])))
        rows.append(Row("batch", name, sampler, batch, 1, len_of(content), ms[name], ms["limit"], ratio))
    rows[0].bound, rows[0].judged = LIMIT_BOUND[sampler, batch], rows[0].ratio
    if "cpprb" in blocks:
        over = np.array(blocks["gear"]) / np.array(blocks["cpprb"])
        rows[1].bound, rows[1].judged = 1 / CPPRB_BOUND, float(np.median(over))
        rows[1].extra = {"times_as_long_as_gear": float(np.median(1 / over))}
    if batch == SIZES[0]:
        rows.append(_memory(sampler, batch, len_of(content), store))
    return rows


def len_of(content: Any) -> int:
    """Return the transitions of a workload."""
    return int(content.num_trajectories * content.num_steps)


def _memory(sampler: str, batch: int, items: int, store: dict[str, Any]) -> Row:
    sizes = {name: float(store[name]) for name in ("store_bytes", "payload_bytes")}
    judged = sizes["store_bytes"] / sizes["payload_bytes"]
    return Row("memory", "gear", sampler, batch, 1, items, bound=MEMORY_BOUND, judged=judged, extra=sizes)


def _block(system: Any) -> int:
    """Return how many batches make a block; the first ones warm up."""
    system.run(8)
    one = max(1e-6, float(np.median(system.run(8)[0])) / 1e9)
    return int(min(400, max(8, _BLOCK_S / one)))


def at_once(ranks: int, batch: int, scale: float, repeats: int) -> Row:
    """Measure ranks of a node on one store, each with batches of its own, against as many limits at once."""
    found = run_ranks(ranks, rank_blocks, batch, scale, repeats)
    rates = {name: sum(1 / np.array(of_rank[name]) for of_rank in found) for name in ("limit", "gear")}
    ms = {name: 1e3 / float(np.median(rate)) for name, rate in rates.items()}
    ratio = float(np.median(rates["limit"] / rates["gear"]))
    items = len_of(w2(scale))
    row = Row("ranks", "gear", "prioritized", batch, ranks, items, ms["gear"], ms["limit"], ratio)
    row.bound, row.judged = 1e3 / RANKS_BOUND, ms["gear"]
    cpu = {
        f"{name}_cpu_ms": float(np.median([r[f"{name}_cpu"] for r in found])) for name in ("gear", "limit")
    }
    row.extra = {"batches_per_s": 1e3 / ms["gear"], **cpu}
    return row


def rank_blocks(batch: int, scale: float, repeats: int) -> dict[str, list[float]]:
    """Measure on one rank: blocks that all ranks begin together.

    Returns:
        Wall seconds per batch of each block, and under "_cpu" the median CPU milliseconds of a batch.
    """
    import torch.distributed as dist

    content = w2(scale)
    gear = Gear(content, "prioritized", batch)
    systems: dict[str, Any] = {"limit": limit_of(gear, content, batch), "gear": gear}
    times: dict[str, list[float]] = {name + more: [] for name in systems for more in ("", "_cpu")}
    count = (
        20 if scale < 1 else 2000
    )  # the same on every rank, or they would wait for each other's selections for ever
    for _ in range(repeats):
        for name, system in systems.items():
            dist.barrier()
            begin = perf_counter()
            cpu, _ = system.run(count)
            times[name].append((perf_counter() - begin) / count)
            times[name + "_cpu"].append(float(np.median(cpu)) / 1e6)
    gear.close()
    return times


def run(*, quick: bool = False, ranks: int = 1, repeats: int = 15) -> list[Row]:
    """Measure everything that is asked for.

    Args:
        quick: Few items and repeats: to see that it runs, not for numbers.
        ranks: Measure this many ranks at once as well, if more than 1.
        repeats: Blocks of each system.
    """
    scale, repeats = (0.02, 2) if quick else (1.0, repeats)
    rows: list[Row] = []
    for sampler in SAMPLERS:
        for batch in SIZES:
            rows += alone(sampler, batch, scale, repeats)
            _say(f"{sampler} B={batch}")
    if ranks > 1:
        rows.append(at_once(ranks, SIZES[0], scale, repeats))
        _say(f"{ranks} ranks")
    return rows


def _say(text: str) -> None:
    print(f"select: {text}", file=sys.stderr, flush=True)


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    columns = "what system sampler B ranks items ms limit_ms ratio judged bound holds more".split()
    lines = []
    for row in rows:
        more = " ".join(f"{key}={value:.4g}" for key, value in (row.extra or {}).items())
        lines.append((*(getattr(row, column) for column in columns[:-1]), more))
    print_table(columns, lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--ranks", type=int, default=1, help="measure this many ranks at once as well")
    parser.add_argument("--repeats", type=int, default=15, help="blocks of each system")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    disturbance = Disturbance()
    rows = run(quick=options.quick, ranks=options.ranks, repeats=options.repeats)
    show(rows)
    taken = disturbance.taken()
    print(
        f"\nmeanwhile others used {taken['other_cores']} cores, the hypervisor took {taken['stolen_cores']}"
    )
    if options.json is not None:
        write_json(options.json, document(disturbance, [row.to_json() for row in rows]))


if __name__ == "__main__":
    main()
