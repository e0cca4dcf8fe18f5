"""Draws, orders of epochs, and how often each sampler draws its items: chi-square at fixed seeds,
or exactly.

No item starves among 2^25 equal ones.
"""

import itertools
import math
import os
from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import op_kit
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import chi2, norm
from store_support import StoreScene, priority_rule, stream_spec
from torch import Tensor

from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import MassUnit, Resolution, Slot
from deepspeed_gear.replay import table_access
from deepspeed_gear.sampling.mass_rules import Decay
from deepspeed_gear.sampling.samplers.kinds import stratify_

ALL_ANCHORS = (0, 0, 1, 1 << 40, 0)
MANY = 1 << 25
CHUNK = 1 << 22
# Draws for each item among the 2^25, on average, and which steps are looked at: GEAR_LONG_TESTS=1
# draws 32 times as many, and looks at all, for some minutes.
DRAWS, EVERY = (8.0, 1) if os.environ.get("GEAR_LONG_TESTS") else (0.25, 7)
NATIVE = load_backend("cpu")


def chi_square(counts: Any, expected: Any, degrees: int = 0, spread: float = 1.0) -> float:
    """Return the probability of counts this far from what is expected; their total is given.

    There are `degrees` of freedom, or one less than counts; `spread` is the variance of a count, in
    parts of what is expected.
    """
    counts = np.asarray(counts, float)
    expected = np.asarray(expected, float)
    statistic = float(((counts - expected) ** 2 / expected).sum()) / spread
    return float(chi2.sf(statistic, degrees or counts.size - 1))


# ---- coordinates ---------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [7, 1000, 3 << 40, (1 << 62) - 1])
def test_coordinates_are_uniform(total: int) -> None:
    count = 200_000
    bins = min(total, 1000)
    coordinates = op_kit.draw(1, 2, 0, total, count)
    edges = np.array([total * i // bins for i in range(1, bins)])
    counts = np.bincount(np.searchsorted(edges, coordinates.numpy(), side="right"), minlength=bins)
    assert 1e-3 < chi_square(counts, count / bins) < 1 - 1e-3


def test_neighbouring_samples_streams_and_seeds_are_independent() -> None:
    count = 100_000
    bins = 16
    keys = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1 << 32, 0, 0))  # seed, stream, first
    draws = [op_kit.draw(*key, bins, count) for key in keys]
    for other in draws[1:]:
        table = torch.bincount(draws[0] * bins + other, minlength=bins**2).double()
        assert chi_square(table, count / bins**2) > 1e-3


