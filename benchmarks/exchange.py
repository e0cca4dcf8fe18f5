"""What a replay over several nodes costs: rows, prioritized batches, bytes, messages, growth, training.

    python benchmarks/exchange.py --json F [--quick] [--parts bandwidth ...]

Needs root: the nodes are namespaces of this machine with virtual links (tests/cluster/cluster.sh), which this
command brings up and takes down. Whatever is compared runs on the same links in turns. The performance pages
say what the columns mean.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support import ROOT
from support.nodes import Nodes, nodes, why_no_nodes
from support.report import Disturbance, document, print_table, write_json
from scale import run_one

WORK = "exchange_ranks"
LEAST_RATE, LEAST_SPEEDUP, MOST_WAIT = 0.9, 3.0, 0.05
ROWS_FACTOR, BYTES_A_SAMPLE, BYTES_A_STEP = 1.05, 64, 16 << 10
LAUNCHES = 5  # a launch may have its threads on the cores in one way or another: the median of several
SAME = 1.05  # of two numbers that are to be equal but for the draws
MIB = 1 << 20
Rows = list[dict[str, Any]]
# Workload, window and samples of each rank.
CASES = (("W1", "whole", 64), ("W1", "20", 512), ("W1", "1", 256), ("W1", "1", 4096), ("W3", "frames", 64))
QUICK_CASES = (CASES[1], CASES[-1])  # a launch each


def bound_of_bytes(needed: float, remote: float, num_nodes: int, steps: int) -> float:
    """Return the most bytes that all nodes may send.

    Args:
        needed: Bytes of the rows that nodes need and do not hold, each once per batch.
        remote: Samples that their nodes do not hold.
        num_nodes: Nodes.
        steps: Global batches.
    """
    return ROWS_FACTOR * needed + BYTES_A_SAMPLE * remote + BYTES_A_STEP * num_nodes * steps


def slowest(found: list[dict[str, list[float]]], kind: str) -> float:
    """Return the median over turns of the seconds until the last rank had done."""
    return float(np.median(np.max([rank[kind] for rank in found], axis=0)))


def bandwidth(run: Nodes, quick: bool) -> Rows:
    """Compare the exchange of rows with bare exchanges of as many bytes."""
    rows = []
    for name, window, batch in QUICK_CASES if quick else CASES:
        arguments = (name, window, 8, 5, 0.01) if quick else (name, window, batch, 100, 0.1)
        launches = [
            run.run(f"{WORK}:bandwidth", *arguments, count=2) for _ in range(1 if quick else LAUNCHES)
        ]
        size = float(np.median(np.max([rank["received"] for rank in launches[0]], axis=0)))
        times = [[rank["times"] for rank in found] for found in launches]
        of_launch = [{kind: 1e3 * slowest(one, kind) for kind in one[0]} for one in times]
        ms = {kind: float(np.median([one[kind] for one in of_launch])) for kind in of_launch[0]}
        ratios = [one["all_to_all_single"] / one["carry"] for one in of_launch]
        ratio = float(np.median(ratios))
        rows.append(
            {
                "what": "bandwidth",
                "workload": name,
                "window": window,
                "B": batch,
                "bytes": size,
                "cut_ms": ms["cut"],
                "carry_ms": ms["carry"],
                "swap_ms": ms["swap"],
                "bare_ms": ms["all_to_all_single"],
                "pairs_ms": ms["isend, irecv"],
                "mb_per_s": size / ms["carry"] / 1e3,
                "bare_mb_per_s": size / ms["all_to_all_single"] / 1e3,
                "least": min(ratios),
                "most": max(ratios),
                "judged": ratio,
                "bound": LEAST_RATE,
                "holds": ratio >= LEAST_RATE,
            }
        )
    return rows


def prioritized(run: Nodes, quick: bool) -> Rows:
    """Compare prioritized batches and their updates with those of one owner that is asked over RPC."""
    arguments = (32, 1, 10, 0.1, 0.01) if quick else (256, 25, 400, 1.0, 0.1)
    found = run.run(f"{WORK}:prioritized_batches", *arguments, count=2)
    blocks = np.array([rank["owner"] for rank in found])
    owner, together = float(np.median(blocks.sum(0))), float(np.median(len(found) * blocks.min(0)))
    case = {"what": "prioritized", "B": arguments[0]}
    rows = [{**case, "system": "one owner, RPC", "batches_per_s": owner, "in_step_per_s": together}]
    for prefetch in (0, 2):
        rate = float(np.median(found[0][f"gear {prefetch}"]))
        ratios = np.array(found[0][f"gear {prefetch}"]) / blocks.sum(0)
        ratio = float(np.median(ratios))
        spread = {"least": float(ratios.min()), "most": float(ratios.max())}
        row = {
            **case,
            **spread,
            "system": f"gear, prefetch {prefetch}",
            "batches_per_s": rate,
            "in_step_per_s": rate,
        }
        rows.append({**row, "judged": ratio, "bound": LEAST_SPEEDUP, "holds": ratio >= LEAST_SPEEDUP})
    cut = {name: 1e3 * float(np.mean([rank["cut"][name] for rank in found])) for name in ("cut", "exchanges")}
    rows[1].update(num_exchanges=found[0]["exchanges"], cut_ms=cut["cut"], exchanges_ms=cut["exchanges"])
    return rows


def traffic(run: Nodes, quick: bool) -> Rows:
    """Compare the bytes on the wire with what must travel, for few and for many items."""
    rows: Rows = []
    for name, window, batch in QUICK_CASES if quick else CASES:
        batch, steps, scale = (8, 5, 0.01) if quick else (batch, 30, 0.1)
        found = run.run(f"{WORK}:traffic", name, window, batch, steps, scale, count=2)
        sums = {key: sum(rank[key] for rank in found) for key in found[0]}
        bound = bound_of_bytes(sums["needed"], sums["remote"], len(found), steps)
        row = {"what": "bytes", "workload": name, "window": window, "B": batch}
        row.update({key: value / steps for key, value in sums.items()}, bound=bound / steps)
        rows.append({**row, "judged": sums["wire"] / steps, "holds": sums["wire"] <= bound})
    few: float | None = None
    for items in (1_000, 10_000) if quick else (10_000, 10_000_000):
        found = run.run(f"{WORK}:selection", items, 32 if quick else 256, 10 if quick else 200, count=2)
        sent = sum(rank["sent"] for rank in found)
        row = {"what": "selection", "items": items, "sent": sent}
        if few is not None:
            row.update(judged=sent / few, bound=SAME, holds=1 / SAME <= sent / few <= SAME)
        rows.append(row)
        few = sent
    return rows


def messages(run: Nodes, quick: bool) -> Rows:
    """Compare one collective with sends and receives between pairs."""
    rows: Rows = []
    for count in [2] if quick else [2, 4]:
        for size in (96, MIB):
            found = run.run(f"{WORK}:messages", size, 5 if quick else 40, count=count)
            ms = {f"{kind} ms": 1e3 * slowest(found, kind) for kind in found[0]}
            rows.append({"what": "messages", "nodes": count, "bytes": size, **ms})
    return rows


def growth(run: Nodes, quick: bool) -> Rows:
    """Compare batches on 1, 2 and 4 nodes with what the plan of benchmarks/scale.py predicts for them.

    A batch's time is its plan's, two exchanges of a few bytes, and the node's bytes at the speed of large
    messages, both as measured between as many nodes.
    """
    rows: Rows = []
    batch, steps, scale = (8, 5, 0.01) if quick else (256, 60, 0.1)
    for count in (1, 2) if quick else (1, 2, 4):
        found = run.run(f"{WORK}:batches", "W1", "20", batch, steps, scale, count=count)
        planned = run_one(count, 1, batch, 3 if quick else 15)
        waits = carried = 0.0
        if count > 1:
            kind = "all_to_all_single"
            small, large = (run.run(f"{WORK}:messages", size, 5, count=count) for size in (96, MIB))
            waits = 2e3 * slowest(small, kind)
            carried = 1e3 * slowest(large, kind) * planned["node_bytes"] / ((count - 1) * MIB)
        sample_ms = float(np.mean([rank["sample_ms"] for rank in found]))
        sent = float(np.mean([rank["sent"] for rank in found]))
        row = {"what": "growth", "nodes": count, "B": batch, "sample_ms": sample_ms, "sent": sent}
        predicted = {"plan_ms": planned["plan_ms"], "predicted_ms": planned["plan_ms"] + waits + carried}
        rows.append({**row, **predicted, "predicted_sent": planned["node_bytes"]})
    return rows


def training(run: Nodes, quick: bool) -> Rows:
    """Find the share of a training step that waits for data."""
    rows: Rows = []
    with tempfile.TemporaryDirectory(prefix="gear-hopper-") as folder:
        source, data = ROOT / "examples" / "data" / "hopper_expert.hdf5", Path(folder) / "hopper"
        code = "from deepspeed_gear.cli.main import main; main()"
        subprocess.run([sys.executable, "-c", code, "ingest", source, data], check=True, cwd=ROOT)
        for prefetch in (0, 2):
            arguments = (str(data), str(ROOT / "configs" / "hopper.json"), 5 if quick else 100, prefetch)
            found = run.run(f"{WORK}:training", *arguments, count=2)
            mean = {key: float(np.mean([rank[key] for rank in found])) for key in found[0]}
            share = mean["wait_ms"] / mean["step_ms"]
            row = {"what": "training", "prefetch": prefetch, **mean, "judged": share}
            rows.append(row if prefetch == 0 else {**row, "bound": MOST_WAIT, "holds": share < MOST_WAIT})
    return rows


PARTS: dict[str, Callable[[Nodes, bool], Rows]] = {
    "bandwidth": bandwidth,
    "prioritized": prioritized,
    "traffic": traffic,
    "messages": messages,
    "growth": growth,
    "training": training,
}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only some of it")
    options = parser.parse_args()
    reason = why_no_nodes()
    if reason is not None:
        sys.exit(f"exchange.py: no nodes can be made on this machine: {reason}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("exchange.py: ended"))  # takes the nodes down
    disturbance, rows = Disturbance(), []
    wide = {"messages", "growth"} & set(options.parts)
    with nodes(4 if wide and not options.quick else 2) as run:
        for part in options.parts:
            found = PARTS[part](run, options.quick)
            rows += found
            for what in dict.fromkeys(row["what"] for row in found):
                same = [row for row in found if row["what"] == what]
                heads = list(dict.fromkeys(head for row in same for head in row if head != "what"))
                print_table(heads, [[row.get(head) for head in heads] for row in same])
                print()
            if options.json is not None:  # so that a part that fails takes no other with it
                write_json(options.json, document(disturbance, rows))


if __name__ == "__main__":
    main()
