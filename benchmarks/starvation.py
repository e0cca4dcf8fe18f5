"""Whether every item of a large table is drawn as often as it should be: chi-square over 2^25
items.

    python benchmarks/starvation.py [--json F] [--draws-per-item 24] [--quick]

A float32 tree over as many equal priorities never draws more than a quarter of them. With 24 draws
per item an unbiased sampler leaves an item out with a probability of 0.0013 in the whole run.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from support.report import Report, Row, print_rows, say

from deepspeed_gear import Column, Replay, Schema
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.constants import tree_size
from deepspeed_gear.ops.records import MassUnit
from deepspeed_gear.sampling.mass_rules import AnchorRule

ITEMS_LOG2 = 25
QUICK_LOG2 = 12
CHUNK = 1 << 17
LEAST_P = 1e-4  # two-sided; three independent tests at fixed seeds
_SLOT = 1  # word of a resolution


def judge(what: str, counts: np.ndarray, seconds: float) -> Row:
    """Compare counts of independent draws with equal expectations.

    Args:
        what: Was drawn.
        counts: How often each item was drawn. [items], int.
        seconds: That it took.
    Returns:
        `chi2` is the sum of (count - expected)^2 / expected, with items - 1 degrees of freedom; `p`
        the probability of one at least as far from its mean, if all items are equally likely (None
        for an epoch, which is not random in what it visits); `smallest_expected` the count that the
        rarest of so many items has, typically; `starved` the number of items that were never drawn.
    """
    expected = counts.sum() / len(counts)
    chi2 = float(np.square(counts - expected).sum() / expected)
    z = (chi2 - (len(counts) - 1)) / math.sqrt(
        2 * (len(counts) - 1)
    )  # normal for so many degrees of freedom
    p = math.erfc(abs(z) / math.sqrt(2))
    starved = int((counts == 0).sum())
    likely_starved = len(counts) * math.exp(-expected)
    return {
        "what": what,
        "items": len(counts),
        "draws_per_item": float(expected),
        "chi2": chi2,
        "p": p,
        "smallest": int(counts.min()),
        "smallest_expected": rarest(len(counts), expected),
        "largest": int(counts.max()),
        "starved": starved,
        "seconds": round(seconds, 1),
        "holds": p >= LEAST_P and starved <= likely_starved + 5 * math.sqrt(likely_starved),
    }


def rarest(items: int, expected: float) -> int:
    """Return the count that the rarest of many Poisson items has: its expected number reaches one
    half.
    """
    count = 0
    probability = math.exp(-expected)
    below = 0.0
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


def of_replay(
    what: str, items: int, sampler: dict[str, str], draws_per_item: int, chunk: int
) -> Row:
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
    return {**row, "p": None, "smallest_expected": 1, "holds": bool((counts == 1).all())}


def of_trajectories(items: int, draws_per_item: int, chunk: int) -> Row:
    """Test trajectories of one step each on the ops that a stream uses: the tree, the draws, the
    descent.
    """
    begin = time.monotonic()
    ops = load_backend("cpu")
    sums = torch.zeros(tree_size(items), dtype=torch.int64)
    sums[:items] = 1
    ops.tree_build_(sums, items)
    # Only the slot of a resolution is looked at, so the slots may be zeros that take no memory.
    slots = torch.from_numpy(np.zeros((items, 8), np.int64))
    rule = AnchorRule().as_list()
    coordinates = torch.empty(chunk, dtype=torch.int64)
    resolutions = torch.empty(chunk, 8, dtype=torch.int64)

    def batches() -> Iterator[np.ndarray]:
        for first in range(0, items * draws_per_item, chunk):
            ops.draw_(coordinates, 7, 1, first, items)
            ops.resolve_(resolutions, sums, slots, coordinates, rule, MassUnit.STEP, 7, 1, first)
            yield resolutions[:, _SLOT].numpy()

    return judge("trajectories of one step", count_all(items, batches()), time.monotonic() - begin)


def main() -> None:
    """Test steps, trajectories with a drawn anchor, trajectories alone, and an epoch.

    The exit code is 1 if a test fails.
    """
    report = Report(
        __doc__, "few items, to see that it runs", draws_per_item=(24, "expected count of an item")
    )
    items = 1 << (QUICK_LOG2 if report.options.quick else ITEMS_LOG2)
    chunk = min(CHUNK, items)
    draws_per_item = report.options.draws_per_item
    rows = []
    for what, unit in (("steps", "step"), ("trajectories, then anchors", "trajectory")):
        sampler = {"kind": "uniform", "unit": unit}
        rows.append(of_replay(what, items, sampler, draws_per_item, chunk))
        say(what)
    rows.append(of_trajectories(items, draws_per_item, chunk))
    rows.append(of_epoch(items, chunk))
    print_rows(rows)
    report.write(rows)
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


if __name__ == "__main__":
    main()
