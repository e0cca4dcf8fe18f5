"""Reference ops of a table in the memory of one device: adding, drawing, updates, writing of rows.

Rows and slots are rings: row r lies at r modulo the number of rows, trajectory `id` in slot id modulo the
number of slots, and a trajectory never wraps. The stored ones are [tail, next). All state is in tensors, so
that the ops can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.records import (
    MassUnit,
    Normalize,
    PlacedTrajectory,
    RandomPurpose,
    Resolution,
    RingState,
    Slot,
    SlotState,
    Source,
    UpdateCount,
)
from deepspeed_gear.ops.reference.integers import LOW_32
from deepspeed_gear.ops.reference.power import exp2, float_bits, log2, scale
from deepspeed_gear.ops.reference.priorities import mass_of, minima_update_, resolve_rows_
from deepspeed_gear.ops.reference.select import (
    anchor_at,
    coordinate,
    num_anchors,
    philox,
    resolve_,
    tree_update_,
)

_INFINITY, _MINUS_ZERO = 0x7F800000, 0x80000000


class MassChanges:
    """Items whose masses change, applied together; the last of equal ones wins."""

    def __init__(self, sums: Tensor, minima: Tensor, priorities: Tensor, num_items: int) -> None:
        self.sums, self.minima, self.priorities, self.num_items = sums, minima, priorities, num_items
        self.items: list[int] = []
        self.masses: list[int] = []

    def set(self, item: int, mass: int, bits: int) -> None:
        self.items.append(item)
        self.masses.append(mass)
        if len(self.priorities):
            self.priorities[item] = _float(bits)

    def apply(self, state: Tensor) -> None:
        items, masses = torch.tensor(self.items, dtype=torch.int64), torch.tensor(self.masses)
        distinct = torch.unique(items)
        before = (self.sums[distinct] > 0).sum()
        tree_update_(self.sums, self.num_items, items, masses)
        if len(self.minima) and len(items):
            minima_update_(self.minima, self.sums, self.num_items, items)
        state[RingState.COUNTS + UpdateCount.DRAWABLE] += (self.sums[distinct] > 0).sum() - before


def ring_add_(
    state: Tensor,
    slots: Tensor,
    begins: Tensor,
    sums: Tensor,
    minima: Tensor,
    priorities: Tensor,
    row_slots: Tensor,
    placed: Tensor,
    lengths: Tensor,
    rule: Sequence[int],
    shape: Sequence[int],
    unit: int,
    alpha: int,
    initial: int,
    most_bits: int,
) -> None:
    """Reserve rows for trajectories of these lengths, and set the first masses of their items.

    The oldest trajectories are evicted until rows and slots suffice. `placed` has the place of each one (see
    `PlacedTrajectory`), slot -1 where nothing was added: a length of 0, or an invalid one, which is counted.
    Without priorities an item is a slot. With them it is a slot, or where the unit is a step a row; the first
    priority is `initial` (float32 bits), or where that is negative the highest one so far. `shape`: rows,
    slots, 1 where columns have a row more than steps, the longest trajectory.
    """
    num_rows, num_slots, final_row, most_steps = shape
    if len(lengths) > num_slots or len(lengths) >= num_rows // (most_steps + final_row):
        raise ShapeError("lengths", "must fit, and one more, into the rows and slots", len(lengths))
    by_row = len(priorities) > 0 and unit == MassUnit.STEP
    bits = initial if initial >= 0 else int(state[RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY])
    mass = int(mass_of(torch.tensor([bits]), alpha, most_bits)[0]) if len(priorities) else 0
    head, following, tail = (int(state[word]) for word in (RingState.HEAD, RingState.NEXT, RingState.TAIL))
    old_next = following
    for i, steps in enumerate(lengths.tolist()):
        placed[i] = torch.tensor([-1, 0, 0, -1, 0])
        if not 0 <= steps <= most_steps:
            state[RingState.REFUSED] += 1
        if not 0 < steps <= most_steps:
            continue
        rows, at = steps + final_row, head % num_rows
        begin = head if at + rows <= num_rows else head - at + num_rows
        placed[i] = torch.tensor([following % num_slots, begin % num_rows, steps, following, begin])
        head, following = begin + rows, following + 1
    changes = MassChanges(sums, minima, priorities, num_rows if by_row else num_slots)
    while tail < old_next:
        slot = tail % num_slots
        if int(begins[slot]) + num_rows >= head and tail >= following - num_slots:
            break
        first, steps = int(slots[slot, Slot.FIRST_ROW]), int(slots[slot, Slot.NUM_STEPS])
        for item in range(first, first + steps) if by_row else [slot]:
            changes.set(item, 0, 0)
        state[RingState.STEPS] -= steps
        slots[slot, Slot.STATE] = 0
        tail += 1
    for place in placed[placed[:, PlacedTrajectory.SLOT] >= 0].tolist():
        slot, first, steps = (
            place[PlacedTrajectory.SLOT],
            place[PlacedTrajectory.FIRST_ROW],
            place[PlacedTrajectory.NUM_STEPS],
        )
        born = int(state[RingState.BATCH])
        record = [
            SlotState.COMMITTED,
            place[PlacedTrajectory.ID] // num_slots,
            place[PlacedTrajectory.ID],
            first,
            steps,
            steps + final_row,
            0,
            born,
        ]
        slots[slot] = torch.tensor(record)
        begins[slot] = place[PlacedTrajectory.BEGIN]
        state[RingState.STEPS] += steps
        anchors = int(num_anchors(rule, torch.tensor(steps)))
        if by_row:
            admitted = set(anchor_at(rule, torch.tensor(steps), torch.arange(anchors)).tolist())
            row_slots[first : first + steps] = slot
            for step in range(steps):
                is_anchor = step in admitted
                changes.set(first + step, mass if is_anchor else 0, bits if is_anchor else 0)
        else:
            own = (
                anchors
                if unit == MassUnit.STEP
                else (anchors > 0) * (steps if unit == MassUnit.LENGTH else 1)
            )
            changes.set(slot, mass if own and len(priorities) else own, bits if own else 0)
    changes.apply(state)
    state[RingState.HEAD], state[RingState.NEXT], state[RingState.TAIL] = head, following, tail


def ring_remove_(
    state: Tensor,
    slots: Tensor,
    sums: Tensor,
    minima: Tensor,
    priorities: Tensor,
    removed: Tensor,
    ids: Tensor,
    shape: Sequence[int],
    unit: int,
) -> None:
    """Remove trajectories: their items lose their masses; ids that are not stored are ignored.

    Their rows and slots are used again when they would have been evicted. `removed` has the slot of each id,
    -1 where nothing was removed, or another of equal ids was. `shape` and `unit` are those of `ring_add_`.
    """
    num_rows, num_slots, final_row, _ = shape
    by_row = len(priorities) > 0 and unit == MassUnit.STEP
    changes = MassChanges(sums, minima, priorities, num_rows if by_row else num_slots)
    removed.fill_(-1)
    for i, number in enumerate(ids.tolist()):
        slot = number % num_slots
        record = slots[slot].tolist()
        if number < 0 or record[Slot.STATE] != SlotState.COMMITTED or record[Slot.ID] != number:
            continue
        first, steps = record[Slot.FIRST_ROW], record[Slot.NUM_ROWS] - final_row
        for item in range(first, first + steps) if by_row else [slot]:
            changes.set(item, 0, 0)
        state[RingState.STEPS] -= steps
        slots[slot, Slot.STATE] = slots[slot, Slot.NUM_STEPS] = 0
        removed[i] = slot
    changes.apply(state)


def ring_select_(
    state: Tensor,
    resolutions: Tensor,
    weights: Tensor,
    slots: Tensor,
    sums: Tensor,
    minima: Tensor,
    row_slots: Tensor,
    betas: Tensor,
    rule: Sequence[int],
    shape: Sequence[int],
    draw: Sequence[int],
    unit: int,
) -> None:
    """Draw the next global batch, weigh it, and count it in the state.

    `draw`: seed, stream, stride, offset, stratified (0 or 1) and normalize. Sample i has the number (samples
    so far + i) * stride + offset; the draws are those of `draw_` and `resolve_` (`resolve_rows_` where
    `row_slots` is not empty), the weights those of `importance_` with the exponent of the batch in `betas`,
    whose last one stays in force. Empty `weights` are not computed. Where no item has a mass the batch has no
    samples: its records are marked so, its weights are 0, and the state counts it.
    """
    seed, stream, stride, offset, stratified, normalize = draw
    num_items = len(row_slots) or shape[1]
    total, count = int(sums[-32:].sum()), len(resolutions)
    numbers = (int(state[RingState.SAMPLES]) + torch.arange(count)) * stride + offset
    state[RingState.TOTAL] = total
    state[RingState.SAMPLES] += count
    if total == 0:
        state[RingState.BATCH] += 1
        state[RingState.EMPTY] += 1
        resolutions.zero_()
        resolutions[:, [Resolution.ID, Resolution.SLOT]] = Resolution.NO_SAMPLE
        resolutions[:, Resolution.SAMPLE_NUMBER] = numbers
        weights.zero_()
        return
    points = coordinate(*philox(seed, numbers, stream, RandomPurpose.COORDINATE), total)
    if stratified:
        whole, rest = divmod(total, count)
        j = torch.arange(count)
        points = j * whole + (j * rest + points) // count
    for i, number in enumerate(numbers.tolist()):
        point, one = points[i : i + 1], resolutions[i : i + 1]
        if len(row_slots):
            resolve_rows_(one, sums, slots, row_slots, point, number)
        else:
            resolve_(one, sums, slots, point, rule, unit, seed, stream, number)
    if len(weights):
        beta = int(betas[min(int(state[RingState.BATCH]), len(betas) - 1)])
        numerator, divisor = total, int(state[RingState.COUNTS + UpdateCount.DRAWABLE])
        if normalize == Normalize.BATCH:
            numerator, divisor = int(resolutions[:, Resolution.MASS].min()), 1
        elif normalize == Normalize.TABLE:
            top = minima[-32:] if len(minima) else sums[:num_items]
            numerator, divisor = int(top[top > 0].min()), 1
        log_ratio = log2(torch.tensor(numerator)) - log2(torch.tensor(divisor))
        bits = float_bits(*exp2(scale(log_ratio - log2(resolutions[:, Resolution.MASS]), beta)))
        weights.copy_(bits.to(torch.int32).view(torch.float32))
    state[RingState.BATCH] += 1


def ring_update_(
    state: Tensor,
    sums: Tensor,
    minima: Tensor,
    priorities: Tensor,
    slots: Tensor,
    resolutions: Tensor,
    values: Tensor,
    shape: Sequence[int],
    unit: int,
    alpha: int,
    most_bits: int,
) -> None:
    """Set the priorities of samples; of equal items the last wins.

    Values that are no priorities are counted and change nothing; nor do those of evicted trajectories and of
    records that are no samples. The state's counts are those of `prioritize_`.
    """
    counts = state[RingState.COUNTS :]
    changes = MassChanges(sums, minima, priorities, len(priorities))
    for record, bits in zip(
        resolutions.tolist(), (values.view(torch.int32).long() & LOW_32).tolist(), strict=True
    ):
        if bits >= _INFINITY and bits != _MINUS_ZERO:
            state[RingState.REFUSED] += 1
            continue
        slot, anchor = record[Resolution.SLOT], record[Resolution.ANCHOR]
        known = slots[slot].tolist() if 0 <= slot < len(slots) else None
        is_current = (
            known is not None
            and known[Slot.STATE] == SlotState.COMMITTED
            and known[Slot.GENERATION] == record[Resolution.GENERATION]
            and 0 <= anchor < known[Slot.NUM_STEPS]
        )
        if not is_current or known is None:
            counts[UpdateCount.STALE] += 1
            continue
        bits &= _MINUS_ZERO - 1
        mass, is_clamped = mass_of(torch.tensor([bits]), alpha, most_bits)
        changes.set(known[Slot.FIRST_ROW] + anchor if unit == MassUnit.STEP else slot, int(mass), bits)
        counts[UpdateCount.APPLIED] += 1
        counts[UpdateCount.CLAMPED] += int(is_clamped)
        counts[UpdateCount.HIGHEST_PRIORITY] = max(int(counts[UpdateCount.HIGHEST_PRIORITY]), bits)
    changes.apply(state)


def scatter_(
    columns: Sequence[Tensor], values: Sequence[Tensor], placed: Tensor, sources: Sequence[int]
) -> None:
    """Write the rows of trajectories to their places; a slot of -1 in `placed` is left out.

    A column of steps takes values [n, steps (+ 1), *shape], of which the trajectory's own are written; one of
    a row per trajectory takes [n, *shape]. Nothing is converted.
    """
    for column, rows, source in zip(columns, values, sources, strict=True):
        for i, (slot, first, steps, *_) in enumerate(placed.tolist()):
            if slot < 0:
                continue
            own = rows[i : i + 1] if source == Source.TRAJECTORY else rows[i]
            begin = slot if source == Source.TRAJECTORY else first
            num_rows = 1 if source == Source.TRAJECTORY else steps + (source == Source.STEPS_PLUS_ONE)
            if steps < 0 or num_rows > len(own) or not 0 <= begin <= len(column) - num_rows:
                raise ShapeError(f"place {i}", "must lie in the columns", [slot, first, steps])
            column[begin : begin + num_rows] = own[:num_rows]


def _float(bits: int) -> Tensor:
    return torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.float32)[0]
