"""What a replay over several nodes costs: rows, and prioritized batches.

    python benchmarks/exchange.py --json F [--quick] [--parts bandwidth ...]

Needs root: the nodes are namespaces of this machine with virtual links (tests/cluster/cluster.sh), which this
command brings up and takes down. Whatever is compared runs on the same links in turns. The performance pages
say what the columns mean.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.nodes import Nodes, nodes, why_no_nodes
from support.report import Disturbance, document, print_table, write_json

WORK = "exchange_ranks"
LEAST_RATE, LEAST_SPEEDUP = 0.9, 3.0
LAUNCHES = 5  # a launch may have its threads on the cores in one way or another: the median of several
Rows = list[dict[str, Any]]
# Workload, window and samples of each rank.
CASES = (("W1", "whole", 64), ("W1", "20", 512), ("W1", "1", 256), ("W1", "1", 4096), ("W3", "frames", 64))
QUICK_CASES = (CASES[1], CASES[-1])  # a launch each


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
        ratios = [one["bare"] / one["carry"] for one in of_launch]
        ratio = float(np.median(ratios))
        rows.append(
            {
                "what": "bandwidth",
                "workload": name,
                "window": window,
                "B": batch,
                "bytes": size,
                "carry_ms": ms["carry"],
                "swap_ms": ms["swap"],
                "bare_ms": ms["bare"],
                "mb_per_s": size / ms["carry"] / 1e3,
                "bare_mb_per_s": size / ms["bare"] / 1e3,
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
    rows[1]["num_exchanges"] = found[0]["exchanges"]
    return rows


PARTS: dict[str, Callable[[Nodes, bool], Rows]] = {
    "bandwidth": bandwidth,
    "prioritized": prioritized,
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
    with nodes(2) as run:
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
