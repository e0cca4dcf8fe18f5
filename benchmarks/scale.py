"""What a selection over many nodes costs: a node's plan is timed, bytes are counted, the wire is predicted.

    python benchmarks/scale.py [--nodes 1 2 4 ...] [--json F] [--figure F.png] [--quick]

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from support.report import Disturbance, document, print_table, write_json
from fixed_cost import Timers
from scale_planning import ROW_BYTES, WINDOW, Batch, Node, Wire, routes_at

from deepspeed_gear.distributed import node_messages
from deepspeed_gear.distributed.sharded.resolution_exchange import HEAD_WORDS, ResolutionExchange
from deepspeed_gear.distributed.sharded.selection_agreement import StatusMessage
from deepspeed_gear.distributed.sharded.sharded_selector import ShardedSelector
from deepspeed_gear.sampling.sum_tree import ItemMasses

NODES = [2**i for i in range(11)]
MOST_WHOLE = 8  # up to so many nodes, every node's plan is made, to compare its bytes with those counted
BOUND_MS = 50.0
EXCHANGES = 2  # the status of each node; resolutions and rows
REST, LINK = "rest", "link (stand-in)"
WARM = 2  # plans that are not timed
CACHE_BYTES = 128 << 20  # more than the caches hold
PARTS: tuple[tuple[Any, str, str], ...] = (
    (ShardedSelector, "begin", "begin: record, status"),
    (ShardedSelector, "resolve", "own samples, owners"),
    (ItemMasses, "resolve_numbered", "resolve own samples: resolve_"),
    (ShardedSelector, "finish", "own records together"),
    (ResolutionExchange, "_pack", "messages"),
    (ResolutionExchange, "_sent", "resolutions by node"),
    (ResolutionExchange, "_receive", "what is received"),
    (ResolutionExchange, "_decode", "ring, origins, samples whose rows are received"),
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


def counted(batch: Batch, num_nodes: int, ranks: int) -> np.ndarray:
    """Return the bytes from each node to each other one; windows that overlap are not merged. [S, S]."""
    reader = np.arange(len(batch.owner)) % (num_nodes * ranks) // ranks
    rows = np.minimum(batch.anchor + 1, WINDOW)
    size = 8 * node_messages.resolution_words(False) + rows * sum(ROW_BYTES.values())
    pair = batch.owner * num_nodes + reader
    found = np.bincount(pair, size, num_nodes**2).reshape(num_nodes, num_nodes).astype(np.int64)
    found += 8 * (1 + StatusMessage.NUM_WORDS + HEAD_WORDS)  # what a node says first, and of its draws
    np.fill_diagonal(found, 0)
    return found


def planned(node_at: Callable[[int], Node], batches: Sequence[Batch], num_nodes: int) -> np.ndarray:
    """Return the bytes from each node to each other one, from the plans of all nodes. [S, S]."""
    made = [node_at(index) for index in range(num_nodes)]
    for node in made:
        for key, batch in enumerate(batches):
            node.prepare(batch)
            node.plan(key)
    rows = np.stack([node.planner.sent for node in made])
    expected = np.stack([node.planner.received for node in made], axis=1)
    if not np.array_equal(rows, expected):
        raise SystemExit("sender and receiver plan different messages")
    found = rows + np.stack([node.link.sent for node in made])
    np.fill_diagonal(found, 0)
    return found


def extremes(sent: np.ndarray) -> tuple[float, float, float, float]:
    """Return the most over the mean bytes that nodes send, and receive; the most of a node, and of a pair."""
    sums = sent.sum(1), sent.sum(0)
    by_mean = [float(of.max() / of.mean()) if of.any() else 1.0 for of in sums]
    return by_mean[0], by_mean[1], float(max(of.max() for of in sums)), float(sent.max())


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
    """Time one node's plan among so many, and count the bytes of all."""
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
    sent = [counted(batch, num_nodes, ranks) for batch in batches]
    row["node_bytes"] = float(np.mean(sent)) * num_nodes
    row["link_bytes"] = row["node_bytes"] / max(num_nodes - 1, 1)
    most = np.mean([extremes(of_batch) for of_batch in sent], axis=0).tolist()
    row["sent_imbalance"], row["received_imbalance"], row["node_most_bytes"], row["link_most_bytes"] = most
    if 1 < num_nodes <= MOST_WHOLE:
        whole = planned(lambda index: Node(routes_of_node(index), count, timers), batches, num_nodes)
        row["planned_node_bytes"] = float(whole.sum(0).mean()) / len(batches)
    row["plan_us_a_rank"] = row["plan_ms"] * 1e3 / ranks
    row["us_a_sample"] = row["plan_ms"] * 1e3 / count
    return {**row, "parts_ms": {name: parts[name] for name in sorted(parts, key=lambda name: -parts[name])}}


