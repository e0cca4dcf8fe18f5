"""How fast trajectories come in, against memcpy of as many bytes, and what that costs who samples.

    python benchmarks/ingest.py --json F [--quick]

One core per process: writers are actors that attach to the store of this process. The performance pages say
what the columns mean.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from support.report import Disturbance, document, print_table, write_json
from ingest_processes import STORE_STEPS, W1, W2, Process, actions, section

from deepspeed_gear import Replay
from deepspeed_gear.store.records import Control

BIG, SMALL = 20_000, 1_000  # steps: 1.2 MB and 61 kB
BOUNDS = {BIG: 0.6, SMALL: 0.25}
LEAST_STEPS, MOST_SLOWER = 300_000.0, 1.3
LEAST_ACTIONS, MOST_ROUND_TRIP_US = 50_000.0, 100.0
Rows = list[dict[str, Any]]


def table(schema: Any, steps: int, length: int, batch: int = 256) -> Replay:
    """Make the store that actors write into."""
    return Replay(section(steps, length, batch_size=batch), schemas={"main": schema})


def whole(quick: bool) -> Rows:
    """Add whole trajectories from one process."""
    rows = []
    for steps, bound in BOUNDS.items():
        with table(W1, STORE_STEPS, steps):
            found = Process("adds", steps, 3 if quick else 40, core=1).result()
        row = {"what": "add", **found, "mb_per_s": found["adds_per_s"] * found["bytes"] / 1e6}
        rows.append({**row, "judged": found["ratio"], "bound": bound, "holds": found["ratio"] >= bound})
    return rows


def vector(quick: bool) -> Rows:
    """Take steps of 8 environments at once; also such that each can be sampled before its episode ends."""
    rows: Rows = []
    with table(W2, 500_000, 2_000):
        found = Process("steps", 8, 3 if quick else 40, core=1).result()
    rate = found["steps_per_s"]
    rows.append(
        {
            "what": "steps",
            "system": "gear",
            **found,
            "judged": rate,
            "bound": LEAST_STEPS,
            "holds": rate >= LEAST_STEPS,
        }
    )
    with table(W2, 500_000, 2_000):
        published = Process("steps", 8, 3 if quick else 20, True, core=1).result()
    rows.append({"what": "steps", "system": "gear, published", **published})
    others = Process("peers", 8, core=1).result()
    rows += [
        {"what": "steps", "system": name.split()[0], "steps_per_s": rate} for name, rate in others.items()
    ]
    return rows


def reader(quick: bool) -> Rows:
    """Sample while another process writes at full speed."""
    seconds = 0.5 if quick else 4.0
    with table(W1, STORE_STEPS, SMALL) as replay:
        os.sched_setaffinity(0, {0})
        Process("loop", SMALL, 1.0, core=1).result()
        ratios, quiet, busy = [], 0.0, 0.0
        for _ in range(1 if quick else 5):
            quiet = _median_us(replay, 400)
            writer = Process("loop", SMALL, seconds, core=1)
            _wait_for_writing(replay)
            busy = _median_us(replay, 400)
            writer.result()
            ratios.append(busy / quiet)
        os.sched_setaffinity(0, {0, 1})
    ratio = float(np.median(ratios))
    row = {"what": "reader", "quiet_us": quiet, "busy_us": busy, "judged": ratio, "bound": MOST_SLOWER}
    return [{**row, "holds": ratio < MOST_SLOWER}]


def _wait_for_writing(replay: Replay) -> None:
    control, until = replay.tables["main"].control, time.monotonic() + 20
    newest = int(control[Control.NEXT_ID])
    while int(control[Control.NEXT_ID]) == newest and time.monotonic() < until:
        time.sleep(0.01)


def _median_us(replay: Replay, count: int) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        replay.sample()
        times.append(time.perf_counter() - begin)
    return 1e6 * float(np.median(times))


def inference(quick: bool) -> Rows:
    """Closed loops of simulators and a policy of one multiplication, in two processes."""
    rows: Rows = []
    for num_envs in (64, 1):
        found = actions(num_envs, 100 if quick else 4000)
        row = {"what": "inference", **found}
        if num_envs == 64:
            judged, bound = found["actions_per_s"], LEAST_ACTIONS
            rows.append({**row, "judged": judged, "bound": bound, "holds": judged >= bound})
        else:
            judged, bound = found["wait_us_median"], MOST_ROUND_TRIP_US
            rows.append({**row, "judged": judged, "bound": bound, "holds": judged <= bound})
    return rows


PARTS = {"inference": inference, "add": whole, "steps": vector, "reader": reader}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only some of it")
    options = parser.parse_args()
    disturbance, rows = Disturbance(), []
    for part in options.parts:
        found = PARTS[part](options.quick)
        rows += found
        heads = list(dict.fromkeys(head for row in found for head in row if head != "what"))
        print_table(heads, [[row.get(head) for head in heads] for row in found])
        print()
        if options.json is not None:
            write_json(options.json, document(disturbance, rows))


if __name__ == "__main__":
    main()
