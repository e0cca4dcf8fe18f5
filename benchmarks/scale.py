"""What a selection over many nodes costs: the time of one node's plan.

    python benchmarks/scale.py [--nodes 1 2 4 ...] [--json F] [--quick]

The plan is pure: every node computes all coordinates, resolves those of its own part, and works out which
resolutions and rows go where. So one process plans as one node of a thousand does. What the others would say
is made beforehand and nothing is sent: what the transport takes for each message is not in the times. Before
each plan the caches are filled with something else, as by a training step; `warm_ms` is without that.

Every node holds trajectories of 1,000 steps; a sample is a window of the latest 20 steps of observation,
action and reward; each rank is a replica, and the first of a node plans for all of its ranks.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from support.report import Disturbance, document, print_table, write_json
from fixed_cost import Timers
from scale_planning import Batch, Node, Wire, routes_at

from deepspeed_gear.distributed.row_exchange.resolution_exchange import ResolutionExchange
from deepspeed_gear.distributed.row_exchange.row_messages import RowExchange
from deepspeed_gear.distributed.sharded_selection import ShardedSelector
from deepspeed_gear.sampling.sum_tree import ItemMasses

NODES = [2**i for i in range(11)]
BOUND_MS = 50.0
REST, LINK = "rest", "link (stand-in)"
WARM = 2  # plans that are not timed
CACHE_BYTES = 128 << 20  # more than the caches hold
PARTS: tuple[tuple[Any, str, str], ...] = (
    (ShardedSelector, "begin", "begin: record, status"),
    (ShardedSelector, "resolve", "own samples, owners"),
    (ItemMasses, "resolve_numbered", "resolve own samples: resolve_"),
    (ShardedSelector, "finish", "own records together; ring, origins, samples whose rows are received"),
    (ResolutionExchange, "_encode", "resolutions by node"),
    (RowExchange, "send", "messages"),
)
Row = dict[str, Any]


@contextlib.contextmanager
def timed_parts(timers: Timers) -> Iterator[None]:
    """Time the parts of a plan, wherever they are called from."""
    owners = [*PARTS, (Wire, "begin", LINK)]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in owners]
    try:
        for owner, name, part in owners:
            setattr(owner, name, timers.wrap(part, getattr(owner, name)))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def time_plans(node: Node, batches: Sequence[Batch], timers: Timers, cold: bool) -> dict[str, float]:
    """Return the median milliseconds of each part of a plan, and of all of it.

    Args:
        node: Whose plan it is.
        batches: What to plan.
        timers: Those of `timed_parts`.
        cold: Whether something else has filled the caches before each plan, as a training step does.
    """
    found: list[dict[str, float]] = []
    plan, other = timers.wrap(REST, node.plan), np.zeros(CACHE_BYTES * cold, np.uint8)
    for key, batch in enumerate(batches):
        node.prepare(batch)
        other += 1
        timers.spent.clear()
        plan(key)
        found.append({name: sum(times) / 1e6 for name, times in timers.spent.items() if name != LINK})
        found[-1]["all"] = sum(found[-1].values())
    return {name: float(np.median([parts[name] for parts in found[WARM:]])) for name in found[0]}


def run_one(num_nodes: int, ranks: int, samples: int, repeats: int) -> Row:
    """Time one node's plan among so many."""
    count, timers = num_nodes * ranks * samples, Timers()
    batches = [Batch.of(key, count, num_nodes) for key in range(WARM + repeats)]
    begin = perf_counter()
    routes_of_node = routes_at(num_nodes, ranks)
    setup_s = perf_counter() - begin
    with timed_parts(timers):
        node = Node(routes_of_node(num_nodes // 2), count, timers)
        warm_ms = time_plans(node, batches, timers, cold=False)["all"]
        parts = time_plans(node, batches, timers, cold=True)
    row: Row = {"nodes": num_nodes, "ranks": num_nodes * ranks, "samples": count, "routes_s": setup_s}
    row |= {"plan_ms": parts.pop("all"), "warm_ms": warm_ms}
    row["plan_us_a_rank"] = row["plan_ms"] * 1e3 / ranks
    row["us_a_sample"] = row["plan_ms"] * 1e3 / count
    return {**row, "parts_ms": {name: parts[name] for name in sorted(parts, key=lambda name: -parts[name])}}


def judge(rows: Sequence[Row], ranks: int, samples: int) -> None:
    """Add what is asked for: the largest plan within its bound, no growth beyond that of the batch."""
    first = next((row for row in rows if row["nodes"] > 1), rows[0])
    for row in rows:
        row.update(growth=row["us_a_sample"] / first["us_a_sample"], growth_bound=1.0)
        row["holds"] = row["growth"] <= 1.0
        if row["nodes"] == NODES[-1] and (ranks, samples) == (8, 32):
            row.update(bound_ms=BOUND_MS, holds=row["holds"] and row["plan_ms"] <= BOUND_MS)


def run(options: argparse.Namespace) -> list[Row]:
    """Measure all numbers of nodes. Returns a row for each."""
    rows = []
    for num_nodes in options.nodes:
        rows.append(run_one(num_nodes, options.ranks, options.samples, options.repeats))
    judge(rows, options.ranks, options.samples)
    return rows


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="numbers of nodes")
    parser.add_argument("--ranks", type=int, default=8, help="of a node")
    parser.add_argument("--samples", type=int, default=32, help="of a rank in a global batch")
    parser.add_argument("--repeats", type=int, default=15, help="global batches, of which medians are taken")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.ranks, options.samples, options.repeats = [1, 2, 4], 2, 4, 3
    disturbance = Disturbance()
    rows = run(options)
    heads = ("nodes", "samples", "plan_ms", "warm_ms", "plan_us_a_rank", "growth", "routes_s", "holds")
    print_table(heads, [[row[head] for head in heads] for row in rows])
    print_table(("part", "ms"), list(rows[-1]["parts_ms"].items()))
    if options.json is not None:
        write_json(options.json, document(disturbance, rows))


if __name__ == "__main__":
    main()
