"""Reference ops of priorities: masses, importance weights, the least mass, top-k, and updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.constants import (
    EXACT_MASS_BITS,
    FAN_OUT,
    MASS_BITS,
    MOST_MASS_BITS,
    ONE_Q62,
    minima_levels,
)
from deepspeed_gear.ops.records import (
    LogEntry,
    MassUnit,
    PriorityUpdate,
    Resolution,
    Slot,
    SlotState,
    UpdateCount,
)
from deepspeed_gear.ops.reference import select
from deepspeed_gear.ops.reference.integers import (
    LOW_32,
    exp2,
    float_bits,
    log2,
    power_of_priority,
    scale,
)

_INFINITY = 0x7F800000
_MINUS_ZERO = 0x80000000
_NOTHING = (1 << 63) - 1  # "no mass", in the search for the least one


def mass_(masses: Tensor, priorities: Tensor, alpha: int, most_bits: int) -> None:
    """Set masses[i] to round(priorities[i]^alpha * 2^24), in [1, 2^most_bits]; 0 for 0.

    Integer arithmetic only, halves are rounded up; alpha 2^62 (that is, 1) is exact.

    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016, equation 1.
    """
    masses.copy_(
        mass_of(order_of(priorities.view(torch.int32).long() & LOW_32), alpha, most_bits)[0]
    )


def order_of(bits: Tensor) -> Tensor:
    """Check float32 bits of priorities and return them without the sign of -0.0.

    These bits have the order of the priorities.
    """
    bad = torch.nonzero(~is_priority(bits))
    if len(bad):
        i = int(bad[0])
        value = float(bits[i].to(torch.int32).view(torch.float32))
        raise ShapeError(f"priority {i}", "must be finite and at least 0", value)
    return bits & (_MINUS_ZERO - 1)


def is_priority(bits: Tensor) -> Tensor:
    """Return which float32 bits are of a priority: finite and at least 0, or -0.0. [n], bool."""
    return (bits < _INFINITY) | (bits == _MINUS_ZERO)


def mass_of(bits: Tensor, alpha: int, most_bits: int) -> tuple[Tensor, Tensor]:
    """Return masses of `order_of`'s bits, and which were clamped or are below 2^EXACT_MASS_BITS."""
    _check_exponent("alpha", alpha)
    if not 1 <= most_bits <= MOST_MASS_BITS:
        raise ShapeError("most_bits", f"must be in [1, {MOST_MASS_BITS}]", most_bits)
    is_zero = bits == 0
    significand, exponent = power_of_priority(torch.where(is_zero, 1, bits), alpha)
    shift = 62 - MASS_BITS - exponent
    least_shift = 62 - most_bits
    is_low = shift > 63
    is_high = (shift < least_shift) | ((shift == least_shift) & (significand > ONE_Q62))
    mass = ((significand >> (shift.clamp(least_shift, 63) - 1)) + 1) >> 1
    mass = torch.where(is_low, 1, torch.where(is_high, 1 << most_bits, mass))
    is_coarse = mass < 1 << EXACT_MASS_BITS
    return torch.where(is_zero, 0, mass), (is_coarse | is_high) & ~is_zero


def importance_(
    weights: Tensor, resolutions: Tensor, numerator: int, count: int, beta: int
) -> None:
    """Set weights[i] to (numerator / (count * mass of resolution i))^beta, rounded to float32.

    With numerator the total mass and count the number of items these are (N * P(i))^-beta; with
    numerator the least mass and count 1 they are divided by the greatest of them.

    Source: Schaul et al., "Prioritized Experience Replay", ICLR 2016, section 3.4.
    """
    _check_exponent("beta", beta)
    mass = resolutions[:, Resolution.MASS]
    bad = torch.nonzero(mass <= 0)
    if len(bad):
        raise ShapeError(
            f"the mass of resolution {int(bad[0])}", "must be positive", int(mass[bad[0]])
        )
    if numerator <= 0 or count <= 0:
        raise ShapeError("numerator and count", "must be positive", (numerator, count))
    log_ratio = log2(torch.tensor(numerator)) - log2(torch.tensor(count))
    bits = float_bits(*exp2(scale(log_ratio - log2(mass), beta)))
    weights.copy_(bits.to(torch.int32).view(torch.float32))


