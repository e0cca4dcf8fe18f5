"""The tree of masses against plain sums: totals, updates, and the item that each coordinate hits."""

from __future__ import annotations

import itertools

import op_wrappers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference_ops import ops_named
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.records import MassUnit

MOST = (1 << 62) - 1
ANY_ANCHOR = (0, 0, 1, MOST, 0)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ops_named(request.param)


def descend(ops: Ops, sums: Tensor, num_items: int, coordinates: list[int]) -> list[tuple[int, int]]:
    """Item and rest of every coordinate, through the op: where the unit is a step, the rest is the anchor."""
    slots = torch.zeros(num_items, 8, dtype=torch.int64)
    out = op_wrappers.resolve(sums, slots, torch.tensor(coordinates), ANY_ANCHOR, unit=MassUnit.STEP, ops=ops)
    return [(item, rest) for item, rest in out[:, (1, 5)].tolist()]


masses = st.lists(st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 1 << 55)), min_size=1, max_size=70)


@given(masses=masses, data=st.data())
def test_coordinate_hits_the_item_that_holds_it(ops: Ops, masses: list[int], data: st.DataObject) -> None:
    total = sum(masses)
    sums = op_wrappers.tree(torch.tensor(masses), ops=ops)
    assert op_wrappers.tree_total(sums, len(masses)) == total
    if total == 0:
        return
    # Both ends of every item, and some points between.
    begins = [0, *itertools.accumulate(masses)]
    edges = {c for end in begins for c in (end - 1, end) if 0 <= c < total}
    coordinates = sorted(edges | data.draw(st.sets(st.integers(0, total - 1), max_size=5)))
    for coordinate, (item, rest) in zip(
        coordinates, descend(ops, sums, len(masses), coordinates), strict=True
    ):
        assert begins[item] + rest == coordinate
        assert 0 <= rest < masses[item]


@given(masses=masses, data=st.data())
def test_updates_are_the_same_as_a_new_tree(ops: Ops, masses: list[int], data: st.DataObject) -> None:
    sums = op_wrappers.tree(torch.tensor(masses), ops=ops)
    change = st.tuples(st.integers(0, len(masses) - 1), st.integers(0, 1 << 55))
    for changes in data.draw(st.lists(st.lists(change, max_size=8), max_size=4)):
        items, values = torch.tensor(changes, dtype=torch.int64).view(-1, 2).unbind(1)
        ops.tree_update_(sums, len(masses), items.contiguous(), values.contiguous())
        for item, value in changes:
            masses[item] = value  # the last wins
        assert torch.equal(sums, op_wrappers.tree(torch.tensor(masses), ops=ops))


@pytest.mark.parametrize("num_items", [31, 32, 33, 1023, 1024, 1025, 32767, 32768, 32769])
def test_every_coordinate_of_equal_items(ops: Ops, num_items: int) -> None:
    sums = op_wrappers.tree(torch.full((num_items,), 2), ops=ops)
    hits = descend(ops, sums, num_items, list(range(2 * num_items)))
    assert hits == [(c // 2, c % 2) for c in range(2 * num_items)]


def test_the_largest_total(ops: Ops) -> None:
    masses = [0] * 40
    masses[7], masses[39] = MOST - 1, 1
    sums = op_wrappers.tree(torch.tensor(masses), ops=ops)
    assert descend(ops, sums, 40, [0, MOST - 2, MOST - 1]) == [(7, 0), (7, MOST - 2), (39, 0)]


def test_levels() -> None:
    assert op_wrappers.tree_levels(0) == op_wrappers.tree_levels(32) == [(0, 32)]
    assert op_wrappers.tree_levels(33) == [(0, 64), (64, 32)]
    assert op_wrappers.tree_levels(1025) == [(0, 1056), (1056, 64), (1120, 32)]
    assert op_wrappers.tree_size(1 << 25) < 1.04 * (1 << 25)