class TestManyEqualItems:
    """2^25 items of mass 1: in a float32 tree more than a quarter of them could never be drawn."""

    def test_draws(self) -> None:
        tree = op_kit.tree(torch.ones(MANY, dtype=torch.int64))
        assert op_kit.tree_total(tree, MANY) == MANY
        slots = torch.zeros(MANY, 8, dtype=torch.int64)  # never written, so they take no memory
        counts = torch.zeros(MANY, dtype=torch.int32)
        one = torch.ones(CHUNK, dtype=torch.int32)
        num_draws = int(MANY * DRAWS)
        out = torch.empty(CHUNK, 8, dtype=torch.int64)
        for first in range(0, num_draws, CHUNK):
            coordinates = op_kit.draw(9, 0, first, MANY, CHUNK)
            NATIVE.resolve_(out, tree, slots, coordinates, ALL_ANCHORS, MassUnit.STEP, 0, 0, 0)
            counts.index_add_(0, out[:, Resolution.SLOT], one)
        assert int(counts.sum()) == num_draws
        # Chi-square with 2^25 - 1 degrees is normal.
        statistic = float(((counts - DRAWS).double() ** 2).sum()) / DRAWS
        assert abs(statistic - MANY) / math.sqrt(2 * MANY) < norm.isf(1e-3)
        # As many items undrawn as chance leaves, and as many in each eighth of the tree.
        undrawn = (counts == 0).view(8, -1).sum(dim=1).double()
        chance = math.exp(-DRAWS)
        deviation = (undrawn - MANY / 8 * chance) / math.sqrt(MANY / 8 * chance * (1 - chance))
        assert float(deviation.abs().max()) < norm.isf(1e-4)

    @pytest.mark.parametrize("length", [1, 1000])
    def test_every_step_is_one_coordinate(self, length: int) -> None:
        """2^25 steps in trajectories of a length and one of the rest."""
        lengths = torch.full((-(-MANY // length),), length)
        lengths[-1] = MANY - length * (len(lengths) - 1)
        slots = torch.zeros(len(lengths), 8, dtype=torch.int64)
        slots[:, 4] = lengths
        sums = op_kit.tree(lengths)
        for first in range(0, MANY, CHUNK):
            coordinates = torch.arange(first, first + CHUNK, EVERY)
            out = torch.empty(len(coordinates), 8, dtype=torch.int64)
            NATIVE.resolve_(out, sums, slots, coordinates, ALL_ANCHORS, MassUnit.STEP, 0, 0, 0)
            assert torch.equal(
                out[:, Resolution.SLOT] * length + out[:, Resolution.ANCHOR], coordinates
            )


# ---- the order of an epoch -----------------------------------------------------------------------


def order(size: int, *, seed: int = 0, stream: int = 0, epoch: int = 0) -> Tensor:
    return op_kit.permute(seed, stream, epoch, 0, size, size)


@given(
    seed=st.integers(0, (1 << 63) - 1),
    epoch=st.integers(0, (1 << 62)),
    large=st.integers(300, 1 << 17),
)
@example(seed=0, epoch=9, large=1_000_003)
@example(seed=1, epoch=7, large=1 << 16)
def test_bijection_for_every_small_size_and_large_ones(seed: int, epoch: int, large: int) -> None:
    for size in (*range(1, 300, 1 + epoch % 7), large):
        items = order(size, seed=seed, stream=epoch % 5, epoch=epoch)
        assert torch.equal(items.sort().values, torch.arange(size))


@given(size=st.integers(1, 1 << 60), first=st.integers(0, 1 << 60), count=st.integers(0, 50))
def test_any_part_is_the_same_as_the_whole(size: int, first: int, count: int) -> None:
    first = min(first, size - 1)
    count = min(count, size - first)
    part = op_kit.permute(3, 1, 2, first, size, count)
    one_by_one = [op_kit.permute(3, 1, 2, first + i, size, 1) for i in range(count)]
    assert part.tolist() == [int(x) for x in one_by_one]
    assert len(set(part.tolist())) == count


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 33])
def test_every_index_goes_everywhere(size: int) -> None:
    """Chi-square of the tables index -> place, and place -> place of the next index, over many
    epochs.
    """
    epochs = 20_000
    orders = torch.empty(epochs, size, dtype=torch.int64)
    for epoch, row in enumerate(orders):
        NATIVE.permute_(row, 11, 0, epoch, 0, size)
    places = torch.bincount(
        (torch.arange(size) * size + orders).view(-1), minlength=size**2
    ).double()
    # Rows and columns sum to `epochs`, so (size - 1)^2 degrees, and each cell varies by 1 - 1 /
    # size less.
    assert chi_square(places, epochs / size, (size - 1) ** 2, 1 / (1 - 1 / size)) > 1e-3
    pairs = torch.bincount(
        (orders[:, :-1] * size + orders[:, 1:]).view(-1), minlength=size**2
    ).double()
    pairs = pairs.view(size, size)[~torch.eye(size, dtype=torch.bool)]  # no place is taken twice
    # The size - 1 pairs of one epoch exclude each other: a sum of that mean, close to chi-square.
    assert chi_square(pairs, epochs / size, (size - 1) ** 2) > 1e-3


def test_every_order_of_four_items() -> None:
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for epoch in range(24 * 400):
        counts[tuple(order(4, seed=5, epoch=epoch).tolist())] += 1
    assert chi_square(torch.tensor(list(counts.values())), 400) > 1e-3


def test_neighbours_are_spread() -> None:
    """The distance of two neighbours' places is as that of two random places; so is the place of
    index 0.
    """
    size = 1000
    epochs = 300
    bins = 20
    steps = torch.zeros(bins, dtype=torch.int64)
    for epoch in range(epochs):
        items = order(size, seed=2, epoch=epoch)
        steps += torch.bincount((items.diff() % size) * bins // size, minlength=bins)
    assert chi_square(steps, epochs * (size - 1) / bins) > 1e-3


def test_seeds_streams_and_epochs_differ() -> None:
    keys = list(itertools.product((0, 1, 1 << 40), (0, 1), (0, 1, 1 << 40)))
    orders = {tuple(order(100, seed=s, stream=t, epoch=e).tolist()) for s, t, e in keys}
    assert len(orders) == len(keys)


# ---- samplers ------------------------------------------------------------------------------------

BATCH = 20_000
NUM_BATCHES = 6


@pytest.fixture
def scenes() -> Iterator[Any]:
    made: list[StoreScene] = []

    def make(kind: str, unit: str, lengths: list[int], **options: Any) -> StoreScene:
        spec = stream_spec(
            kind, unit, options.pop("batch", BATCH), seed=options.pop("seed", 5), **options
        )
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
    cells = np.where(expected < 10, 0, np.arange(1, len(masses) + 1))
    found, wanted = (np.bincount(cells, each) for each in (counts, expected))
    found = found[wanted >= 10]
    wanted = wanted[wanted >= 10]
    return chi_square(found, wanted / wanted.sum() * found.sum()) if len(found) > 1 else 1.0


def prioritized(scene: StoreScene, priorities: np.ndarray) -> None:
    """Report the priorities of the items, in stored order."""
    masses = scene.streams[0].masses
    records = scene.table.slots
    steps = records[:, Slot.NUM_STEPS] if masses.by_step else np.ones(len(records), np.int64)
    slots = np.repeat(np.arange(len(records)), steps)
    anchors = np.concatenate([np.arange(count) for count in steps])
    updates = np.stack([slots, records[slots, Slot.GENERATION], anchors], axis=1)
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
    """Masses of 2^1 to 2^40 lie in one tree: each has exactly its mass, and the heavy ones their
    share.
    """
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


def test_old_items_decay_exactly() -> None:
    """Items of 61 global batches, of two eras, against exp(-age / 7) in 40 digits."""
    spec = stream_spec(batch=BATCH, seed=5, priorities=priority_rule(alpha=1.0, decay=Decay(7.0)))
    with StoreScene([spec], [1], 61, 200, 1) as scene:
        for _ in range(60):
            counted(scene, 1)
            scene.add(1)
        counts = counted(scene)
        masses = scene.streams[0].masses.leaves.copy()
    with localcontext(prec=40):
        exact = [(Decimal(-age) / 7).exp() for age in range(60, -1, -1)]
        wanted = np.array([float(value / sum(exact)) for value in exact])
    np.testing.assert_allclose(masses / masses.sum(), wanted, rtol=2e-7, atol=2.0**-30)
    assert p_value(counts, wanted) > 1e-3


def test_light_items_beside_heavy_ones_have_their_coordinates(scenes: Any) -> None:
    """Chance cannot show a mass of 2 beside 2^40: every coordinate of the lightest ones is
    resolved.
    """
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
    """Sample j lies in the j-th part; over all samples each coordinate is equally
    likely, exactly.
    """
    batch = 7
    for drawn in (0, total - 1, total // 2):
        coordinates = torch.full((batch,), drawn)
        stratify_(coordinates, total)
        assert coordinates.tolist() == [(j * total + drawn) // batch for j in range(batch)]
    if total <= 1001:
        counts = np.zeros(total, np.int64)
        for drawn in range(total):
            coordinates = torch.full((batch,), drawn)
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
    """Each of 6 items is at each place of a batch of 4 equally often, also where tails
    are dropped.
    """
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
