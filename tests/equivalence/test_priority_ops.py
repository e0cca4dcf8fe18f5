"""Masses, weights, minima, reports and updates: against the reference, bit for bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_kit import (
    ALPHAS,
    NUM_ITEMS,
    REFERENCE,
    SIZES,
    any_priorities,
    compare,
    masses_of,
    same_bits,
    store_of,
    tree,
)
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import (
    FAN_OUT,
    MOST_MASS_BITS,
    ONE_Q62,
    minima_levels,
    minima_size,
    most_mass_bits,
    tree_size,
)
from deepspeed_gear.ops.records import LogEntry, MassUnit, Resolution, Slot, SlotState, UpdateCount

ALL = [0, 0, 1, 1 << 40, 0]
RULES = [
    ALL,
    [0, 0, 1, 1, 1],
    ALL,
    [1, 1, 2, 2, 0],
    ALL,
    [0, 0, 1, 1, 1],
    [1, 0, 2, 3, 1],
]  # by count

# ---- masses, weights and the least mass ----------------------------------------------------------


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("count", [*SIZES, 1000])
def test_mass(native: Ops, count: int, alpha: int) -> None:
    torch.manual_seed(count)
    for priorities in (any_priorities(count), torch.rand(count) * 2):
        for most_bits in (MOST_MASS_BITS, 27, 1):
            (found,) = compare(
                native, "mass_", torch.full((count,), -1), priorities, alpha, most_bits
            )
            assert torch.equal(found == 0, priorities == 0)
            assert (found <= 1 << most_bits).all()


@pytest.mark.parametrize("num_items", [0, 1, 2**21 - 1, 2**21, 2**24, 10**8, 2**40 - 1])
def test_masses_of_a_full_table_do_not_overflow(num_items: int) -> None:
    most_bits = most_mass_bits(num_items)
    assert 1 <= most_bits <= MOST_MASS_BITS
    assert 2 * num_items << most_bits < 1 << 62
    is_least = 8 * (num_items + 1) << most_bits >= 1 << 62  # no less than it may be
    assert most_bits == MOST_MASS_BITS or is_least


@pytest.mark.parametrize("beta", ALPHAS)
@pytest.mark.parametrize("count", [*SIZES, 500])
def test_importance(cpu: Ops, count: int, beta: int) -> None:
    torch.manual_seed(count)
    resolutions = torch.randint(0, 1 << 62, (count, Resolution.NUM_WORDS))
    resolutions[:, Resolution.MASS] >>= torch.randint(0, 60, (count,))
    resolutions[:, Resolution.MASS] += 1
    most = (1 << 63) - 1
    for numerator, num_items in ((1, 1), (1 << 50, 1000), (most, 1), (1, most), (12345, 7)):
        out = torch.full((count,), -1.0)
        (found,) = compare(cpu, "importance_", out, resolutions, numerator, num_items, beta)
        exact = (numerator / (num_items * resolutions[:, Resolution.MASS].double())) ** (
            beta / ONE_Q62
        )
        assert torch.allclose(found.double(), exact, rtol=1e-6, atol=0)


def test_importance_of_the_least_mass_is_one(cpu: Ops) -> None:
    weights = torch.zeros(1)
    for row in torch.randint(1, 1 << 40, (50, Resolution.NUM_WORDS)):
        cpu.importance_(weights, row[None], int(row[Resolution.MASS]), 1, round(0.4 * ONE_Q62))
        assert weights.item() == 1.0


def minima_by_hand(masses: Tensor) -> list[int]:
    """All levels above the leaves, by a loop over the groups."""
    below = masses.tolist()
    levels = []
    for _, width in minima_levels(len(masses)):
        groups = [below[i : i + FAN_OUT] for i in range(0, len(below), FAN_OUT)]
        below = [min((v for v in group if v > 0), default=0) for group in groups]
        below += [0] * (width - len(below))
        levels += below
    return levels


@pytest.mark.parametrize("num_items", NUM_ITEMS)
def test_minima(native: Ops, num_items: int) -> None:
    torch.manual_seed(num_items)
    masses = masses_of(num_items)
    sums = tree(masses, ops=REFERENCE)
    (minima,) = compare(
        native, "minima_build_", torch.full((minima_size(num_items),), 77), sums, num_items
    )
    assert minima.tolist() == minima_by_hand(masses)
    for count in SIZES if num_items else (0,):
        # Small ranges have many equal items; small masses are the least of their groups, and vanish
        # again.
        items = torch.randint(0, max(min(num_items, 70 if count < 33 else num_items), 1), (count,))
        new = masses_of(count) >> torch.randint(0, 40, (count,))
        REFERENCE.tree_update_(sums, num_items, items, new)
        (minima,) = compare(native, "minima_update_", minima, sums, num_items, items)
        assert minima.tolist() == minima_by_hand(sums[:num_items])


def test_minima_rise_and_vanish(native: Ops) -> None:
    """The least mass of everything grows step by step, until nothing is left."""
    num_items = 1025
    masses = torch.arange(num_items) + 5
    sums = tree(masses, ops=native)
    minima = torch.zeros(minima_size(num_items), dtype=torch.int64)
    native.minima_build_(minima, sums, num_items)
    for first, end in pairwise((0, 1, 31, 33, 64, 1000, 1024, 1025)):
        assert int(minima[-FAN_OUT:][minima[-FAN_OUT:] > 0].min()) == first + 5
        items = torch.arange(first, end)
        native.tree_update_(sums, num_items, items, items * 0)
        native.minima_update_(minima, sums, num_items, items.repeat(2))
        assert minima.tolist() == minima_by_hand(sums[:num_items])
    assert not minima.any()


# ---- the highest priorities ----------------------------------------------------------------------


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
@pytest.mark.parametrize("num_items", [0, 1, 33, 63, 64, 65, 1025, 20000])
def test_top_k(cpu: Ops, num_items: int, order: str) -> None:
    torch.manual_seed(num_items)
    priorities = orders(num_items)[order]
    masses = masses_of(num_items + 3)
    values = priorities.tolist()
    leaves = torch.nonzero(masses[:num_items])[:, 0].tolist()
    by_hand = sorted(leaves, key=lambda i: (-values[i], i))
    for k in (0, 1, 7, 33, 300, max(num_items - 1, 0), num_items + 1):
        (found,) = compare(cpu, "top_k_", torch.full((k,), 5), priorities, masses)
        assert found.tolist() == by_hand[:k] + [-1] * (k - len(by_hand))


# ---- reports and updates -------------------------------------------------------------------------


def updates_of(slots: Tensor, count: int) -> Tensor:
    """Updates of few slots, so that items repeat; some of each kind that must be ignored."""
    index = torch.randint(0, len(slots), (count,))
    anchor = (torch.rand(count) * slots[index, 4]).long()
    updates = torch.stack(
        (index, slots[index, 1], anchor, any_priorities(count).view(torch.int32).long()), 1
    )
    kind = torch.randint(0, 14, (count,))
    updates[kind == 0, 0] = -1
    updates[kind == 1, 0] = len(slots)
    updates[kind == 2, 1] += 1
    updates[kind == 3, 2] = -1
    updates[kind == 4, 2] = slots[index[kind == 4], 4]
    updates[kind == 5, 0] = 1 << 60
    small = kind > 9
    updates[small, 3] = torch.rand(int(small.sum())).view(torch.int32).long()
    return updates


def arrays(num_items: int, keeps_minima: bool) -> list[Tensor]:
    """What updates change: sums, minima, priorities and counts."""
    sums = tree(masses_of(num_items), ops=REFERENCE)
    minima = torch.zeros(minima_size(num_items) if keeps_minima else 0, dtype=torch.int64)
    if keeps_minima:
        REFERENCE.minima_build_(minima, sums, num_items)
    return [sums, minima, torch.rand(num_items), torch.zeros(UpdateCount.NUM_WORDS).long()]


@pytest.mark.parametrize("alpha", [0, round(0.6 * ONE_Q62), ONE_Q62])
@pytest.mark.parametrize(
    ("unit", "keeps_minima"),
    [(MassUnit.TRAJECTORY, True), (MassUnit.STEP, True), (MassUnit.STEP, False)],
)
@pytest.mark.parametrize("num_slots", [1, 33, 1025])
def test_prioritize(cpu: Ops, num_slots: int, unit: int, keeps_minima: bool, alpha: int) -> None:
    torch.manual_seed(num_slots)
    slots, row_slots = store_of(torch.randint(1, 9, (num_slots,)).tolist())
    slots[torch.rand(num_slots) < 0.1, 0] = SlotState.COMMITTED + 1
    kept = arrays(len(row_slots) if unit == MassUnit.STEP else num_slots, keeps_minima)
    for count, rule in zip((*SIZES, 64, 65, 500), RULES, strict=True):
        updates = updates_of(slots, count)
        kept = compare(cpu, "prioritize_", *kept, slots, updates, rule, alpha, unit, 40)


@pytest.mark.parametrize("count", [*SIZES, 300])
@pytest.mark.parametrize("kind", ["in order", "two halves", "any"])
def test_reports_count_by_batch_and_number(cpu: Ops, kind: str, count: int) -> None:
    """Equal ones in the order in which they stand."""
    torch.manual_seed(count)
    slots, _ = store_of([3, 1, 8])
    kept = arrays(3, True)
    updates = updates_of(slots, count)
    keys = torch.randint(-3, 3, (count, 2)) << 40
    order = sorted(range(count), key=lambda i: keys[i].tolist())
    if kind != "any":
        keys = keys[order]
        order = list(range(count))
    if kind == "two halves":  # as two ranks report
        keys = torch.cat([keys[::2], keys[1::2]])
        order = sorted(order, key=lambda i: keys[i].tolist())
    reports = torch.cat([updates, keys], dim=1)
    rest = (ALL, 1, MassUnit.TRAJECTORY, 40)
    expected = compare(cpu, "prioritize_", *kept, slots, updates[order], *rest)
    before = reports.clone()
    assert all(map(same_bits, compare(cpu, "prioritize_", *kept, slots, reports, *rest), expected))
    assert torch.equal(before, reports)


def samples_of(count: int) -> Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (count, Resolution.NUM_WORDS))


@pytest.mark.parametrize("size", [0, 1, 7, 33, 100])
def test_report(cpu: Ops, size: int) -> None:
    torch.manual_seed(size)
    log = torch.randint(-9, 9, (size, LogEntry.NUM_WORDS))
    tail = (1 << 40) + 5
    for count in (0, 1, 7, 32, 33, 99, 100, 0, 1):
        if count > size:
            continue
        samples = samples_of(count)
        priorities = any_priorities(count)
        (found,) = compare(cpu, "append_reports_", log, samples, priorities, tail, count - 2)
        bits = [x & 0xFFFFFFFF for x in priorities.view(torch.int32).tolist()]
        for i, (sample, word) in enumerate(zip(samples.tolist(), bits, strict=True)):
            update = [
                sample[Resolution.SLOT],
                sample[Resolution.GENERATION],
                sample[Resolution.ANCHOR],
                word,
            ]
            log[(tail + i) % size] = torch.tensor(
                [*update, count - 2, sample[Resolution.SAMPLE_NUMBER]]
            )
        assert torch.equal(found, log)
        tail += count


@given(data=st.data())
def test_slot_priorities(cpu: Ops, data: st.DataObject) -> None:
    """Slots that change, step by step: the arrays stay those of the reference."""
    by_step = data.draw(st.booleans())
    keeps_minima = data.draw(st.booleans())
    num_slots = 6
    length = 7
    num_items = num_slots * length if by_step else num_slots
    rule = data.draw(st.sampled_from([[0, 0, 1, 1 << 40, 0], [1, 0, 2, 2, 0], [0, 2, 1, 3, 1]]))
    unit = (
        MassUnit.STEP
        if by_step
        else data.draw(st.sampled_from([MassUnit.TRAJECTORY, MassUnit.LENGTH]))
    )
    slots = torch.zeros(num_slots, Slot.NUM_WORDS, dtype=torch.int64)
    slots[:, Slot.FIRST_ROW] = torch.arange(num_slots) * length
    slots[:, Slot.NUM_ROWS] = length
    kept = [
        torch.zeros(tree_size(num_items), dtype=torch.int64),
        torch.zeros(minima_size(num_items) if keeps_minima else 0, dtype=torch.int64),
        torch.zeros(num_items),
        torch.zeros(UpdateCount.NUM_WORDS, dtype=torch.int64),
        *torch.zeros(2, num_slots, dtype=torch.int64),
        torch.zeros(num_slots if by_step else 0, dtype=torch.int64),
        torch.zeros(num_items if by_step else 0, dtype=torch.int32),
    ]
    log = torch.zeros(16, dtype=torch.int64)
    first = 0
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
        kept = compare(cpu, "slot_priorities_", *kept, *rest)
        first = last