def minima_build_(minima: Tensor, sums: Tensor, num_items: int) -> None:
    """Set every node to the least non-zero of its 32 children, or 0 without one.

    The children of level 1 are the leaves of `sums`.
    """
    children = sums[: -(-max(num_items, 1) // FAN_OUT) * FAN_OUT]
    for offset, width in minima_levels(num_items):
        nodes = minima[offset : offset + width]
        groups = children.view(-1, FAN_OUT)
        least = torch.where(groups == 0, _NOTHING, groups).amin(dim=1)
        nodes.zero_()[: len(least)] = torch.where(least == _NOTHING, 0, least)
        children = nodes


def minima_update_(minima: Tensor, sums: Tensor, num_items: int, items: Tensor) -> None:
    """Repair the minima above leaves that have changed; items may repeat."""
    select.check_items(items, num_items)
    minima_build_(minima, sums, num_items)


def resolve_rows_(
    resolutions: Tensor,
    sums: Tensor,
    slots: Tensor,
    row_slots: Tensor,
    coordinates: Tensor,
    first: int,
) -> None:
    """Set resolutions[i] to the record of the row that coordinates[i] hits in a tree of rows.

    `row_slots` has the slot of each row.
    """
    select.check_coordinates(sums, len(row_slots), coordinates)
    row, _ = select.descend(sums, len(row_slots), coordinates)
    index = row_slots[row].long()
    is_slot = (index >= 0) & (index < len(slots))
    slot = slots.new_zeros(len(row), slots.shape[1])
    if len(slots):
        slot = slots[torch.where(is_slot, index, 0)]
    first_row = slot[:, Slot.FIRST_ROW]
    num_steps = slot[:, Slot.NUM_STEPS]
    anchor = row - first_row
    bad = torch.nonzero(~(is_slot & (first_row >= 0) & (anchor >= 0) & (anchor < num_steps)))
    if len(bad):
        i = int(bad[0])
        raise ShapeError(
            f"coordinate {i}", "must hit a row that is a step of its slot", int(row[i])
        )
    parts = (
        slot[:, Slot.ID],
        index,
        slot[:, Slot.GENERATION],
        first_row,
        num_steps,
        anchor,
        sums[row],
    )
    resolutions.copy_(torch.stack((*parts, torch.arange(len(row)) + first), dim=1))


def top_k_(items: Tensor, priorities: Tensor, sums: Tensor) -> None:
    """Set items to the leaves of highest priority that have a mass, in descending order.

    Ties are ordered by number; items without a leaf are -1.
    """
    leaves = torch.nonzero(sums[: len(priorities)] > 0)[:, 0]
    order = torch.sort(priorities[leaves], descending=True, stable=True).indices[: len(items)]
    items.fill_(-1)[: len(order)] = leaves[order]


def append_reports_(
    log: Tensor, resolutions: Tensor, priorities: Tensor, tail: int, batch: int
) -> None:
    """Write the new priorities of samples into a ring of reports, from `tail` modulo its length on.

    A report is an update as `prioritize_` takes it, the global batch it belongs to, and its sample
    number.
    """
    bits = priorities.view(torch.int32).long() & LOW_32
    order_of(bits)
    if len(bits) > len(log):
        raise ShapeError("the log", f"must hold {len(bits)} reports", len(log))
    batches = torch.full_like(bits, batch)
    numbers = resolutions[:, Resolution.SAMPLE_NUMBER, None]
    reports = torch.cat((updates_of(resolutions, bits), batches[:, None], numbers), dim=1)
    log[(tail + torch.arange(len(bits))) % max(len(log), 1)] = reports


def updates_of(resolutions: Tensor, bits: Tensor) -> Tensor:
    """Return the `PriorityUpdate` of each sample. [B, 4], int64.

    `bits` are the float32 bits of the new priorities.
    """
    words = [Resolution.SLOT, Resolution.GENERATION, Resolution.ANCHOR]
    return torch.cat((resolutions[:, words], bits[:, None]), dim=1)


def prioritize_(
    sums: Tensor,
    minima: Tensor,
    priorities: Tensor,
    counts: Tensor,
    slots: Tensor,
    updates: Tensor,
    rule: Sequence[int],
    alpha: int,
    unit: int,
    most_bits: int,
) -> None:
    """Set priorities of items in order, so that the last of equal ones wins; repair the trees.

    An update is a slot, its generation, an anchor and a priority (float32 bits, in the lower half
    of its word). Updates come in their order; reports (see `append_reports_`) by batch and sample
    number, equal ones in their order. Those of an evicted trajectory change nothing but the highest
    priority, nor where items are steps do those of a step that is no anchor (`rule`) of its
    trajectory as it is. `counts` has the words of `UpdateCount`; empty `minima` are not maintained.
    """
    order_of(updates[:, PriorityUpdate.PRIORITY] & LOW_32)
    if updates.shape[1] == LogEntry.NUM_WORDS:
        updates = updates[updates[:, LogEntry.SAMPLE_NUMBER].argsort(stable=True)]
        updates = updates[updates[:, LogEntry.BATCH].argsort(stable=True)]
    bits = order_of(updates[:, PriorityUpdate.PRIORITY] & LOW_32)
    masses, is_clamped = mass_of(bits, alpha, most_bits)
    highest = max([int(counts[UpdateCount.HIGHEST_PRIORITY]), *bits.tolist()])
    current = _is_current(slots, updates, rule, unit)
    item = updates[current, PriorityUpdate.SLOT]
    bits = bits[current]
    if unit == MassUnit.STEP:
        item = slots[item, Slot.FIRST_ROW] + updates[current, PriorityUpdate.ANCHOR]
    select.check_items(item, len(priorities))
    counts[UpdateCount.HIGHEST_PRIORITY] = highest
    changed = torch.unique(item)
    num_before = (sums[changed] > 0).sum()
    select.tree_update_(sums, len(priorities), item, masses[current])
    if len(minima):
        minima_update_(minima, sums, len(priorities), item)
    for i, value in zip(item.tolist(), bits.to(torch.int32).view(torch.float32), strict=True):
        priorities[i] = value
    counts[UpdateCount.APPLIED] += len(item)
    counts[UpdateCount.STALE] += len(updates) - len(item)
    counts[UpdateCount.CLAMPED] += is_clamped[current].sum()
    counts[UpdateCount.DRAWABLE] += (sums[changed] > 0).sum() - num_before


def slot_priorities_(
    sums: Tensor,
    minima: Tensor,
    priorities: Tensor,
    counts: Tensor,
    bases: Tensor,
    generations: Tensor,
    steps: Tensor,
    row_slots: Tensor,
    slots: Tensor,
    log: Tensor,
    first: int,
    last: int,
    rule: Sequence[int],
    unit: int,
    initial: int,
    alpha: int,
    most_bits: int,
) -> None:
    """Set the first priorities of new items of the slots in entries [first, last) of a ring.

    New items are those of another trajectory, of one that has a mass by the rule now
    (`slot_masses_`), and further steps of one that grows; their priority is `initial` (float32
    bits). Items that are evicted or no longer anchors get 0, others keep theirs. `bases`,
    `generations` and `steps` hold each slot's mass by the rule, its trajectory, and its steps with
    a priority; rows of free slots are left alone. Empty `steps` and `row_slots`: items are
    trajectories. Of `counts` only `DRAWABLE` changes.
    """
    changed = select.entries_of(log, first, last, len(slots))
    masses = mass_of(order_of(torch.tensor([initial])), alpha, most_bits)[0]
    value = torch.tensor([initial], dtype=torch.int32).view(torch.float32)
    for slot in changed.tolist():
        record = slots[slot].tolist()
        by_step = len(row_slots) > 0
        state = record[Slot.STATE]
        num_steps = record[Slot.NUM_STEPS]
        if by_step and state not in (SlotState.COMMITTED, SlotState.EVICTED):
            bases[slot] = 0
            continue
        own = int(select.masses_by_rule(rule, unit, torch.tensor(num_steps)))
        base = own if state == SlotState.COMMITTED else 0
        differs = bool(
            generations[slot] != record[Slot.GENERATION] or (bases[slot] > 0) != (base > 0)
        )
        if by_step:
            row = record[Slot.FIRST_ROW]
            every = torch.arange(record[Slot.NUM_ROWS])
            select.check_items(every + row, len(priorities))
            has_mass = anchors_among(rule, every, num_steps) & (base > 0)
            if differs:
                row_slots[every + row] = slot
                which = every
            elif base > 0:
                which = every[has_mass != anchors_among(rule, every, int(steps[slot]))]
            else:
                which = every[:0]
            items = which + row
            has_mass = has_mass[which]
        else:
            items = torch.tensor([slot] if differs else [], dtype=torch.int64)
            has_mass = torch.full((len(items),), base > 0)
        counts[UpdateCount.DRAWABLE] -= (sums[items] > 0).sum()
        priorities[items] = torch.where(has_mass, value, 0.0)
        select.tree_update_(sums, len(priorities), items, torch.where(has_mass, masses, 0))
        if len(minima):
            minima_update_(minima, sums, len(priorities), items)
        counts[UpdateCount.DRAWABLE] += (sums[items] > 0).sum()
        # Written last: if a process dies before this, the slot is done again from the start.
        if by_step:
            steps[slot] = num_steps
        bases[slot] = base
        generations[slot] = record[Slot.GENERATION]


def anchors_among(rule: Sequence[int], steps: Tensor, num_steps: Tensor | int) -> Tensor:
    """Return which steps are anchors of trajectories of these lengths. [n], bool."""
    first, _, stride, _, from_end = rule
    distance = (num_steps - 1 - steps if from_end else steps) - first
    inside = (steps < num_steps) & (distance >= 0) & (distance % stride == 0)
    are: Tensor = inside & (
        distance // stride < select.num_anchors(rule, torch.as_tensor(num_steps))
    )
    return are


def _is_current(slots: Tensor, updates: Tensor, rule: Sequence[int], unit: int) -> Tensor:
    """Return which updates apply. [n], bool.

    Those of a stored trajectory do, and where items are steps, those of an anchor.
    """
    index = updates[:, PriorityUpdate.SLOT]
    anchor = updates[:, PriorityUpdate.ANCHOR]
    is_slot = (index >= 0) & (index < len(slots))
    if not is_slot.any():
        return is_slot
    slot = slots[torch.where(is_slot, index, 0)]
    is_newest = slot[:, Slot.GENERATION] == updates[:, PriorityUpdate.GENERATION]
    is_same = (slot[:, Slot.STATE] == SlotState.COMMITTED) & is_newest
    num_steps = slot[:, Slot.NUM_STEPS]
    is_item = (
        anchors_among(rule, anchor, num_steps) if unit == MassUnit.STEP else anchor < num_steps
    )
    return is_slot & is_same & (anchor >= 0) & is_item


def _check_exponent(name: str, value: int) -> None:
    if not 0 <= value <= ONE_Q62:
        raise ShapeError(name, "must be in [0, 2^62] (Q62)", value)
