"""The order of an epoch: a permutation for every size, and as good as random."""

from __future__ import annotations

import itertools

import op_wrappers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_ops import ops_named
from scipy.stats import chi2

from deepspeed_gear.ops import Ops, load_backend


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_named(request.param)


@pytest.fixture(scope="module")
def native() -> Ops:
    return load_backend("cpu")


def order(ops: Ops, size: int, *, seed: int = 0, stream: int = 0, epoch: int = 0) -> torch.Tensor:
    return op_wrappers.permute(seed, stream, epoch, 0, size, size, ops=ops)


def test_bijection_for_every_small_size(ops: Ops) -> None:
    for size in range(1, 301):
        assert torch.equal(order(ops, size, epoch=size).sort().values, torch.arange(size))


@given(size=st.integers(1, 20_000), seed=st.integers(0, (1 << 63) - 1), epoch=st.integers(0, (1 << 62)))
def test_bijection(native: Ops, size: int, seed: int, epoch: int) -> None:
    items = order(native, size, seed=seed, stream=epoch % 5, epoch=epoch)
    assert torch.equal(items.sort().values, torch.arange(size))


@pytest.mark.parametrize("size", [(1 << 16) - 1, 1 << 16, (1 << 16) + 1, 1_000_003])
def test_bijection_of_larger_sizes(native: Ops, size: int) -> None:
    assert torch.equal(order(native, size).sort().values, torch.arange(size))


@given(size=st.integers(1, 1 << 60), first=st.integers(0, 1 << 60), count=st.integers(0, 50))
def test_any_part_is_the_same_as_the_whole(native: Ops, size: int, first: int, count: int) -> None:
    first = min(first, size - 1)
    count = min(count, size - first)
    part = op_wrappers.permute(3, 1, 2, first, size, count, ops=native)
    one_by_one = [op_wrappers.permute(3, 1, 2, first + i, size, 1, ops=native) for i in range(count)]
    assert part.tolist() == [int(x) for x in one_by_one]
    assert len(set(part.tolist())) == count


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 31, 33])
def test_every_index_goes_everywhere(native: Ops, size: int) -> None:
    """Chi-square of the tables index -> place, and place -> place of the next index, over many epochs."""
    epochs = 20_000
    orders = torch.empty(epochs, size, dtype=torch.int64)
    for epoch, row in enumerate(orders):
        native.permute_(row, 11, 0, epoch, 0, size)
    places = torch.bincount((torch.arange(size) * size + orders).view(-1), minlength=size**2).double()
    expected = epochs / size
    # Rows and columns sum to `epochs`, so (size - 1)^2 degrees, and each cell varies by 1 - 1 / size less.
    statistic = float(((places - expected) ** 2 / expected).sum()) * (size - 1) / size
    assert chi2.sf(statistic, (size - 1) ** 2) > 1e-3
    pairs = torch.bincount((orders[:, :-1] * size + orders[:, 1:]).view(-1), minlength=size**2).double()
    pairs = pairs.view(size, size)[~torch.eye(size, dtype=torch.bool)]  # no place is taken twice
    # The size - 1 pairs of one epoch exclude each other: a sum of that mean, close to chi-square.
    statistic = float(((pairs - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, (size - 1) ** 2) > 1e-3


def test_every_order_of_four_items(native: Ops) -> None:
    counts = dict.fromkeys(itertools.permutations(range(4)), 0)
    epochs = 24 * 400
    for epoch in range(epochs):
        counts[tuple(order(native, 4, seed=5, epoch=epoch).tolist())] += 1
    statistic = sum((c - 400) ** 2 / 400 for c in counts.values())
    assert chi2.sf(statistic, 23) > 1e-3


def test_neighbours_are_spread(native: Ops) -> None:
    """The distance of two neighbours' places is as that of two random places; so is the place of index 0."""
    size, epochs, bins = 1000, 300, 20
    steps = torch.zeros(bins, dtype=torch.int64)
    for epoch in range(epochs):
        items = order(native, size, seed=2, epoch=epoch)
        steps += torch.bincount((items.diff() % size) * bins // size, minlength=bins)
    expected = epochs * (size - 1) / bins
    assert chi2.sf(float(((steps - expected) ** 2 / expected).sum()), bins - 1) > 1e-3


def test_seeds_streams_and_epochs_differ(native: Ops) -> None:
    orders = [
        tuple(order(native, 100, seed=seed, stream=stream, epoch=epoch).tolist())
        for seed, stream, epoch in itertools.product((0, 1, 1 << 40), (0, 1), (0, 1, 1 << 40))
    ]
    assert len(set(orders)) == len(orders)