def predict(row: Row, bandwidths: Sequence[float], latency_us: float, step_ms: float) -> None:
    """Add how long the exchanges of a selection take, and their part of a training step with the plan.

    The slowest node's bytes pass its one port; `least` lets the messages of an exchange overlap, `most` lets
    each wait for the one before.
    """
    row["exchange"] = []
    for gbit in bandwidths:
        carried_ms = row["node_most_bytes"] * 8 / (gbit * 1e6)
        waits = EXCHANGES * latency_us / 1e3 * (row["nodes"] > 1)
        least, most = carried_ms + waits, carried_ms + waits * (row["nodes"] - 1)
        part = [(row["plan_ms"] + exchange) / step_ms for exchange in (least, most)]
        row["exchange"].append(
            {
                "gbit": gbit,
                "least_ms": least,
                "most_ms": most,
                "least_of_step": part[0],
                "most_of_step": part[1],
            }
        )


def judge(rows: Sequence[Row], ranks: int, samples: int) -> None:
    """Add what is asked for: the largest plan within its bound, no growth beyond that of the batch."""
    first = next((row for row in rows if row["nodes"] > 1), rows[0])
    for row in rows:
        row.update(growth=row["us_a_sample"] / first["us_a_sample"], growth_bound=1.0)
        row["holds"] = row["growth"] <= 1.0
        if row["nodes"] == NODES[-1] and (ranks, samples) == (8, 32):
            row.update(bound_ms=BOUND_MS, holds=row["holds"] and row["plan_ms"] <= BOUND_MS)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the time of a plan and the bytes of a node against the number of nodes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    count = [row["nodes"] for row in rows]
    left.loglog(count, [row["plan_ms"] for row in rows], "o-", color="black", label="a node's plan")
    left.loglog(
        count, [row["plan_us_a_rank"] / 1e3 for row in rows], "o--", color="gray", label="by its ranks"
    )
    batch = [rows[-1]["plan_ms"] * n / count[-1] for n in count]
    left.loglog(count, batch, ":", color="tab:orange", label="in proportion to the batch")
    left.axhline(
        BOUND_MS, linestyle="--", linewidth=1, color="tab:red", label=f"asked for: {BOUND_MS:.0f} ms"
    )
    left.set(xlabel="nodes", ylabel="ms a global batch", title="time of a plan")
    several = [row for row in rows if row["nodes"] > 1]
    count = [row["nodes"] for row in several]
    for key, style, label in (
        ("node_most_bytes", "o-", "the busiest node"),
        ("node_bytes", "o--", "a node, mean"),
        ("link_most_bytes", "s-", "the busiest pair"),
        ("link_bytes", "s--", "a pair, mean"),
    ):
        right.loglog(count, [row[key] for row in several], style, markersize=4, label=label)
    right.set(xlabel="nodes", ylabel="bytes a global batch", title="what is sent")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def run(options: argparse.Namespace) -> list[Row]:
    """Measure all numbers of nodes. Returns a row for each."""
    rows = []
    for num_nodes in options.nodes:
        rows.append(run_one(num_nodes, options.ranks, options.samples, options.repeats))
        predict(rows[-1], options.bandwidth, options.latency, options.step_ms)
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
    parser.add_argument(
        "--bandwidth", type=float, nargs="+", default=[10, 25, 100, 400], help="of a node's port, in Gbit/s"
    )
    parser.add_argument("--latency", type=float, default=50.0, help="of a message, in microseconds")
    parser.add_argument("--step-ms", type=float, default=100.0, help="duration of a training step")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--figure", "--plot", type=Path, help="draw times and bytes into this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.ranks, options.samples, options.repeats = [1, 2, 4], 2, 4, 3
    disturbance = Disturbance()
    rows = run(options)
    heads = (
        "nodes",
        "samples",
        "plan_ms",
        "warm_ms",
        "plan_us_a_rank",
        "growth",
        "node_bytes",
        "node_most_bytes",
    )
    heads += ("link_bytes", "link_most_bytes", "sent_imbalance", "received_imbalance", "routes_s", "holds")
    print_table(heads, [[row[head] for head in heads] for row in rows])
    print_table(("part", "ms"), list(rows[-1]["parts_ms"].items()))
    if options.figure is not None:
        plot(rows, options.figure)
    if options.json is not None:
        assumed = {"latency_us": options.latency, "step_ms": options.step_ms}
        write_json(options.json, document(disturbance, rows, assumed=assumed))


if __name__ == "__main__":
    main()
