"""Draws, permutations, trees and resolutions: the C++ against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import tree_size
from deepspeed_gear.ops.records import MassUnit, Resolution, SlotState

SIZES = (0, 1, 7, 33)
TOTALS = (1, 2, 3, 1000, (1 << 32) - 1, 1 << 32, (1 << 62) - 1, (1 << 63) - 1)
# One group, whole groups, one more than a level holds; three levels.
NUM_ITEMS = (0, 1, 7, 31, 32, 33, 1023, 1024, 1025, 33000)
# first, trim, stride, most, from_end
RULES = {
    "all": (0, 0, 1, 1 << 40, 0),
    "start": (0, 0, 1, 1, 0),
    "end": (0, 0, 1, 1, 1),
    "every third": (0, 0, 3, 1 << 40, 0),
    "fits": (4, 2, 1, 1 << 40, 0),
    "every second from the end, at most 5": (1, 3, 2, 5, 1),
}


def both(reference: Ops, native: Ops, op: str, out: Tensor, *arguments: object) -> Tensor:
    """Run an op on copies of `out`; they must come out equal."""
    expected, got = out.clone(), out.clone()
    getattr(reference, op)(expected, *arguments)
    getattr(native, op)(got, *arguments)
    assert torch.equal(got, expected)
    return expected


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("total", TOTALS)
def test_draw(reference: Ops, cpu: Ops, count: int, total: int) -> None:
    for seed, stream, first in ((0, 0, 0), ((1 << 63) - 1, (1 << 32) - 1, 5), (7, 1, (1 << 63) - 40)):
        out = both(reference, cpu, "draw_", torch.full((count,), -1), seed, stream, first, total)
        assert ((out >= 0) & (out < total)).all()


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 33, 1 << 10, (1 << 10) + 1, (1 << 40) - 1, 1 << 61])
def test_permute(reference: Ops, cpu: Ops, count: int, size: int) -> None:
    count = min(count, size)
    for seed, stream, epoch, first in ((0, 0, 0, 0), ((1 << 63) - 1, 3, 1 << 40, size - count)):
        both(reference, cpu, "permute_", torch.full((count,), -1), seed, stream, epoch, first, size)


def test_permute_of_nothing(reference: Ops, cpu: Ops) -> None:
    both(reference, cpu, "permute_", torch.empty(0, dtype=torch.int64), 0, 0, 0, 0, 0)


@pytest.mark.parametrize("num_items", NUM_ITEMS)
def test_tree(reference: Ops, native: Ops, num_items: int) -> None:
    torch.manual_seed(num_items)
    sums = torch.randint(1, 99, (tree_size(num_items),))  # the inner nodes must not matter
    sums[num_items:] = torch.where(torch.arange(len(sums) - num_items) < -num_items % 32, 0, sums[num_items:])
    built = both(reference, native, "tree_build_", sums, num_items)
    if num_items == 0:
        return
    for count in SIZES:
        # Small ranges have many equal items: the last wins.
        items = torch.randint(0, min(num_items, 20), (count,))
        masses = torch.randint(0, 1 << 40, (count,)) * (torch.rand(count) < 0.8)
        built = both(reference, native, "tree_update_", built, num_items, items, masses)
        again = both(reference, native, "tree_build_", built, num_items)
        assert torch.equal(built, again)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("unit", [MassUnit.TRAJECTORY, MassUnit.STEP, MassUnit.LENGTH])
@pytest.mark.parametrize("num_slots", [1, 33, 1500])
def test_slot_masses(reference: Ops, cpu: Ops, rule: tuple[int, ...], unit: int, num_slots: int) -> None:
    torch.manual_seed(num_slots)
    slots = torch.randint(0, 1 << 62, (num_slots, 8))
    slots[:, 0], slots[:, 4] = torch.randint(0, 4, (num_slots,)), torch.randint(1, 40, (num_slots,))
    log, sums = torch.randint(0, num_slots, (50,)), torch.zeros(tree_size(num_slots), dtype=torch.int64)
    sums[:num_slots] = 7
    cpu.tree_build_(sums, num_slots)
    anchors = anchors_by_hand(rule, slots[:, 4].tolist())
    for first, last in ((0, 0), (3, 40), (130, 180)):  # the last one: all round the ring
        found = both(reference, cpu, "slot_masses_", sums, slots, log, first, last, rule, unit)
        for slot in {int(log[i % 50]) for i in range(first, last)}:
            steps, some = int(slots[slot, 4]), anchors[slot]
            mass = {
                MassUnit.TRAJECTORY: bool(some),
                MassUnit.STEP: len(some),
                MassUnit.LENGTH: steps * bool(some),
            }[unit]
            assert found[slot] == (mass if slots[slot, 0] == SlotState.COMMITTED else 0)
        assert torch.equal(both(reference, cpu, "tree_build_", found, num_slots), found)


def test_changes_outside_the_log_are_refused(careful: Ops) -> None:
    sums, slots = torch.zeros(tree_size(3), dtype=torch.int64), torch.ones(3, 8, dtype=torch.int64)
    for log, first, last in ((torch.tensor([0, 1]), 0, 3), (torch.tensor([0, 1]), 2, 1)):
        with pytest.raises((ValueError, RuntimeError), match=r"entries.* must be in a log of 2"):
            careful.slot_masses_(sums, slots, log, first, last, (0, 0, 1, 9, 0), 0)
    for bad in (-1, 3):
        with pytest.raises((ValueError, RuntimeError), match=r"items.* must lie in \[0, 3\)"):
            careful.slot_masses_(sums, slots, torch.tensor([0, bad]), 0, 2, (0, 0, 1, 9, 0), 0)
    assert not sums.any()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("unit", [MassUnit.TRAJECTORY, MassUnit.STEP])
@pytest.mark.parametrize("num_slots", [1, 7, 33, 1500])
def test_resolve(reference: Ops, cpu: Ops, rule: tuple[int, ...], unit: int, num_slots: int) -> None:
    torch.manual_seed(num_slots)
    slots = torch.randint(0, 1 << 62, (num_slots, 8))
    slots[:, 4] = torch.randint(1, 40, (num_slots,))
    anchors = anchors_by_hand(rule, slots[:, 4].tolist())
    masses = torch.tensor([len(a) if unit == MassUnit.STEP else 3 * bool(a) for a in anchors])
    if not masses.any():
        slots[0, 4], masses[0] = 40, 1
        anchors = anchors_by_hand(rule, slots[:, 4].tolist())
    sums = torch.zeros(tree_size(num_slots), dtype=torch.int64)
    sums[:num_slots] = masses
    cpu.tree_build_(sums, num_slots)
    total = int(masses.sum())
    for coordinates in (
        *(torch.randint(0, total, (n,)) for n in SIZES),
        torch.arange(0, total, total // 300 + 1),
    ):
        count = len(coordinates)
        out = torch.full((count, Resolution.NUM_WORDS), -1)
        resolved = both(reference, cpu, "resolve_", out, sums, slots, coordinates, rule, unit, 5, 1, 1 << 40)
        for slot, anchor in resolved[:, (1, 5)].tolist():
            assert anchor in anchors[slot]
        assert torch.equal(resolved[:, 7], torch.arange(count) + (1 << 40))


def anchors_by_hand(rule: tuple[int, ...], lengths: list[int]) -> list[list[int]]:
    first, trim, stride, most, from_end = rule
    forward = [list(range(first, length - trim, stride))[:most] for length in lengths]
    return [[n - 1 - a for a in some] if from_end else some for some, n in zip(forward, lengths, strict=True)]


@pytest.mark.parametrize("bad", [-1, 12, 1 << 62])
def test_coordinates_beyond_the_total_are_refused(careful: Ops, bad: int) -> None:
    sums = torch.zeros(tree_size(3), dtype=torch.int64)
    sums[:3] = 4
    slots, out = torch.ones(3, 8, dtype=torch.int64), torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises((ValueError, RuntimeError), match=r"coordinates.* must lie in \[0, 12\)"):
        careful.resolve_(out, sums, slots, torch.tensor([0, bad]), (0, 0, 1, 1, 0), 0, 0, 0, 0)
    assert not out.any()


def test_items_outside_the_tree_are_refused(careful: Ops) -> None:
    sums = torch.zeros(tree_size(3), dtype=torch.int64)
    for bad in (-1, 3):
        with pytest.raises((ValueError, RuntimeError), match=r"items.* must lie in \[0, 3\)"):
            careful.tree_update_(sums, 3, torch.tensor([0, bad]), torch.tensor([1, 1]))
    with pytest.raises((ValueError, RuntimeError), match="must be positive"):
        careful.draw_(torch.zeros(1, dtype=torch.int64), 0, 0, 0, 0)
    with pytest.raises((ValueError, RuntimeError), match=r"indices.* in \[0, 3\)"):
        careful.permute_(torch.zeros(2, dtype=torch.int64), 0, 0, 0, 2, 3)
    assert not sums.any()
