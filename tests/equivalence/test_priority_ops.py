"""Masses, weights, minima, rows, highest priorities and updates: against the reference, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from deepspeed_gear.ops import Ops, functional
from deepspeed_gear.ops.constants import (
    APPLIED,
    CLAMPED,
    COMMITTED,
    DRAWABLE,
    FAN_OUT,
    HIGHEST_PRIORITY,
    NUM_UPDATE_COUNTS,
    ONE_Q62,
    R_ANCHOR,
    R_GENERATION,
    R_MASS,
    R_NUMBER,
    R_SLOT,
    REPORT_WORDS,
    RESOLUTION_WORDS,
    STALE,
    UNIT_STEP,
    UNIT_TRAJECTORY,
    minima_levels,
    minima_size,
    tree_size,
)
from deepspeed_gear.store import table

SIZES = (0, 1, 7, 33)
NUM_ITEMS = (0, 1, 7, 31, 32, 33, 1023, 1024, 1025, 33000)
ALPHAS = (0, 1, round(0.6 * ONE_Q62), ONE_Q62 - 1, ONE_Q62)
REFUSED = (ValueError, RuntimeError)
BAD_PRIORITIES = [-1.0, -1e-45, float("inf"), float("-inf"), float("nan")]

SameBits = Callable[[Tensor, Tensor], bool]


@pytest.fixture(params=["reference", "cpu"])
def careful(request: pytest.FixtureRequest) -> Ops:
    """The backends that name what they refuse; a kernel can only end."""
    ops: Ops = request.getfixturevalue(request.param)
    return ops


def any_priorities(count: int) -> Tensor:
    """Finite floats of any magnitude, and zeros of both signs."""
    priorities = torch.randint(0, 0x7F800000, (count,), dtype=torch.int32).view(torch.float32)
    chosen = torch.rand(count)
    return torch.where(chosen < 0.1, -0.0, torch.where(chosen < 0.2, 0.0, priorities))


def masses_of(count: int) -> Tensor:
    """Masses of any magnitude, a third of them 0, and small ones that repeat."""
    masses = torch.randint(1, 1 << 40, (count,)) >> torch.randint(0, 40, (count,))
    return masses * (torch.rand(count) < 0.67)


def tree_of(masses: Tensor, ops: Ops) -> Tensor:
    sums = torch.zeros(tree_size(len(masses)), dtype=torch.int64)
    sums[: len(masses)] = masses
    ops.tree_build_(sums, len(masses))
    return sums


def test_a_committed_slot_is_what_the_store_calls_so() -> None:
    assert table.COMMITTED == COMMITTED


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("count", [*SIZES, 1000])
def test_mass(reference: Ops, native: Ops, count: int, alpha: int) -> None:
    torch.manual_seed(count)
    for priorities in (any_priorities(count), torch.rand(count) * 2):
        expected, got = torch.full((2, count), -1).unbind()
        expected, got = expected.clone(), got.clone()
        reference.mass_(expected, priorities, alpha)
        native.mass_(got, priorities, alpha)
        assert torch.equal(got, expected)
        assert torch.equal(expected == 0, priorities == 0)


@pytest.mark.parametrize("bad", BAD_PRIORITIES)
def test_mass_of_no_priority(careful: Ops, kernels_on_host: Ops, bad: float) -> None:
    masses, priorities = torch.full((9,), -1), torch.ones(9)
    priorities[4] = bad
    with pytest.raises(REFUSED, match=r"priority 4 must be finite and at least 0, got -?(1|inf|nan)"):
        careful.mass_(masses, priorities, 1 << 61)
    assert (masses == -1).all()
    with pytest.raises(RuntimeError, match="leads outside"):
        kernels_on_host.mass_(masses, priorities, 1 << 61)


@pytest.mark.parametrize("alpha", [-1, ONE_Q62 + 1])
def test_exponent_outside(careful: Ops, alpha: int) -> None:
    resolutions = torch.ones(1, RESOLUTION_WORDS, dtype=torch.int64)
    with pytest.raises(REFUSED, match="alpha must be in"):
        careful.mass_(torch.zeros(1).long(), torch.ones(1), alpha)
    with pytest.raises(REFUSED, match="beta must be in"):
        careful.importance_(torch.zeros(1), resolutions, 1, 1, alpha)


@pytest.mark.parametrize("beta", ALPHAS)
@pytest.mark.parametrize("count", [*SIZES, 500])
def test_importance(reference: Ops, native: Ops, same_bits: SameBits, count: int, beta: int) -> None:
    torch.manual_seed(count)
    resolutions = torch.randint(0, 1 << 62, (count, RESOLUTION_WORDS))
    resolutions[:, R_MASS] >>= torch.randint(0, 60, (count,))
    resolutions[:, R_MASS] += 1
    most = (1 << 63) - 1
    for numerator, num_items in ((1, 1), (1 << 50, 1000), (most, 1), (1, most), (12345, 7)):
        expected, got = torch.full((count,), -1.0), torch.full((count,), -1.0)
        reference.importance_(expected, resolutions, numerator, num_items, beta)
        native.importance_(got, resolutions, numerator, num_items, beta)
        assert same_bits(got, expected)
        exact = (numerator / (num_items * resolutions[:, R_MASS].double())) ** (beta / ONE_Q62)
        assert torch.allclose(expected.double(), exact, rtol=1e-6, atol=0)


def test_importance_of_the_least_mass_is_one(native: Ops) -> None:
    resolutions = torch.randint(1, 1 << 40, (50, RESOLUTION_WORDS))
    weights = torch.zeros(1)
    for row in resolutions:
        native.importance_(weights, row[None], int(row[R_MASS]), 1, round(0.4 * ONE_Q62))
        assert weights.item() == 1.0


def test_importance_refuses(careful: Ops, kernels_on_host: Ops) -> None:
    resolutions, weights = torch.ones(3, RESOLUTION_WORDS, dtype=torch.int64), torch.full((3,), -1.0)
    for numerator, count in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(REFUSED, match="numerator and count must be positive"):
            careful.importance_(weights, resolutions, numerator, count, 1)
    for bad in (0, -5):
        resolutions[1, R_MASS] = bad
        with pytest.raises(REFUSED, match=rf"mass of resolution 1 must be positive, got {bad}"):
            careful.importance_(weights, resolutions, 1, 1, 1)
        assert (weights == -1).all()
        with pytest.raises(RuntimeError, match="leads outside"):
            kernels_on_host.importance_(weights.clone(), resolutions, 1, 1, 1)


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
        least = functional.least_mass(sums, got, num_items)
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
        assert functional.least_mass(sums, minima, num_items) == first + 5
        items = torch.arange(first, end)
        native.tree_update_(sums, num_items, items, items * 0)
        native.minima_update_(minima, sums, num_items, items.repeat(2))
        assert minima.tolist() == minima_by_hand(sums[:num_items])
    assert functional.least_mass(sums, minima, num_items) == 0


def test_minima_refuse(careful: Ops, kernels_on_host: Ops) -> None:
    sums, minima = tree_of(torch.ones(40).long(), careful), torch.zeros(minima_size(40)).long()
    for bad in (-1, 40):
        with pytest.raises(REFUSED, match=r"items.* must lie in \[0, 40\)"):
            careful.minima_update_(minima, sums, 40, torch.tensor([0, bad]))
        with pytest.raises(RuntimeError, match="leads outside"):
            kernels_on_host.minima_update_(minima, sums, 40, torch.tensor([0, bad]))


@pytest.mark.parametrize("size", [31, 33])
def test_minima_of_another_size(native: Ops, size: int) -> None:
    sums = tree_of(torch.ones(40).long(), native)
    with pytest.raises(RuntimeError, match=f"minima of 40 items must have 32 words, got {size}"):
        native.minima_build_(torch.zeros(size).long(), sums, 40)


def store_of(lengths: list[int], gap: int = 2) -> tuple[Tensor, Tensor]:
    """Slots in falling order of their rows, with unused rows between them; and the slot of each row."""
    slots = torch.randint(0, 1 << 40, (len(lengths), 8))
    slots[:, 0] = COMMITTED
    row_slots = torch.full((sum(lengths) + gap * len(lengths),), -1, dtype=torch.int32)
    first = len(row_slots)
    for i, length in enumerate(lengths):
        first -= length + gap
        slots[i, 3], slots[i, 4] = first, length
        row_slots[first : first + length] = i
    return slots, row_slots


@pytest.mark.parametrize("num_slots", [1, 7, 33, 150])
def test_resolve_rows(reference: Ops, native: Ops, num_slots: int) -> None:
    torch.manual_seed(num_slots)
    slots, row_slots = store_of(torch.randint(1, 20, (num_slots,)).tolist())
    sums = tree_of(masses_of(len(row_slots)).clamp(max=1 << 30) * (row_slots >= 0), native)
    total = functional.tree_total(sums, len(row_slots))
    if total == 0:
        sums = tree_of((row_slots >= 0).long(), native)
        total = functional.tree_total(sums, len(row_slots))
    for count in (*SIZES, 200):
        coordinates = torch.randint(0, total, (count,))
        expected, got = (torch.full((count, RESOLUTION_WORDS), -1) for _ in range(2))
        for ops, out in ((reference, expected), (native, got)):
            ops.resolve_rows_(out, sums, slots, row_slots, coordinates, 1 << 40)
        assert torch.equal(got, expected)
        row, slot = expected[:, 3] + expected[:, 5], expected[:, 1]
        assert torch.equal(row_slots[row].long(), slot)
        assert torch.equal(expected[:, (0, 2, 3, 4)], slots[slot][:, (2, 1, 3, 4)])
        assert torch.equal(expected[:, R_MASS], sums[row])
        assert torch.equal(expected[:, 7], torch.arange(count) + (1 << 40))
        ends = sums[: len(row_slots)].cumsum(0)
        assert torch.equal(row, torch.searchsorted(ends, coordinates, right=True))


@pytest.mark.parametrize(
    ("bad_slot", "word", "value"),
    [(-1, 0, 2), (3, 0, 2), (1, 3, 6), (1, 3, -1), (1, 4, 1), (-(1 << 31), 0, 2), ((1 << 31) - 1, 0, 2)],
)
def test_row_of_no_slot(careful: Ops, kernels_on_host: Ops, bad_slot: int, word: int, value: int) -> None:
    """Row 5 is the second step of slot 1."""
    slots = torch.tensor([[2, 1, 10 + i, i * 4, 4, 4, 0, 0] for i in range(3)])
    row_slots = torch.arange(3, dtype=torch.int32).repeat_interleave(4)
    sums, out = tree_of(torch.ones(12).long(), careful), torch.zeros(2, 8).long()
    row_slots[5], slots[1, word] = bad_slot, value
    with pytest.raises(REFUSED, match="coordinate 1 must hit a row that is a step of its slot"):
        careful.resolve_rows_(out, sums, slots, row_slots, torch.tensor([0, 5]), 0)
    with pytest.raises(RuntimeError, match="leads outside"):
        kernels_on_host.resolve_rows_(out, sums, slots, row_slots, torch.tensor([0, 5]), 0)


@pytest.mark.parametrize("bad", [-1, 12, 1 << 62])
def test_coordinate_beyond_the_rows(careful: Ops, kernels_on_host: Ops, bad: int) -> None:
    sums, out = tree_of(torch.ones(12).long(), careful), torch.zeros(1, 8).long()
    slots, row_slots = torch.ones(3, 8).long(), torch.zeros(12, dtype=torch.int32)
    with pytest.raises(REFUSED, match=r"coordinates.* must lie in \[0, 12\)"):
        careful.resolve_rows_(out, sums, slots, row_slots, torch.tensor([bad]), 0)
    with pytest.raises(RuntimeError, match="leads outside"):
        kernels_on_host.resolve_rows_(out, sums, slots, row_slots, torch.tensor([bad]), 0)


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
def test_top_k(reference: Ops, native: Ops, num_items: int, order: str) -> None:
    torch.manual_seed(num_items)
    priorities, masses = orders(num_items)[order], masses_of(num_items + 3)
    for k in (0, 1, 7, 33, 300, max(num_items - 1, 0), num_items + 1):
        expected, got = torch.full((k,), 5), torch.full((k,), 5)
        reference.top_k_(expected, priorities, masses)
        native.top_k_(got, priorities, masses)
        assert torch.equal(got, expected)
        leaves = [i for i in range(num_items) if masses[i] > 0] if num_items < 2000 else None
        if leaves is not None:
            values = priorities.tolist()
            by_hand = sorted(leaves, key=lambda i: (-values[i], i))[:k]
            assert got.tolist() == by_hand + [-1] * (k - len(by_hand))


def updates_of(slots: Tensor, count: int) -> Tensor:
    """Updates of few slots, so that items repeat; some of each kind that must be ignored."""
    index = torch.randint(0, len(slots), (count,))
    anchor = (torch.rand(count) * slots[index, 4]).long()
    updates = torch.stack((index, slots[index, 1], anchor, any_priorities(count).view(torch.int32).long()), 1)
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


class Kept:
    """What updates change, and a copy of it for each backend."""

    def __init__(self, num_items: int, keeps_minima: bool, ops: Ops) -> None:
        masses = masses_of(num_items)
        self.sums = tree_of(masses, ops)
        self.minima = torch.zeros(minima_size(num_items) if keeps_minima else 0, dtype=torch.int64)
        if keeps_minima:
            ops.minima_build_(self.minima, self.sums, num_items)
        self.priorities, self.counts = torch.rand(num_items), torch.zeros(NUM_UPDATE_COUNTS).long()

    def copies(self) -> list[Tensor]:
        return [t.clone() for t in (self.sums, self.minima, self.priorities, self.counts)]


@pytest.mark.parametrize("alpha", [0, round(0.6 * ONE_Q62), ONE_Q62])
@pytest.mark.parametrize("keeps_minima", [True, False])
@pytest.mark.parametrize("unit", [UNIT_TRAJECTORY, UNIT_STEP])
@pytest.mark.parametrize("num_slots", [1, 7, 33, 1025])
def test_prioritize(
    reference: Ops,
    native: Ops,
    same_bits: SameBits,
    num_slots: int,
    unit: int,
    keeps_minima: bool,
    alpha: int,
) -> None:
    torch.manual_seed(num_slots)
    slots, row_slots = store_of(torch.randint(1, 9, (num_slots,)).tolist())
    slots[torch.rand(num_slots) < 0.1, 0] = COMMITTED + 1
    num_items = len(row_slots) if unit == UNIT_STEP else num_slots
    kept = Kept(num_items, keeps_minima, reference)
    for count in (*SIZES, 64, 65, 500):
        updates = updates_of(slots, count)
        expected, got = kept.copies(), kept.copies()
        reference.prioritize_(*expected, slots, updates, alpha, unit)
        native.prioritize_(*got, slots, updates, alpha, unit)
        assert all(map(same_bits, got, expected))
        by_hand = prioritize_by_hand(kept, slots, updates, alpha, unit, reference)
        assert all(map(same_bits, got, by_hand))
        kept.sums, kept.minima, kept.priorities, kept.counts = got


def samples_of(count: int) -> Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (count, RESOLUTION_WORDS))


@pytest.mark.parametrize("size", [0, 1, 7, 33, 100])
def test_report(reference: Ops, native: Ops, size: int) -> None:
    torch.manual_seed(size)
    expected = torch.randint(-9, 9, (size, REPORT_WORDS))
    got, tail = expected.clone(), (1 << 40) + 5
    for count in (0, 1, 7, 32, 33, 99, 100, 0, 1):
        if count > size:
            continue
        samples, priorities = samples_of(count), any_priorities(count)
        by_hand = expected.clone()
        reference.report_(expected, samples, priorities, tail, count - 2)
        native.report_(got, samples, priorities, tail, count - 2)
        assert torch.equal(got, expected)
        bits = [x & 0xFFFFFFFF for x in priorities.view(torch.int32).tolist()]
        for i, (sample, word) in enumerate(zip(samples.tolist(), bits, strict=True)):
            update = [sample[R_SLOT], sample[R_GENERATION], sample[R_ANCHOR], word]
            by_hand[(tail + i) % size] = torch.tensor([*update, count - 2, sample[R_NUMBER]])
        assert torch.equal(got, by_hand)
        tail += count


@pytest.mark.parametrize("bad", BAD_PRIORITIES)
def test_report_of_no_priority_writes_nothing(careful: Ops, bad: float) -> None:
    log, priorities = torch.full((9, REPORT_WORDS), -1), torch.ones(9)
    priorities[8] = bad
    with pytest.raises(REFUSED, match="priority 8 must be finite and at least 0"):
        careful.report_(log, samples_of(9), priorities, 3, 0)
    assert (log == -1).all()


def test_report_refuses(careful: Ops, cpu: Ops) -> None:
    log, samples, priorities = torch.zeros(3, REPORT_WORDS).long(), samples_of(4), torch.ones(4)
    with pytest.raises(REFUSED, match="the log must hold 4 reports, got 3"):
        careful.report_(log, samples, priorities, 0, 0)
    with pytest.raises(RuntimeError, match="resolutions must have a row per priority"):
        cpu.report_(log, samples, priorities[:3].clone(), 0, 0)
    with pytest.raises(RuntimeError, match=r"log must be \[n, 6\], got \[3, 5\]"):
        cpu.report_(log[:, :5].contiguous(), samples[:3], priorities[:3], 0, 0)
    with pytest.raises(RuntimeError, match="tail must be at least 0, got -1"):
        cpu.report_(log, samples[:3], priorities[:3], -1, 0)
    assert (log == 0).all()


@pytest.mark.parametrize("count", [*SIZES, 300])
@pytest.mark.parametrize("kind", ["in order", "two halves", "any"])
def test_reports_count_by_batch_and_number(
    reference: Ops, native: Ops, same_bits: SameBits, kind: str, count: int
) -> None:
    """Equal ones in the order in which they stand."""
    torch.manual_seed(count)
    slots, _ = store_of([3, 1, 8])
    kept, updates = Kept(3, True, reference), updates_of(slots, count)
    keys = torch.randint(-3, 3, (count, 2)) << 40
    order = sorted(range(count), key=lambda i: keys[i].tolist())
    if kind != "any":
        keys = keys[order]
        order = list(range(count))
    if kind == "two halves":  # as two ranks report
        keys = torch.cat([keys[::2], keys[1::2]])
        order = sorted(order, key=lambda i: keys[i].tolist())
    reports = torch.cat([updates, keys], dim=1)
    expected = kept.copies()
    reference.prioritize_(*expected, slots, updates[order], 1, UNIT_TRAJECTORY)
    for ops in (reference, native):
        got, given = kept.copies(), reports.clone()
        ops.prioritize_(*got, slots, given, 1, UNIT_TRAJECTORY)
        assert all(map(same_bits, got, expected))
        assert torch.equal(given, reports)


def prioritize_by_hand(
    kept: Kept, slots: Tensor, updates: Tensor, alpha: int, unit: int, ops: Ops
) -> list[Tensor]:
    """One update after another, and the trees built anew."""
    sums, minima, priorities, counts = kept.copies()
    values = updates[:, 3].to(torch.int32).view(torch.float32) + 0.0  # -0.0 becomes 0.0
    masses = torch.zeros(len(updates)).long()
    ops.mass_(masses, values, alpha)
    exact = values.double() ** (alpha / ONE_Q62) * 2**24
    is_clamped = (values > 0) & ((exact < 0.5) | (exact > 1 << 40))
    for i, (index, generation, anchor, _) in enumerate(updates.tolist()):
        is_current = 0 <= index < len(slots) and slots[index, 0] == COMMITTED
        if not is_current or slots[index, 1] != generation or not 0 <= anchor < slots[index, 4]:
            counts[STALE] += 1
            continue
        item = int(slots[index, 3]) + anchor if unit == UNIT_STEP else index
        counts[APPLIED] += 1
        counts[CLAMPED] += is_clamped[i]
        counts[HIGHEST_PRIORITY] = max(int(counts[HIGHEST_PRIORITY]), int(values[i].view(torch.int32)))
        counts[DRAWABLE] += int(masses[i] > 0) - int(sums[item] > 0)
        sums[item], priorities[item] = masses[i], values[i]
    ops.tree_build_(sums, len(priorities))
    if len(minima):
        ops.minima_build_(minima, sums, len(priorities))
    return [sums, minima, priorities, counts]


@pytest.mark.parametrize("bad", BAD_PRIORITIES)
def test_wrong_priorities_change_nothing(careful: Ops, bad: float) -> None:
    slots, _ = store_of([3, 4])
    kept, updates = Kept(2, True, careful), updates_of(slots, 80)
    updates[:, 3] = 0x3F800000
    updates[:, 0] = -1  # also of a trajectory that is gone
    updates[79, 3] = torch.tensor(bad).view(torch.int32).long()
    changed = kept.copies()
    with pytest.raises(REFUSED, match="priority 79 must be finite and at least 0"):
        careful.prioritize_(*changed, slots, updates, 1, UNIT_TRAJECTORY)
    assert all(map(torch.equal, changed, kept.copies()))


def test_slots_outside_the_items_change_nothing(careful: Ops) -> None:
    slots, row_slots = store_of([3, 4])
    for unit, num_items in ((UNIT_TRAJECTORY, 1), (UNIT_STEP, len(row_slots) - 8)):
        kept, changed = Kept(num_items, True, careful), []
        updates = torch.tensor([[1, 0, 0, 0], [0, 0, 2, 0]] if unit else [[0, 0, 0, 0], [1, 0, 0, 0]])
        updates[:, 1] = slots[updates[:, 0], 1]
        changed = kept.copies()
        with pytest.raises(REFUSED, match=r"(update 1|items) must.* in \[0, "):
            careful.prioritize_(*changed, slots, updates, 1, unit)
        assert all(map(torch.equal, changed, kept.copies()))


def test_prioritize_refuses_other_shapes(cpu: Ops) -> None:
    slots, _ = store_of([3] * 40)
    kept, updates = Kept(40, True, cpu), updates_of(slots, 3)
    sums, minima, priorities, counts = kept.copies()
    rest = (slots, updates, 1, 0)
    with pytest.raises(RuntimeError, match="counts must have 5 elements, got 4"):
        cpu.prioritize_(sums, minima, priorities, counts[:4].clone(), *rest)
    with pytest.raises(RuntimeError, match="minima of 40 items must have 32 words, got 5"):
        cpu.prioritize_(sums, minima[:5].clone(), priorities, counts, *rest)
    with pytest.raises(RuntimeError, match="unit must be 0 or 1, got 2"):
        cpu.prioritize_(sums, minima, priorities, counts, slots, updates, 1, 2)
    with pytest.raises(RuntimeError, match=r"updates must be \[n, 4\], or reports \[n, 6\]"):
        cpu.prioritize_(sums, minima, priorities, counts, slots, updates[:, :3].contiguous(), 1, 0)
    with pytest.raises(RuntimeError, match="sums must have a mass per priority"):
        cpu.top_k_(torch.zeros(1).long(), torch.ones(4), torch.ones(3).long())
