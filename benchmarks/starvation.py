"""Whether every item of a large table is drawn as often as it should be: chi-square over 2^25 items.

    python benchmarks/starvation.py [--json F] [--draws-per-item 24] [--quick]

A float32 tree over as many equal priorities never draws more than a quarter of them. With 24 draws per item
an unbiased sampler leaves an item out with a probability of 0.0013 in the whole run.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from support.report import Disturbance, document, print_table, write_json

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.constants import tree_size
from deepspeed_gear.ops.records import MassUnit
from deepspeed_gear.sampling.mass_rules import AnchorRule

ITEMS_LOG2, QUICK_LOG2, CHUNK = 25, 12, 1 << 17
LEAST_P = 1e-4  # two-sided; three independent tests at fixed seeds
_SLOT = 1  # word of a resolution


@dataclass
class Row:
    """One test.

    Args:
        items: Number of equally likely items.
        draws_per_item: Expected count of each.
        chi2: Sum of (count - expected)^2 / expected, with items - 1 degrees of freedom.
        p: Probability of a chi2 at least as far from its mean, if all items are equally likely; None for an
            epoch, which is not random in what it visits.
        smallest, largest: Counts over all items.
        smallest_expected: Count that the rarest of so many items has, typically.
        starved: Items that were never drawn.
    """

    what: str
    items: int
    draws_per_item: float
    chi2: float
    p: float | None
    smallest: int
    smallest_expected: int
    largest: int
    starved: int
    seconds: float
    holds: bool


def judge(what: str, counts: np.ndarray, seconds: float) -> Row:
    """Compare counts of independent draws with equal expectations. [items], int."""
    expected = counts.sum() / len(counts)
    chi2 = float(np.square(counts - expected).sum() / expected)
    z = (chi2 - (len(counts) - 1)) / math.sqrt(2 * (len(counts) - 1))  # normal for so many degrees of freedom
    p = math.erfc(abs(z) / math.sqrt(2))
    smallest, starved = int(counts.min()), int((counts == 0).sum())
    likely_starved = len(counts) * math.exp(-expected)
    holds = p >= LEAST_P and starved <= likely_starved + 5 * math.sqrt(likely_starved)
    return Row(
        what,
        len(counts),
        float(expected),
        chi2,
        p,
        smallest,
        rarest(len(counts), expected),
        int(counts.max()),
        starved,
        round(seconds, 1),
        holds,
    )


def rarest(items: int, expected: float) -> int:
    """Return the count that the rarest of many Poisson items has: its expected number reaches one half."""
    count, probability, below = 0, math.exp(-expected), 0.0
    while True:
        below += probability
        if items * below >= 0.5:
            return count
        count += 1
        probability *= expected / count


def table(items: int, sampler: dict[str, str], batch: int) -> Replay:
    """Make a Replay of long trajectories with `items` steps in all."""
    steps = min(8192, items // 8)
    schema = Schema([Column("value", "uint8", (), "other")])
    section = {
        "seed": 7,
        "tables": {"main": {"capacity_steps": items, "capacity_trajectories": items // steps}},
        "sampler": sampler,
        "fields": {"value": {}},
        "batch_size": batch,
    }
    replay = Replay(section, schemas={"main": schema})
    for number in range(items // steps):
        replay.add({"value": np.full(steps, number % 256, np.uint8)})
    return replay


def drawn(replay: Replay, draws: int) -> Iterator[np.ndarray]:
    """Yield which items batches hold: every step of every trajectory is one. [B], int64."""
    steps = replay.num_steps // len(replay)
    for _ in range(draws // replay.batch_info.global_batch):
        batch = replay.sample()
        yield (batch.trajectory_id * steps + batch.anchor).numpy()


def count_all(items: int, batches: Iterator[np.ndarray]) -> np.ndarray:
    """Count how often each item occurs. [items], int32."""
    counts = np.zeros(items, np.int32)
    one = np.int32(1)  # a Python integer would cost 20 times as much
    for chosen in batches:
        np.add.at(counts, chosen, one)
    return counts


def of_replay(what: str, items: int, sampler: dict[str, str], draws_per_item: int, chunk: int) -> Row:
    """Test the steps of a table through `Replay.sample()`."""
    begin = time.monotonic()
    with table(items, sampler, chunk) as replay:
        counts = count_all(items, drawn(replay, items * draws_per_item))
    return judge(what, counts, time.monotonic() - begin)


def of_epoch(items: int, chunk: int) -> Row:
    """Test that an epoch visits every step exactly once."""
    begin = time.monotonic()
    with table(items, {"kind": "epoch", "unit": "step"}, chunk) as replay:
        counts = count_all(items, drawn(replay, items))
    row = judge("one epoch of steps", counts, time.monotonic() - begin)
    row.p, row.smallest_expected, row.holds = None, 1, bool((counts == 1).all())
    return row


def of_trajectories(items: int, draws_per_item: int, chunk: int) -> Row:
    """Test trajectories of one step each on the ops that a stream uses: the tree, the draws, the descent."""
    begin = time.monotonic()
    ops = load_backend("cpu")
    sums = torch.zeros(tree_size(items), dtype=torch.int64)
    sums[:items] = 1
    ops.tree_build_(sums, items)
    # Only the slot of a resolution is looked at, so the slots may be zeros that take no memory.
    slots = torch.from_numpy(np.zeros((items, 8), np.int64))
    rule = AnchorRule().as_list()
    coordinates, resolutions = torch.empty(chunk, dtype=torch.int64), torch.empty(chunk, 8, dtype=torch.int64)

    def batches() -> Iterator[np.ndarray]:
        for first in range(0, items * draws_per_item, chunk):
            ops.draw_(coordinates, 7, 1, first, items)
            ops.resolve_(resolutions, sums, slots, coordinates, rule, MassUnit.STEP, 7, 1, first)
            yield resolutions[:, _SLOT].numpy()

    return judge("trajectories of one step", count_all(items, batches()), time.monotonic() - begin)


def run(quick: bool = False, draws_per_item: int = 24) -> list[Row]:
    """Test steps, trajectories with a drawn anchor, trajectories alone, and an epoch.

    Args:
        quick: 2^12 items, to see that it runs.
        draws_per_item: Expected count of an item.
    """
    items = 1 << (QUICK_LOG2 if quick else ITEMS_LOG2)
    chunk = min(CHUNK, items)
    rows = []
    for what, sampler in (
        ("steps", {"kind": "uniform", "unit": "step"}),
        ("trajectories, then anchors", {"kind": "uniform", "unit": "trajectory"}),
    ):
        rows.append(of_replay(what, items, sampler, draws_per_item, chunk))
        print(f"starvation: {what}", file=sys.stderr, flush=True)
    rows.append(of_trajectories(items, draws_per_item, chunk))
    rows.append(of_epoch(items, chunk))
    return rows


def main() -> None:
    """Run from the command line; the exit code is 1 if a test fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--draws-per-item", type=int, default=24, help="expected count of an item")
    parser.add_argument("--quick", action="store_true", help="few items, to see that it runs")
    options = parser.parse_args()
    disturbance = Disturbance()
    rows = run(options.quick, options.draws_per_item)
    print_table(list(asdict(rows[0])), [list(asdict(row).values()) for row in rows])
    if options.json is not None:
        write_json(options.json, document(disturbance, [asdict(row) for row in rows]))
    sys.exit(0 if all(row.holds for row in rows) else 1)


if __name__ == "__main__":
    main()
