"""Reports of priorities and the updates that they make: against the reference, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from priority_op_cases import (
    BAD_PRIORITIES,
    REFUSED,
    SIZES,
    SameBits,
    any_priorities,
    masses_of,
    store_of,
    tree_of,
)
from torch import Tensor

from deepspeed_gear.ops import Ops
from deepspeed_gear.ops.constants import EXACT_MASS_BITS, ONE_Q62, minima_size
from deepspeed_gear.ops.records import LogEntry, MassUnit, Resolution, SlotState, UpdateCount
from deepspeed_gear.sampling.mass_rules import AnchorRule

ALL = [0, 0, 1, 1 << 40, 0]
RULES = [ALL, [0, 0, 1, 1, 1], ALL, [1, 1, 2, 2, 0], ALL, [0, 0, 1, 1, 1], [1, 0, 2, 3, 1]]  # by count


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
        self.priorities, self.counts = torch.rand(num_items), torch.zeros(UpdateCount.NUM_WORDS).long()

    def copies(self) -> list[Tensor]:
        return [t.clone() for t in (self.sums, self.minima, self.priorities, self.counts)]


@pytest.mark.parametrize("alpha", [0, round(0.6 * ONE_Q62), ONE_Q62])
@pytest.mark.parametrize("keeps_minima", [True, False])
@pytest.mark.parametrize("unit", [MassUnit.TRAJECTORY, MassUnit.STEP])
@pytest.mark.parametrize("num_slots", [1, 7, 33, 1025])
def test_prioritize(
    reference: Ops,
    cpu: Ops,
    same_bits: SameBits,
    num_slots: int,
    unit: int,
    keeps_minima: bool,
    alpha: int,
) -> None:
    torch.manual_seed(num_slots)
    slots, row_slots = store_of(torch.randint(1, 9, (num_slots,)).tolist())
    slots[torch.rand(num_slots) < 0.1, 0] = SlotState.COMMITTED + 1
    num_items = len(row_slots) if unit == MassUnit.STEP else num_slots
    kept = Kept(num_items, keeps_minima, reference)
    for count, rule in zip((*SIZES, 64, 65, 500), RULES, strict=True):
        updates = updates_of(slots, count)
        expected, got = kept.copies(), kept.copies()
        reference.prioritize_(*expected, slots, updates, rule, alpha, unit, 40)
        cpu.prioritize_(*got, slots, updates, rule, alpha, unit, 40)
        assert all(map(same_bits, got, expected))
        by_hand = prioritize_by_hand(kept, slots, updates, rule, alpha, unit, reference)
        assert all(map(same_bits, got, by_hand))
        kept.sums, kept.minima, kept.priorities, kept.counts = got


def samples_of(count: int) -> Tensor:
    return torch.randint(-(1 << 62), 1 << 62, (count, Resolution.NUM_WORDS))


@pytest.mark.parametrize("size", [0, 1, 7, 33, 100])
def test_report(reference: Ops, cpu: Ops, size: int) -> None:
    torch.manual_seed(size)
    expected = torch.randint(-9, 9, (size, LogEntry.NUM_WORDS))
    got, tail = expected.clone(), (1 << 40) + 5
    for count in (0, 1, 7, 32, 33, 99, 100, 0, 1):
        if count > size:
            continue
        samples, priorities = samples_of(count), any_priorities(count)
        by_hand = expected.clone()
        reference.append_reports_(expected, samples, priorities, tail, count - 2)
        cpu.append_reports_(got, samples, priorities, tail, count - 2)
        assert torch.equal(got, expected)
        bits = [x & 0xFFFFFFFF for x in priorities.view(torch.int32).tolist()]
        for i, (sample, word) in enumerate(zip(samples.tolist(), bits, strict=True)):
            update = [sample[Resolution.SLOT], sample[Resolution.GENERATION], sample[Resolution.ANCHOR], word]
            by_hand[(tail + i) % size] = torch.tensor([*update, count - 2, sample[Resolution.SAMPLE_NUMBER]])
        assert torch.equal(got, by_hand)
        tail += count


@pytest.mark.parametrize("bad", BAD_PRIORITIES)
def test_report_of_no_priority_writes_nothing(careful: Ops, bad: float) -> None:
    log, priorities = torch.full((9, LogEntry.NUM_WORDS), -1), torch.ones(9)
    priorities[8] = bad
    with pytest.raises(REFUSED, match="priority 8 must be finite and at least 0"):
        careful.append_reports_(log, samples_of(9), priorities, 3, 0)
    assert (log == -1).all()


def test_report_refuses(careful: Ops, cpu: Ops) -> None:
    log, samples, priorities = torch.zeros(3, LogEntry.NUM_WORDS).long(), samples_of(4), torch.ones(4)
    with pytest.raises(REFUSED, match="the log must hold 4 reports, got 3"):
        careful.append_reports_(log, samples, priorities, 0, 0)
    with pytest.raises(RuntimeError, match="resolutions must have 3 rows, got 4"):
        cpu.append_reports_(log, samples, priorities[:3].clone(), 0, 0)
    with pytest.raises(RuntimeError, match=r"log must be \[n, 6\], got \[3, 5\]"):
        cpu.append_reports_(log[:, :5].contiguous(), samples[:3], priorities[:3], 0, 0)
    with pytest.raises(RuntimeError, match="tail must be at least 0, got -1"):
        cpu.append_reports_(log, samples[:3], priorities[:3], -1, 0)
    assert (log == 0).all()


@pytest.mark.parametrize("count", [*SIZES, 300])
@pytest.mark.parametrize("kind", ["in order", "two halves", "any"])
def test_reports_count_by_batch_and_number(
    reference: Ops, cpu: Ops, same_bits: SameBits, kind: str, count: int
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
    reference.prioritize_(*expected, slots, updates[order], ALL, 1, MassUnit.TRAJECTORY, 40)
    for ops in (reference, cpu):
        got, given = kept.copies(), reports.clone()
        ops.prioritize_(*got, slots, given, ALL, 1, MassUnit.TRAJECTORY, 40)
        assert all(map(same_bits, got, expected))
        assert torch.equal(given, reports)


def prioritize_by_hand(
    kept: Kept, slots: Tensor, updates: Tensor, rule: list[int], alpha: int, unit: int, ops: Ops
) -> list[Tensor]:
    """One update after another, and the trees built anew."""
    sums, minima, priorities, counts = kept.copies()
    values = updates[:, 3].to(torch.int32).view(torch.float32) + 0.0  # -0.0 becomes 0.0
    masses = torch.zeros(len(updates)).long()
    ops.mass_(masses, values, alpha, 40)
    exact = values.double() ** (alpha / ONE_Q62) * 2**24
    is_clamped = (values > 0) & ((masses < 1 << EXACT_MASS_BITS) | (exact > 1 << 40))
    for i, (index, generation, anchor, _) in enumerate(updates.tolist()):
        highest = max(int(counts[UpdateCount.HIGHEST_PRIORITY]), int(values[i].view(torch.int32)))
        counts[UpdateCount.HIGHEST_PRIORITY] = highest
        is_current = 0 <= index < len(slots) and slots[index, 0] == SlotState.COMMITTED
        if not is_current or slots[index, 1] != generation or not 0 <= anchor < slots[index, 4]:
            counts[UpdateCount.STALE] += 1
            continue
        is_anchor = AnchorRule(*rule).admits(np.array(anchor), np.array(int(slots[index, 4])))
        if unit == MassUnit.STEP and not is_anchor:
            counts[UpdateCount.STALE] += 1
            continue
        item = int(slots[index, 3]) + anchor if unit == MassUnit.STEP else index
        counts[UpdateCount.APPLIED] += 1
        counts[UpdateCount.CLAMPED] += is_clamped[i]
        counts[UpdateCount.DRAWABLE] += int(masses[i] > 0) - int(sums[item] > 0)
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
        careful.prioritize_(*changed, slots, updates, ALL, 1, MassUnit.TRAJECTORY, 40)
    assert all(map(torch.equal, changed, kept.copies()))


def test_slots_outside_the_items_change_nothing(careful: Ops) -> None:
    slots, row_slots = store_of([3, 4])
    for unit, num_items in ((MassUnit.TRAJECTORY, 1), (MassUnit.STEP, len(row_slots) - 8)):
        kept, changed = Kept(num_items, True, careful), []
        updates = torch.tensor([[1, 0, 0, 0], [0, 0, 2, 0]] if unit else [[0, 0, 0, 0], [1, 0, 0, 0]])
        updates[:, 1] = slots[updates[:, 0], 1]
        changed = kept.copies()
        with pytest.raises(REFUSED, match=r"(update 1|items) must.* in \[0, "):
            careful.prioritize_(*changed, slots, updates, ALL, 1, unit, 40)
        assert all(map(torch.equal, changed, kept.copies()))


def test_prioritize_refuses_other_shapes(cpu: Ops) -> None:
    slots, _ = store_of([3] * 40)
    kept, updates = Kept(40, True, cpu), updates_of(slots, 3)
    sums, minima, priorities, counts = kept.copies()
    rest = (slots, updates, ALL, 1, 0, 40)
    with pytest.raises(RuntimeError, match="counts must have 5 values, got 4"):
        cpu.prioritize_(sums, minima, priorities, counts[:4].clone(), *rest)
    with pytest.raises(RuntimeError, match="minima of 40 items must have 32 words, got 5"):
        cpu.prioritize_(sums, minima[:5].clone(), priorities, counts, *rest)
    with pytest.raises(RuntimeError, match="unit must be 0 or 1, got 2"):
        cpu.prioritize_(sums, minima, priorities, counts, slots, updates, ALL, 1, 2, 40)
    with pytest.raises(RuntimeError, match=r"updates must be \[n, 4\], or reports \[n, 6\]"):
        cpu.prioritize_(sums, minima, priorities, counts, slots, updates[:, :3].contiguous(), ALL, 1, 0, 40)
    with pytest.raises(RuntimeError, match="sums must have a mass per priority"):
        cpu.top_k_(torch.zeros(1).long(), torch.ones(4), torch.ones(3).long())
