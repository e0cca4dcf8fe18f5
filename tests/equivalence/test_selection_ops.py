"""Draws, permutations, trees and resolutions: the C++ against the reference, bit for bit."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_kit import NUM_ITEMS, SIZES, compare, masses_of, resolve, store_of, tree, tree_total
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import tree_size
from deepspeed_gear.ops.records import MassUnit, Resolution, SlotState

TOTALS = (1, 2, 3, 1000, (1 << 32) - 1, 1 << 32, (1 << 62) - 1, (1 << 63) - 1)
# first, trim, stride, most, from_end
RULES = {
    "all": (0, 0, 1, 1 << 40, 0),
    "start": (0, 0, 1, 1, 0),
    "end": (0, 0, 1, 1, 1),
    "every third": (0, 0, 3, 1 << 40, 0),
    "fits": (4, 2, 1, 1 << 40, 0),
    "every second from the end, at most 5": (1, 3, 2, 5, 1),
}


@pytest.mark.parametrize("count", SIZES)
def test_draw(cpu: Ops, count: int) -> None:
    for total in TOTALS:
        for seed, stream, first in (
            (0, 0, 0),
            ((1 << 63) - 1, (1 << 32) - 1, 5),
            (7, 1, (1 << 63) - 40),
        ):
            (out,) = compare(cpu, "draw_", torch.full((count,), -1), seed, stream, first, total)
            assert ((out >= 0) & (out < total)).all()


@pytest.mark.parametrize(
    "size", [0, 1, 2, 3, 4, 5, 33, 1 << 10, (1 << 10) + 1, (1 << 40) - 1, 1 << 61]
)
def test_permute(cpu: Ops, size: int) -> None:
    for count in {min(count, size) for count in SIZES}:
        for seed, stream, epoch, first in ((0, 0, 0, 0), ((1 << 63) - 1, 3, 1 << 40, size - count)):
            compare(cpu, "permute_", torch.full((count,), -1), seed, stream, epoch, first, size)


@pytest.mark.parametrize("num_items", NUM_ITEMS)
def test_tree(native: Ops, num_items: int) -> None:
    torch.manual_seed(num_items)
    sums = torch.randint(1, 99, (tree_size(num_items),))  # the inner nodes must not matter
    sums[num_items:] = torch.where(
        torch.arange(len(sums) - num_items) < -num_items % 32, 0, sums[num_items:]
    )
    (built,) = compare(native, "tree_build_", sums, num_items)
    for count in SIZES if num_items else ():
        items = torch.randint(0, min(num_items, 20), (count,))  # many equal ones: the last wins
        masses = torch.randint(0, 1 << 40, (count,)) * (torch.rand(count) < 0.8)
        wanted = built.clone()
        for item, mass in zip(items.tolist(), masses.tolist(), strict=True):
            wanted[item] = mass
        (built,) = compare(native, "tree_update_", built, num_items, items, masses)
        assert torch.equal(built, compare(native, "tree_build_", wanted, num_items)[0])


def anchors_by_hand(rule: tuple[int, ...], lengths: list[int]) -> list[list[int]]:
    first, trim, stride, most, from_end = rule
    forward = [list(range(first, length - trim, stride))[:most] for length in lengths]
    return [
        [n - 1 - a for a in some] if from_end else some
        for some, n in zip(forward, lengths, strict=True)
    ]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("num_slots", [1, 33, 1500])
def test_slot_masses(cpu: Ops, rule: tuple[int, ...], num_slots: int) -> None:
    torch.manual_seed(num_slots)
    slots = torch.randint(0, 1 << 62, (num_slots, 8))
    slots[:, 0] = torch.randint(0, 4, (num_slots,))
    slots[:, 4] = torch.randint(1, 40, (num_slots,))
    log = torch.randint(0, num_slots, (50,))
    sums = tree(torch.full((num_slots,), 7), ops=cpu)
    lengths = slots[:, 4].tolist()
    anchors = [len(some) for some in anchors_by_hand(rule, lengths)]
    masses = {
        MassUnit.TRAJECTORY: [int(count > 0) for count in anchors],
        MassUnit.STEP: anchors,
        MassUnit.LENGTH: [
            steps * (count > 0) for steps, count in zip(lengths, anchors, strict=True)
        ],
    }
    for unit, wanted in masses.items():
        for first, last in ((0, 0), (3, 40), (130, 180)):  # the last one: all round the ring
            (found,) = compare(cpu, "slot_masses_", sums, slots, log, first, last, rule, unit)
            for slot in {int(log[i % 50]) for i in range(first, last)}:
                assert found[slot] == (wanted[slot] if slots[slot, 0] == SlotState.COMMITTED else 0)
            assert torch.equal(found, compare(cpu, "tree_build_", found, num_slots)[0])


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("unit", [MassUnit.TRAJECTORY, MassUnit.STEP])
@pytest.mark.parametrize("num_slots", [1, 33, 1500])
def test_resolve(cpu: Ops, rule: tuple[int, ...], unit: int, num_slots: int) -> None:
    torch.manual_seed(num_slots)
    slots = torch.randint(0, 1 << 62, (num_slots, 8))
    slots[:, 4] = torch.randint(1, 40, (num_slots,))
    slots[0, 4] = 40  # some anchor
    anchors = anchors_by_hand(rule, slots[:, 4].tolist())
    masses = torch.tensor([len(a) if unit == MassUnit.STEP else 3 * bool(a) for a in anchors])
    sums = tree(masses, ops=cpu)
    total = int(masses.sum())
    samples = [torch.randint(0, total, (n,)) for n in SIZES]
    for coordinates in (*samples, torch.arange(0, total, total // 300 + 1)):
        count = len(coordinates)
        out = torch.full((count, Resolution.NUM_WORDS), -1)
        (out,) = compare(cpu, "resolve_", out, sums, slots, coordinates, rule, unit, 5, 1, 1 << 40)
        assert all(anchor in anchors[slot] for slot, anchor in out[:, (1, 5)].tolist())
        assert torch.equal(out[:, 7], torch.arange(count) + (1 << 40))


@pytest.mark.parametrize("num_slots", [1, 7, 33, 150])
def test_resolve_rows(cpu: Ops, num_slots: int) -> None:
    torch.manual_seed(num_slots)
    slots, row_slots = store_of(torch.randint(1, 20, (num_slots,)).tolist())
    masses = masses_of(len(row_slots)).clamp(max=1 << 30) * (row_slots >= 0)
    masses[row_slots == 0] += 1  # one of them at least can be drawn
    sums = tree(masses, ops=cpu)
    total = int(masses.sum())
    for count in (*SIZES, 200):
        coordinates = torch.randint(0, total, (count,))
        out = torch.full((count, Resolution.NUM_WORDS), -1)
        (found,) = compare(cpu, "resolve_rows_", out, sums, slots, row_slots, coordinates, 1 << 40)
        row = found[:, 3] + found[:, 5]
        slot = found[:, 1]
        assert torch.equal(row_slots[row].long(), slot)
        assert torch.equal(found[:, (0, 2, 3, 4)], slots[slot][:, (2, 1, 3, 4)])
        assert torch.equal(found[:, Resolution.MASS], sums[row])
        assert torch.equal(found[:, 7], torch.arange(count) + (1 << 40))
        assert torch.equal(row, torch.searchsorted(masses.cumsum(0), coordinates, right=True))


# ---- the item that each coordinate hits, against plain sums --------------------------------------

LARGEST = (1 << 62) - 1


def descend(
    ops: Ops, sums: Tensor, num_items: int, coordinates: list[int]
) -> list[tuple[int, int]]:
    """Item and rest of every coordinate, through the op: where the unit is a step, the rest is the
    anchor.
    """
    slots = torch.zeros(num_items, 8, dtype=torch.int64)
    out = resolve(sums, slots, torch.tensor(coordinates), RULES["all"], unit=MassUnit.STEP, ops=ops)
    return [(item, rest) for item, rest in out[:, (1, 5)].tolist()]


MASSES = st.lists(
    st.one_of(st.just(0), st.integers(0, 5), st.integers(0, 1 << 55)), min_size=1, max_size=70
)


@given(masses=MASSES, data=st.data())
def test_coordinate_hits_the_item_that_holds_it(
    careful: Ops, masses: list[int], data: st.DataObject
) -> None:
    total = sum(masses)
    sums = tree(torch.tensor(masses), ops=careful)
    assert tree_total(sums, len(masses)) == total
    if total == 0:
        return
    # Both ends of every item, and some points between.
    begins = [0, *itertools.accumulate(masses)]
    edges = {c for end in begins for c in (end - 1, end) if 0 <= c < total}
    coordinates = sorted(edges | data.draw(st.sets(st.integers(0, total - 1), max_size=5)))
    for coordinate, (item, rest) in zip(
        coordinates, descend(careful, sums, len(masses), coordinates), strict=True
    ):
        assert begins[item] + rest == coordinate
        assert 0 <= rest < masses[item]


@pytest.mark.parametrize("num_items", [31, 32, 33, 1023, 1024, 1025, 32767, 32768, 32769])
def test_every_coordinate_of_equal_items(careful: Ops, num_items: int) -> None:
    sums = tree(torch.full((num_items,), 2), ops=careful)
    hits = descend(careful, sums, num_items, list(range(2 * num_items)))
    assert hits == [(c // 2, c % 2) for c in range(2 * num_items)]


def test_the_largest_total(careful: Ops) -> None:
    masses = [0] * 40
    masses[7] = LARGEST - 1
    masses[39] = 1
    sums = tree(torch.tensor(masses), ops=careful)
    assert descend(careful, sums, 40, [0, LARGEST - 2, LARGEST - 1]) == [
        (7, 0),
        (7, LARGEST - 2),
        (39, 0),
    ]
