"""Draws and orders of epochs: chi-square at fixed seeds, and no item starves among 2^25 equal ones."""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import op_wrappers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, norm
from torch import Tensor

from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.records import MassUnit, Resolution

ALL_ANCHORS = (0, 0, 1, 1 << 40, 0)
MANY, CHUNK = 1 << 25, 1 << 22
# Draws for each item among the 2^25, on average, and which steps are looked at: GEAR_LONG_TESTS=1 draws 32
# times as many, and looks at all, for some minutes.
DRAWS, EVERY = (8.0, 1) if os.environ.get("GEAR_LONG_TESTS") else (0.25, 7)
NATIVE = load_backend("cpu")


def chi_square(counts: Tensor, expected: Tensor | float, degrees: int = 0, spread: float = 1.0) -> float:
    """The probability of counts this far from what is expected.

    Args:
        counts: Of any shape; their total is given.
        expected: Of each.
        degrees: Of freedom; 0: one less than there are counts.
        spread: The variance of a count, in parts of what is expected.
    """
    statistic = float(((counts - expected) ** 2 / expected).sum()) / spread
    return float(chi2.sf(statistic, degrees or counts.numel() - 1))


# ---- coordinates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("total", [7, 1000, 3 << 40, (1 << 62) - 1])
def test_coordinates_are_uniform(total: int) -> None:
    count, bins = 200_000, min(total, 1000)
    coordinates = op_wrappers.draw(1, 2, 0, total, count)
    edges = np.array([total * i // bins for i in range(1, bins)])
    counts = np.bincount(np.searchsorted(edges, coordinates.numpy(), side="right"), minlength=bins)
    assert 1e-3 < chi_square(torch.from_numpy(counts).double(), count / bins) < 1 - 1e-3


def test_neighbouring_samples_streams_and_seeds_are_independent() -> None:
    count, bins = 100_000, 16
    keys = ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1 << 32, 0, 0))  # seed, stream, first
    draws = [op_wrappers.draw(*key, bins, count) for key in keys]
    for other in draws[1:]:
        table = torch.bincount(draws[0] * bins + other, minlength=bins**2).double()
        assert chi_square(table, count / bins**2) > 1e-3


