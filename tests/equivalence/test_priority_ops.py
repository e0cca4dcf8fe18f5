"""Masses, weights, minima, rows and highest priorities: against the reference, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import op_wrappers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from priority_op_cases import (
    ALPHAS,
    BAD_PRIORITIES,
    NUM_ITEMS,
    REFUSED,
    SIZES,
    SameBits,
    any_priorities,
    masses_of,
    store_of,
    tree_of,
)
from torch import Tensor

from deepspeed_gear.ops import Ops, records
from deepspeed_gear.ops.constants import (
    FAN_OUT,
    MOST_MASS_BITS,
    ONE_Q62,
    minima_levels,
    minima_size,
    most_mass_bits,
    tree_size,
)
from deepspeed_gear.ops.records import MassUnit, Resolution, Slot, SlotState, UpdateCount


def test_a_committed_slot_is_what_the_store_calls_so() -> None:
    assert records.SlotState.COMMITTED == SlotState.COMMITTED


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("count", [*SIZES, 1000])
def test_mass(reference: Ops, native: Ops, count: int, alpha: int) -> None:
    torch.manual_seed(count)
    for priorities in (any_priorities(count), torch.rand(count) * 2):
        expected, got = torch.full((2, count), -1).unbind()
        expected, got = expected.clone(), got.clone()
        for most_bits in (MOST_MASS_BITS, 27, 1):
            reference.mass_(expected, priorities, alpha, most_bits)
            native.mass_(got, priorities, alpha, most_bits)
            assert torch.equal(got, expected)
            assert torch.equal(expected == 0, priorities == 0)
            assert (expected <= 1 << most_bits).all()


@pytest.mark.parametrize("bad", BAD_PRIORITIES)
def test_mass_of_no_priority(careful: Ops, kernels_on_host: Ops, bad: float) -> None:
    masses, priorities = torch.full((9,), -1), torch.ones(9)
    priorities[4] = bad
    with pytest.raises(REFUSED, match=r"priority 4 must be finite and at least 0, got -?(1|inf|nan)"):
        careful.mass_(masses, priorities, 1 << 61, 40)
    assert (masses == -1).all()
    with pytest.raises(RuntimeError, match="leads outside"):
        kernels_on_host.mass_(masses, priorities, 1 << 61, 40)


@pytest.mark.parametrize("alpha", [-1, ONE_Q62 + 1])
def test_exponent_outside(careful: Ops, alpha: int) -> None:
    resolutions = torch.ones(1, Resolution.NUM_WORDS, dtype=torch.int64)
    with pytest.raises(REFUSED, match="alpha must be in"):
        careful.mass_(torch.zeros(1).long(), torch.ones(1), alpha, 40)
    with pytest.raises(REFUSED, match="beta must be in"):
        careful.importance_(torch.zeros(1), resolutions, 1, 1, alpha)


@pytest.mark.parametrize("most_bits", [0, MOST_MASS_BITS + 1])
def test_largest_mass_outside(careful: Ops, most_bits: int) -> None:
    with pytest.raises(REFUSED, match=r"most_bits must be in \[1, 40\], got"):
        careful.mass_(torch.zeros(1).long(), torch.ones(1), 1, most_bits)


@pytest.mark.parametrize("num_items", [0, 1, 2**21 - 1, 2**21, 2**24, 10**8, 2**40 - 1])
def test_masses_of_a_full_table_do_not_overflow(num_items: int) -> None:
    most_bits = most_mass_bits(num_items)
    assert 1 <= most_bits <= MOST_MASS_BITS
    assert 2 * num_items << most_bits < 1 << 62
    assert (
        most_bits == MOST_MASS_BITS or 8 * (num_items + 1) << most_bits >= 1 << 62
    )  # no less than it may be


@pytest.mark.parametrize("beta", ALPHAS)
@pytest.mark.parametrize("count", [*SIZES, 500])
def test_importance(reference: Ops, cpu: Ops, same_bits: SameBits, count: int, beta: int) -> None:
    torch.manual_seed(count)
    resolutions = torch.randint(0, 1 << 62, (count, Resolution.NUM_WORDS))
    resolutions[:, Resolution.MASS] >>= torch.randint(0, 60, (count,))
    resolutions[:, Resolution.MASS] += 1
    most = (1 << 63) - 1
    for numerator, num_items in ((1, 1), (1 << 50, 1000), (most, 1), (1, most), (12345, 7)):
        expected, got = torch.full((count,), -1.0), torch.full((count,), -1.0)
        reference.importance_(expected, resolutions, numerator, num_items, beta)
        cpu.importance_(got, resolutions, numerator, num_items, beta)
        assert same_bits(got, expected)
        exact = (numerator / (num_items * resolutions[:, Resolution.MASS].double())) ** (beta / ONE_Q62)
        assert torch.allclose(expected.double(), exact, rtol=1e-6, atol=0)


def test_importance_of_the_least_mass_is_one(cpu: Ops) -> None:
    resolutions = torch.randint(1, 1 << 40, (50, Resolution.NUM_WORDS))
    weights = torch.zeros(1)
    for row in resolutions:
        cpu.importance_(weights, row[None], int(row[Resolution.MASS]), 1, round(0.4 * ONE_Q62))
        assert weights.item() == 1.0


def test_importance_refuses(careful: Ops) -> None:
    resolutions, weights = torch.ones(3, Resolution.NUM_WORDS, dtype=torch.int64), torch.full((3,), -1.0)
    for numerator, count in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(REFUSED, match="numerator and count must be positive"):
            careful.importance_(weights, resolutions, numerator, count, 1)
    for bad in (0, -5):
        resolutions[1, Resolution.MASS] = bad
        with pytest.raises(REFUSED, match=rf"mass of resolution 1 must be positive, got {bad}"):
            careful.importance_(weights, resolutions, 1, 1, 1)
        assert (weights == -1).all()


def minima_by_hand(masses: Tensor) -> list[int]:
    """All levels above the leaves, by a loop over the groups."""
    below, levels = masses.tolist(), []
    for _, width in minima_levels(len(masses)):
        groups = [below[i : i + FAN_OUT] for i in range(0, len(below), FAN_OUT)]
        below = [min((v for v in group if v > 0), default=0) for group in groups]
        below += [0] * (width - len(below))
        levels += below
    return levels


@pytest.mark.parametrize("num_items", NUM_ITEMS)
def test_minima(reference: Ops, native: Ops, num_items: int) -> None:
    torch.manual_seed(num_items)
    masses = masses_of(num_items)
    sums = tree_of(masses, reference)
    minima = torch.full((minima_size(num_items),), 77)
    for ops in (reference, native):
        minima.fill_(77)
        ops.minima_build_(minima, sums, num_items)
        assert minima.tolist() == minima_by_hand(masses)
    for count in SIZES if num_items else (0,):
        # Small ranges have many equal items; small masses are the least of their groups, and vanish again.
        items = torch.randint(0, max(min(num_items, 70 if count < 33 else num_items), 1), (count,))
        new = masses_of(count) >> torch.randint(0, 40, (count,))
        reference.tree_update_(sums, num_items, items, new)
        expected, got = minima.clone(), minima.clone()
        reference.minima_update_(expected, sums, num_items, items)
        native.minima_update_(got, sums, num_items, items)
        assert torch.equal(got, expected)
        assert got.tolist() == minima_by_hand(sums[:num_items])
        some = sums[:num_items][sums[:num_items] > 0]
        least = op_wrappers.least_mass(sums, got, num_items)
        assert least == (int(some.min()) if len(some) else 0)
        minima = got


def test_minima_rise_and_vanish(native: Ops) -> None:
    """The least mass of everything grows step by step, until nothing is left."""
    num_items = 1025
    masses = torch.arange(num_items) + 5
    sums = tree_of(masses, native)
    minima = torch.zeros(minima_size(num_items), dtype=torch.int64)
    native.minima_build_(minima, sums, num_items)
    for first, end in pairwise((0, 1, 31, 33, 64, 1000, 1024, 1025)):
        assert op_wrappers.least_mass(sums, minima, num_items) == first + 5
        items = torch.arange(first, end)
        native.tree_update_(sums, num_items, items, items * 0)
        native.minima_update_(minima, sums, num_items, items.repeat(2))
        assert minima.tolist() == minima_by_hand(sums[:num_items])
    assert op_wrappers.least_mass(sums, minima, num_items) == 0


def test_minima_refuse(careful: Ops) -> None:
    sums, minima = tree_of(torch.ones(40).long(), careful), torch.zeros(minima_size(40)).long()
    for bad in (-1, 40):
        with pytest.raises(REFUSED, match=r"items.* must lie in \[0, 40\)"):
            careful.minima_update_(minima, sums, 40, torch.tensor([0, bad]))


@pytest.mark.parametrize("size", [31, 33])
def test_minima_of_another_size(native: Ops, size: int) -> None:
    sums = tree_of(torch.ones(40).long(), native)
    with pytest.raises(RuntimeError, match=f"minima of 40 items must have 32 words, got {size}"):
        native.minima_build_(torch.zeros(size).long(), sums, 40)


@pytest.mark.parametrize("num_slots", [1, 7, 33, 150])
def test_resolve_rows(reference: Ops, cpu: Ops, num_slots: int) -> None:
    torch.manual_seed(num_slots)
    slots, row_slots = store_of(torch.randint(1, 20, (num_slots,)).tolist())
    sums = tree_of(masses_of(len(row_slots)).clamp(max=1 << 30) * (row_slots >= 0), cpu)
    total = op_wrappers.tree_total(sums, len(row_slots))
    if total == 0:
        sums = tree_of((row_slots >= 0).long(), cpu)
        total = op_wrappers.tree_total(sums, len(row_slots))
    for count in (*SIZES, 200):
        coordinates = torch.randint(0, total, (count,))
        expected, got = (torch.full((count, Resolution.NUM_WORDS), -1) for _ in range(2))
        for ops, out in ((reference, expected), (cpu, got)):
            ops.resolve_rows_(out, sums, slots, row_slots, coordinates, 1 << 40)
        assert torch.equal(got, expected)
        row, slot = expected[:, 3] + expected[:, 5], expected[:, 1]
        assert torch.equal(row_slots[row].long(), slot)
        assert torch.equal(expected[:, (0, 2, 3, 4)], slots[slot][:, (2, 1, 3, 4)])
        assert torch.equal(expected[:, Resolution.MASS], sums[row])
        assert torch.equal(expected[:, 7], torch.arange(count) + (1 << 40))
        ends = sums[: len(row_slots)].cumsum(0)
        assert torch.equal(row, torch.searchsorted(ends, coordinates, right=True))


@pytest.mark.parametrize(
    ("bad_slot", "word", "value"),
    [(-1, 0, 2), (3, 0, 2), (1, 3, 6), (1, 3, -1), (1, 4, 1), (-(1 << 31), 0, 2), ((1 << 31) - 1, 0, 2)],
)
def test_row_of_no_slot(careful: Ops, bad_slot: int, word: int, value: int) -> None:
    """Row 5 is the second step of slot 1."""
    slots = torch.tensor([[2, 1, 10 + i, i * 4, 4, 4, 0, 0] for i in range(3)])
    row_slots = torch.arange(3, dtype=torch.int32).repeat_interleave(4)
    sums, out = tree_of(torch.ones(12).long(), careful), torch.zeros(2, 8).long()
    row_slots[5], slots[1, word] = bad_slot, value
    with pytest.raises(REFUSED, match="coordinate 1 must hit a row that is a step of its slot"):
        careful.resolve_rows_(out, sums, slots, row_slots, torch.tensor([0, 5]), 0)


@pytest.mark.parametrize("bad", [-1, 12, 1 << 62])
def test_coordinate_beyond_the_rows(careful: Ops, bad: int) -> None:
    sums, out = tree_of(torch.ones(12).long(), careful), torch.zeros(1, 8).long()
    slots, row_slots = torch.ones(3, 8).long(), torch.zeros(12, dtype=torch.int32)
    with pytest.raises(REFUSED, match=r"coordinates.* must lie in \[0, 12\)"):
        careful.resolve_rows_(out, sums, slots, row_slots, torch.tensor([bad]), 0)


def orders(count: int) -> dict[str, Tensor]:
    """Priorities in orders that are hard for a search that goes from the first to the last."""
    some = torch.rand(count)
    return {
        "random": some,
        "rising": some.sort().values,
        "falling": some.sort(descending=True).values,
        "equal": torch.ones(count),
        "few values": (some * 4).floor(),
        "zeros": some * 0 * torch.where(some < 0.5, -1, 1),
        "any": any_priorities(count),
    }


@pytest.mark.parametrize("order", orders(0))
@pytest.mark.parametrize("num_items", [0, 1, 7, 33, 63, 64, 65, 1025, 20000])
def test_top_k(reference: Ops, cpu: Ops, num_items: int, order: str) -> None:
    torch.manual_seed(num_items)
    priorities, masses = orders(num_items)[order], masses_of(num_items + 3)
    for k in (0, 1, 7, 33, 300, max(num_items - 1, 0), num_items + 1):
        expected, got = torch.full((k,), 5), torch.full((k,), 5)
        reference.top_k_(expected, priorities, masses)
        cpu.top_k_(got, priorities, masses)
        assert torch.equal(got, expected)
        leaves = [i for i in range(num_items) if masses[i] > 0] if num_items < 2000 else None
        if leaves is not None:
            values = priorities.tolist()
            by_hand = sorted(leaves, key=lambda i: (-values[i], i))[:k]
            assert got.tolist() == by_hand + [-1] * (k - len(by_hand))


@given(data=st.data())
def test_slot_priorities(reference: Ops, cpu: Ops, data: st.DataObject) -> None:
    """Slots that change, step by step: the arrays stay those of the reference."""
    by_step, keeps_minima = data.draw(st.booleans()), data.draw(st.booleans())
    num_slots, length = 6, 7
    num_items = num_slots * length if by_step else num_slots
    rule = data.draw(st.sampled_from([[0, 0, 1, 1 << 40, 0], [1, 0, 2, 2, 0], [0, 2, 1, 3, 1]]))
    unit = MassUnit.STEP if by_step else data.draw(st.sampled_from([MassUnit.TRAJECTORY, MassUnit.LENGTH]))
    slots = torch.zeros(num_slots, Slot.NUM_WORDS, dtype=torch.int64)
    slots[:, Slot.FIRST_ROW], slots[:, Slot.NUM_ROWS] = torch.arange(num_slots) * length, length

    def arrays() -> list[Tensor]:
        words = minima_size(num_items) if keeps_minima else 0
        return [
            torch.zeros(tree_size(num_items), dtype=torch.int64),
            torch.zeros(words, dtype=torch.int64),
            torch.zeros(num_items),
            torch.zeros(UpdateCount.NUM_WORDS, dtype=torch.int64),
            *torch.zeros(2, num_slots, dtype=torch.int64),
            torch.zeros(num_slots if by_step else 0, dtype=torch.int64),
            torch.zeros(num_items if by_step else 0, dtype=torch.int32),
        ]

    expected, got, log, first = arrays(), arrays(), torch.zeros(16, dtype=torch.int64), 0
    for _ in range(data.draw(st.integers(1, 6))):
        changed = data.draw(st.lists(st.integers(0, num_slots - 1), max_size=8))
        for slot in changed:
            slots[slot, Slot.STATE] = data.draw(st.integers(0, 3))
            slots[slot, Slot.GENERATION] = data.draw(st.integers(1, 3))
            slots[slot, Slot.NUM_STEPS] = data.draw(st.integers(1, length))
        last = first + len(changed)
        log[torch.arange(first, last) % len(log)] = torch.tensor(changed, dtype=torch.int64)
        initial = data.draw(st.sampled_from([0, 0x3F800000, 0x3F000001]))
        rest = slots, log, first, last, rule, int(unit), initial, 1 << 61, 40
        reference.slot_priorities_(*expected, *rest)
        cpu.slot_priorities_(*got, *rest)
        for mine, other in zip(got, expected, strict=True):
            assert torch.equal(mine, other)
        first = last


def test_slot_priorities_outside(cpu: Ops, reference: Ops) -> None:
    slots = torch.tensor([[SlotState.COMMITTED, 1, 0, 3, 2, 2, 0, 0]])
    log, zeros = torch.zeros(4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for ops in (cpu, reference):
        sums, counts = torch.zeros(tree_size(4), dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
        known = zeros.clone(), zeros.clone(), zeros.clone(), torch.zeros(4, dtype=torch.int32)
        given = sums, torch.empty(0, dtype=torch.int64), torch.zeros(4), counts, *known, slots, log
        rest = [0, 0, 1, 9, 0], 1, 0x3F800000, 1 << 61, 40
        with pytest.raises(REFUSED, match="must lie in"):
            ops.slot_priorities_(*given, 0, 1, *rest)
        with pytest.raises(REFUSED, match="entries must be in a log of 4"):
            ops.slot_priorities_(*given, 0, 5, *rest)
        assert not sums.any()
