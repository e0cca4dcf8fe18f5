"""What is drawn, and how often: chi-square at fixed seeds, and no item starves among 2^25 equal ones."""

from __future__ import annotations

import math
import os

import numpy as np
import op_wrappers
import pytest
import torch
from scipy.stats import chi2, norm
from torch import Tensor

from deepspeed_gear.ops import Ops, load_backend
from deepspeed_gear.ops.records import MassUnit, Resolution

ALL_ANCHORS = (0, 0, 1, 1 << 40, 0)
MANY = 1 << 25
CHUNK = 1 << 22
# Draws for each item among the 2^25, on average. GEAR_LONG_TESTS=1 draws 32 times as many: some minutes.
DRAWS = 8.0 if os.environ.get("GEAR_LONG_TESTS") else 0.25


@pytest.fixture(scope="module")
def native() -> Ops:
    return load_backend("cpu")


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """The probability of counts this far from what is expected; the total is given."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return float(chi2.sf(statistic, len(counts) - 1))


@pytest.mark.parametrize("total", [7, 1000, 3 << 40, (1 << 62) - 1])
def test_coordinates_are_uniform(native: Ops, total: int) -> None:
    count, bins = 200_000, min(total, 1000)
    coordinates = op_wrappers.draw(1, 2, 0, total, count, ops=native)
    edges = np.array([total * i // bins for i in range(1, bins)])
    counts = np.bincount(np.searchsorted(edges, coordinates.numpy(), side="right"), minlength=bins)
    assert chi_square(torch.from_numpy(counts).double(), torch.full((bins,), count / bins)) > 1e-3
    assert chi_square(torch.from_numpy(counts).double(), torch.full((bins,), count / bins)) < 1 - 1e-3


def test_neighbouring_samples_streams_and_seeds_are_independent(native: Ops) -> None:
    count, bins = 100_000, 16
    draws = [
        op_wrappers.draw(seed, stream, first, bins, count, ops=native)
        for seed, stream, first in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1 << 32, 0, 0))
    ]
    for other in draws[1:]:
        table = torch.bincount(draws[0] * bins + other, minlength=bins**2).double()
        assert chi_square(table, torch.full((bins**2,), count / bins**2)) > 1e-3


@pytest.mark.parametrize("unit", [MassUnit.TRAJECTORY, MassUnit.STEP])
def test_trajectories_and_steps(native: Ops, unit: int) -> None:
    """A trajectory in proportion to its mass, then a step of it uniformly; or every step alike."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 30, (500,))
    masses = lengths if unit == MassUnit.STEP else torch.randint(1, 10, (500,))
    slots = torch.zeros(500, 8, dtype=torch.int64)
    slots[:, 4] = lengths
    sums = op_wrappers.tree(masses, ops=native)
    count, total = 1_000_000, int(masses.sum())
    coordinates = op_wrappers.draw(3, 0, 0, total, count, ops=native)
    hits = op_wrappers.resolve(sums, slots, coordinates, ALL_ANCHORS, unit=unit, seed=3, ops=native)
    first = lengths.cumsum(0) - lengths
    steps = torch.bincount(
        first[hits[:, Resolution.SLOT]] + hits[:, Resolution.ANCHOR], minlength=int(lengths.sum())
    ).double()
    share = masses / total / lengths
    assert chi_square(steps, count * share.double().repeat_interleave(lengths)) > 1e-3
    trajectories = torch.bincount(hits[:, Resolution.SLOT], minlength=500).double()
    assert chi_square(trajectories, count * masses.double() / total) > 1e-3


@pytest.fixture(scope="module")
def tree(native: Ops) -> tuple[Tensor, Tensor]:
    """A tree of equal items, and slots of zeros, which are never written and so take no memory."""
    slots = torch.zeros(MANY, 8, dtype=torch.int64)
    return op_wrappers.tree(torch.ones(MANY, dtype=torch.int64), ops=native), slots


class TestManyEqualItems:
    """2^25 items of mass 1: in a float32 tree more than a quarter of them could never be drawn."""

    def resolve(self, native: Ops, tree: tuple[Tensor, Tensor], coordinates: Tensor) -> Tensor:
        out = torch.empty(len(coordinates), 8, dtype=torch.int64)
        native.resolve_(out, *tree, coordinates, ALL_ANCHORS, MassUnit.STEP, 0, 0, 0)
        return out[:, Resolution.SLOT]

    def test_every_item_has_its_coordinate(self, native: Ops, tree: tuple[Tensor, Tensor]) -> None:
        assert op_wrappers.tree_total(tree[0], MANY) == MANY
        for first in range(0, MANY, CHUNK):
            coordinates = torch.arange(first, first + CHUNK)
            assert torch.equal(self.resolve(native, tree, coordinates), coordinates)

    def test_draws(self, native: Ops, tree: tuple[Tensor, Tensor]) -> None:
        counts = torch.zeros(MANY, dtype=torch.int32)
        one = torch.ones(CHUNK, dtype=torch.int32)
        num_draws = int(MANY * DRAWS)
        for first in range(0, num_draws, CHUNK):
            coordinates = op_wrappers.draw(9, 0, first, MANY, CHUNK, ops=native)
            counts.index_add_(0, self.resolve(native, tree, coordinates), one)
        assert int(counts.sum()) == num_draws
        # Chi-square with 2^25 - 1 degrees is normal.
        statistic = float(((counts - DRAWS).double() ** 2).sum()) / DRAWS
        assert abs(statistic - MANY) / math.sqrt(2 * MANY) < norm.isf(1e-3)
        # As many items undrawn as chance leaves, and as many in each eighth of the tree.
        undrawn = (counts == 0).view(8, -1).sum(dim=1).double()
        chance = math.exp(-DRAWS)
        deviation = (undrawn - MANY / 8 * chance) / math.sqrt(MANY / 8 * chance * (1 - chance))
        assert float(deviation.abs().max()) < norm.isf(1e-4)

    def test_steps_of_long_trajectories(self, native: Ops) -> None:
        """2^25 steps in trajectories of 1,000 and one of the rest: every step is one coordinate."""
        lengths = torch.full((MANY // 1000 + 1,), 1000)
        lengths[-1] = MANY % 1000
        slots = torch.zeros(len(lengths), 8, dtype=torch.int64)
        slots[:, 4] = lengths
        sums = op_wrappers.tree(lengths, ops=native)
        out = torch.empty(CHUNK, 8, dtype=torch.int64)
        for first in range(0, MANY, CHUNK):
            coordinates = torch.arange(first, first + CHUNK)
            native.resolve_(out, sums, slots, coordinates, ALL_ANCHORS, MassUnit.STEP, 0, 0, 0)
            assert torch.equal(out[:, Resolution.SLOT] * 1000 + out[:, Resolution.ANCHOR], coordinates)