@pytest.mark.parametrize("unit", [MassUnit.TRAJECTORY, MassUnit.STEP])
def test_trajectories_and_steps(unit: int) -> None:
    """A trajectory in proportion to its mass, then a step of it uniformly; or every step alike."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 30, (500,))
    masses = lengths if unit == MassUnit.STEP else torch.randint(1, 10, (500,))
    slots = torch.zeros(500, 8, dtype=torch.int64)
    slots[:, 4] = lengths
    count, total = 1_000_000, int(masses.sum())
    coordinates = op_wrappers.draw(3, 0, 0, total, count)
    hits = op_wrappers.resolve(op_wrappers.tree(masses), slots, coordinates, ALL_ANCHORS, unit=unit, seed=3)
    first = lengths.cumsum(0) - lengths
    steps = torch.bincount(
        first[hits[:, Resolution.SLOT]] + hits[:, Resolution.ANCHOR], minlength=int(lengths.sum())
    ).double()
    share = masses / total / lengths
    assert chi_square(steps, count * share.double().repeat_interleave(lengths)) > 1e-3
    trajectories = torch.bincount(hits[:, Resolution.SLOT], minlength=500).double()
    assert chi_square(trajectories, count * masses.double() / total) > 1e-3


class TestManyEqualItems:
    """2^25 items of mass 1: in a float32 tree more than a quarter of them could never be drawn."""

    def test_draws(self) -> None:
        tree = op_wrappers.tree(torch.ones(MANY, dtype=torch.int64))
        assert op_wrappers.tree_total(tree, MANY) == MANY
        slots = torch.zeros(MANY, 8, dtype=torch.int64)  # never written, so they take no memory
        counts, one = torch.zeros(MANY, dtype=torch.int32), torch.ones(CHUNK, dtype=torch.int32)
        num_draws, out = int(MANY * DRAWS), torch.empty(CHUNK, 8, dtype=torch.int64)
        for first in range(0, num_draws, CHUNK):
            coordinates = op_wrappers.draw(9, 0, first, MANY, CHUNK)
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
        sums = op_wrappers.tree(lengths)
        for first in range(0, MANY, CHUNK):
            coordinates = torch.arange(first, first + CHUNK, EVERY)
            out = torch.empty(len(coordinates), 8, dtype=torch.int64)
            NATIVE.resolve_(out, sums, slots, coordinates, ALL_ANCHORS, MassUnit.STEP, 0, 0, 0)
            assert torch.equal(out[:, Resolution.SLOT] * length + out[:, Resolution.ANCHOR], coordinates)


# ---- the order of an epoch ---------------------------------------------------------------------------


def order(size: int, *, seed: int = 0, stream: int = 0, epoch: int = 0) -> Tensor:
    return op_wrappers.permute(seed, stream, epoch, 0, size, size)


@pytest.mark.parametrize("sizes", [range(1, 301), [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 1_000_003]])
def test_bijection_for_every_small_size_and_large_ones(sizes: list[int]) -> None:
    for size in sizes:
        assert torch.equal(order(size, epoch=size).sort().values, torch.arange(size))


@given(size=st.integers(1, 20_000), seed=st.integers(0, (1 << 63) - 1), epoch=st.integers(0, (1 << 62)))
def test_bijection(size: int, seed: int, epoch: int) -> None:
    items = order(size, seed=seed, stream=epoch % 5, epoch=epoch)
    assert torch.equal(items.sort().values, torch.arange(size))


@given(size=st.integers(1, 1 << 60), first=st.integers(0, 1 << 60), count=st.integers(0, 50))
def test_any_part_is_the_same_as_the_whole(size: int, first: int, count: int) -> None:
    first = min(first, size - 1)
    count = min(count, size - first)
    part = op_wrappers.permute(3, 1, 2, first, size, count)
    one_by_one = [op_wrappers.permute(3, 1, 2, first + i, size, 1) for i in range(count)]
    assert part.tolist() == [int(x) for x in one_by_one]
    assert len(set(part.tolist())) == count


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 33])
def test_every_index_goes_everywhere(size: int) -> None:
    """Chi-square of the tables index -> place, and place -> place of the next index, over many epochs."""
    epochs = 20_000
    orders = torch.empty(epochs, size, dtype=torch.int64)
    for epoch, row in enumerate(orders):
        NATIVE.permute_(row, 11, 0, epoch, 0, size)
    places = torch.bincount((torch.arange(size) * size + orders).view(-1), minlength=size**2).double()
    # Rows and columns sum to `epochs`, so (size - 1)^2 degrees, and each cell varies by 1 - 1 / size less.
    assert chi_square(places, epochs / size, (size - 1) ** 2, 1 / (1 - 1 / size)) > 1e-3
    pairs = torch.bincount((orders[:, :-1] * size + orders[:, 1:]).view(-1), minlength=size**2).double()
    pairs = pairs.view(size, size)[~torch.eye(size, dtype=torch.bool)]  # no place is taken twice
    # The size - 1 pairs of one epoch exclude each other: a sum of that mean, close to chi-square.
    assert chi_square(pairs, epochs / size, (size - 1) ** 2) > 1e-3


def test_every_order_of_four_items() -> None:
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    for epoch in range(24 * 400):
        counts[tuple(order(4, seed=5, epoch=epoch).tolist())] += 1
    assert chi_square(torch.tensor(list(counts.values())), 400) > 1e-3


def test_neighbours_are_spread() -> None:
    """The distance of two neighbours' places is as that of two random places; so is the place of index 0."""
    size, epochs, bins = 1000, 300, 20
    steps = torch.zeros(bins, dtype=torch.int64)
    for epoch in range(epochs):
        items = order(size, seed=2, epoch=epoch)
        steps += torch.bincount((items.diff() % size) * bins // size, minlength=bins)
    assert chi_square(steps, epochs * (size - 1) / bins) > 1e-3


def test_seeds_streams_and_epochs_differ() -> None:
    keys = list(itertools.product((0, 1, 1 << 40), (0, 1), (0, 1, 1 << 40)))
    orders = {tuple(order(100, seed=s, stream=t, epoch=e).tolist()) for s, t, e in keys}
    assert len(orders) == len(keys)
