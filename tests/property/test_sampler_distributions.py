"""How often each sampler draws its items: chi-square at fixed seeds, or exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from store_support import StoreScene, priority_rule, stream_spec

from deepspeed_gear.ops.records import Resolution, Slot
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.samplers.random_samplers import stratify_

BATCH, NUM_BATCHES = 20_000, 6


@pytest.fixture
def scenes() -> Iterator[Any]:
    made: list[StoreScene] = []

    def make(kind: str, unit: str, lengths: list[int], **options: Any) -> StoreScene:
        spec = stream_spec(kind, unit, options.pop("batch", BATCH), seed=options.pop("seed", 5), **options)
        sizes = {"num_slots": len(lengths), "num_rows": sum(lengths) + len(lengths), "num_peers": 1}
        made.append(StoreScene([spec], lengths, **sizes))
        return made[-1]

    yield make
    for scene in made:
        scene.close()


def counted(scene: StoreScene, count: int = NUM_BATCHES, by_row: bool = False) -> np.ndarray:
    """Draw; return how often each trajectory, or each row, was hit."""
    stream = scene.streams[0]
    size = scene.spec.num_rows if by_row else scene.spec.num_slots
    counts = np.zeros(size, np.int64)
    for key in range(int(stream.position[0]), int(stream.position[0]) + count):
        stream.state.ask(key)
        records = stream.get(key).resolutions.numpy()
        hit = records[:, 3] + records[:, 5] if by_row else records[:, 1]
        counts += np.bincount(hit, minlength=size)
        stream.release(key)
    return counts


def p_value(counts: np.ndarray, masses: np.ndarray) -> float:
    """Chi-square of counts against masses; items that are rare are taken together."""
    assert not counts[masses == 0].any()
    expected = masses / masses.sum() * counts.sum()
    rare = expected < 10
    found = [*counts[~rare].tolist(), *([counts[rare].sum()] if expected[rare].sum() >= 10 else [])]
    wanted = [*expected[~rare].tolist(), *([expected[rare].sum()] if expected[rare].sum() >= 10 else [])]
    if len(found) < 2:
        return 1.0
    wanted = np.array(wanted) / sum(wanted) * sum(found)
    return float(stats.chisquare(found, wanted).pvalue)


def prioritized(scene: StoreScene, priorities: np.ndarray) -> None:
    """Report the priorities of the items, in stored order."""
    masses = scene.streams[0].masses
    slots = np.arange(scene.spec.num_slots)
    steps = scene.table.slots[slots, 4] if masses.by_step else np.ones_like(slots)
    updates = np.stack(
        [
            np.repeat(slots, steps),
            np.repeat(scene.table.slots[slots, 1], steps),
            np.arange(steps.sum()) - np.repeat(np.cumsum(steps) - steps, steps),
        ],
        axis=1,
    )
    masses.reports.add_items(updates, priorities.astype(np.float32), 0)


PRIORITIES = {
    "of 2^1 to 2^40": 2.0 ** (np.arange(40) - 23),
    "one": np.array([3.0]),
    "equal": np.full(40, 0.7),
    "one heavy": np.where(np.arange(40) == 17, 1000.0, 0.01),
    "some zero": np.where(np.arange(40) % 3 == 0, 0.0, 1.0 + np.arange(40)),
}


@pytest.mark.parametrize("name", sorted(PRIORITIES))
@pytest.mark.parametrize("kind", ["random", "stratified"])
@pytest.mark.parametrize("unit", ["step", "trajectory"])
def test_priorities(scenes: Any, name: str, kind: str, unit: str) -> None:
    """Masses of 2^1 to 2^40 lie in one tree: each has exactly its mass, and the heavy ones their share."""
    priorities = PRIORITIES[name]
    num_items = len(priorities)
    lengths = [1] * num_items if unit == "trajectory" or num_items == 1 else [5] * (num_items // 5)
    scene = scenes(kind, unit, lengths, priorities=priority_rule(alpha=1.0))
    prioritized(scene, priorities)
    counts = counted(scene, by_row=unit == "step")
    masses = scene.streams[0].masses.leaves.copy()
    wanted = np.round(priorities * 2.0**24)
    assert masses[masses > 0].tolist() == wanted[wanted > 0].tolist()
    assert p_value(counts, masses) > 1e-3


def test_light_items_beside_heavy_ones_have_their_coordinates(scenes: Any) -> None:
    """Chance cannot show a mass of 2 beside 2^40: every coordinate of the lightest ones is resolved."""
    scene = scenes("random", "trajectory", [1] * 40, priorities=priority_rule(alpha=1.0), batch=62)
    prioritized(scene, PRIORITIES["of 2^1 to 2^40"])
    stream = scene.streams[0]
    stream.state.ask(0)
    stream.get(0)
    rows = torch.empty(62, 8, dtype=torch.int64)
    stream.masses.resolve(rows, torch.arange(62), 0)
    assert rows[:, 1].tolist() == [0] * 2 + [1] * 4 + [2] * 8 + [3] * 16 + [4] * 32
    assert (rows[:, Resolution.MASS] == 2 ** (rows[:, 1] + 1)).all()


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_alpha(scenes: Any, alpha: float) -> None:
    priorities = np.random.default_rng(0).exponential(size=60) + 0.01
    scene = scenes("random", "step", [6] * 10, priorities=priority_rule(alpha=alpha))
    prioritized(scene, priorities)
    counts = counted(scene, by_row=True)
    used = np.flatnonzero(scene.streams[0].masses.leaves)
    assert p_value(counts[used], priorities**alpha) > 1e-3


@pytest.mark.parametrize("unit", ["step", "trajectory"])
@pytest.mark.parametrize("kind", ["random", "stratified"])
def test_weights(scenes: Any, kind: str, unit: str) -> None:
    """The column `task` of trajectory i is i: it is its weight here."""
    lengths = [1 + number % 4 for number in range(30)]
    scene = scenes(kind, unit, lengths, weight=("task", 10))
    shares = np.arange(30) * (np.array(lengths) if unit == "step" else 1)
    assert p_value(counted(scene), shares) > 1e-3
    rows = counted(scene, by_row=True)
    wanted = np.zeros(scene.spec.num_rows)
    for number, steps in enumerate(lengths):
        first = scene.table.slots[number, Slot.FIRST_ROW]
        wanted[first : first + steps] = shares[number] / steps
    assert p_value(rows, wanted) > 1e-3


@pytest.mark.parametrize("total", [1, 5, 1000, 1001, (1 << 62) - 1])
def test_strata_are_equal_parts(total: int) -> None:
    """Sample j lies in the j-th part; over all samples each coordinate is equally likely, exactly."""
    batch = 7
    for given in (0, total - 1, total // 2):
        coordinates = torch.full((batch,), given)
        stratify_(coordinates, total)
        assert coordinates.tolist() == [(j * total + given) // batch for j in range(batch)]
    if total <= 1001:
        counts = np.zeros(total, np.int64)
        for given in range(total):
            coordinates = torch.full((batch,), given)
            stratify_(coordinates, total)
            counts += np.bincount(coordinates.numpy(), minlength=total)
        assert (counts == batch).all()


def test_strata_spread_a_batch(scenes: Any) -> None:
    """Of equal items in whole strata, each is drawn once in every global batch."""
    scene = scenes("stratified", "step", [8] * 8, priorities=priority_rule(), batch=64)
    for _ in range(5):
        assert (counted(scene, 1, by_row=True)[scene.streams[0].masses.leaves > 0] == 1).all()


@pytest.mark.parametrize("drop", [False, True])
def test_an_epoch_has_every_order(scenes: Any, drop: bool) -> None:
    """Each of 6 items is at each place of a batch of 4 equally often, also where tails are dropped."""
    counts = np.zeros((4, 6), np.int64)
    stream = scenes("epoch", "trajectory", [1] * 6, batch=4, drop=drop).streams[0]
    for key in range(3000):
        counts[np.arange(4), stream.get(key).resolutions[:, 0].numpy()] += 1
        stream.release(key)
    assert p_value(counts.reshape(-1), np.ones(24)) > 1e-3


def test_removed_items_leave_the_others_their_shares(scenes: Any) -> None:
    priorities = np.arange(1, 41, dtype=np.float64)
    scene = scenes("random", "step", [5] * 8, priorities=priority_rule(alpha=1.0))
    prioritized(scene, priorities)
    counted(scene, 1)
    table_access.remove(scene.table, [2, 7])
    wanted = np.where(np.isin(np.arange(8), [2, 7]), 0, priorities.reshape(8, 5).sum(1))
    assert p_value(counted(scene), wanted) > 1e-3
