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
from deepspeed_gear.ops.reference.priorities import anchors_among, mass_of, minima_update_, resolve_rows_
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
    priority is `initial` (float32 bits), or where that is negative the highest one when a batch was last
    drawn: as in host memory, where reports and additions between two batches have no order. `shape`: rows,
    slots, 1 where columns have a row more than steps, the longest trajectory.
    """
    num_rows, num_slots, final_row, most_steps = shape
    if len(lengths) > num_slots or len(lengths) >= num_rows // (most_steps + final_row):
        raise ShapeError("lengths", "must fit, and one more, into the rows and slots", len(lengths))
    by_row = len(priorities) > 0 and unit == MassUnit.STEP
    bits = initial if initial >= 0 else int(state[RingState.INITIAL])
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
    seed, stream, _, _, stratified, _ = draw
    total, count = int(sums[-32:].sum()), len(resolutions)
    numbers = _numbers(state, count, draw)
    if total == 0:
        _no_samples(state, resolutions, weights, numbers)
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
        num_items = len(row_slots) or shape[1]
        _weigh(
            state, resolutions, weights, minima[-32:] if len(minima) else sums[:num_items], betas, draw, total
        )
    _advance(state, total, count)


def ring_select_limited_(
    state: Tensor,
    resolutions: Tensor,
    weights: Tensor,
    slots: Tensor,
    sums: Tensor,
    minima: Tensor,
    betas: Tensor,
    rule: Sequence[int],
    shape: Sequence[int],
    draw: Sequence[int],
    unit: int,
    most: int,
) -> None:
    """Draw the next global batch as `ring_select_`, of trajectories that may be drawn `most` times each.

    Samples are drawn one after the other. The slots count the draws; one that makes `most` of them sets the
    mass to 0 before the next sample is drawn, with all nodes above. The last sample leaves masses as they
    are; all that are used up are for `ring_remove_`. The weights are of the masses after the last draw, their
    total is that before the first. Where fewer draws are left than samples, the batch has no samples, and
    nothing but the state changes. Items are slots.
    """
    seed, stream, _, _, stratified, _ = draw
    num_items, count = shape[1], len(resolutions)
    if stratified or most < 1:
        raise ShapeError("draw", "must not be stratified, and most at least 1", [*draw, most])
    numbers, first_total = _numbers(state, count, draw), int(sums[-32:].sum())
    left = (most - slots[:, Slot.TIMES_SAMPLED])[sums[:num_items] > 0].sum()
    if first_total == 0 or left < count:
        _no_samples(state, resolutions, weights, numbers)
        return
    changes = MassChanges(sums, minima, torch.zeros(0), num_items)
    for i, number in enumerate(numbers.tolist()):
        one, total = resolutions[i : i + 1], int(sums[-32:].sum())
        words = philox(seed, numbers[i : i + 1], stream, RandomPurpose.COORDINATE)
        resolve_(one, sums, slots, coordinate(*words, total), rule, unit, seed, stream, number)
        slot = int(one[0, Resolution.SLOT])
        slots[slot, Slot.TIMES_SAMPLED] += 1
        if slots[slot, Slot.TIMES_SAMPLED] >= most and i + 1 < count:
            changes.set(slot, 0, 0)
            changes.apply(state)
            changes = MassChanges(sums, minima, torch.zeros(0), num_items)
    if len(weights):
        top = minima[-32:] if len(minima) else sums[:num_items]
        _weigh(state, resolutions, weights, top, betas, draw, first_total)
    _advance(state, first_total, count)


def ring_top_k_(
    state: Tensor,
    resolutions: Tensor,
    weights: Tensor,
    slots: Tensor,
    sums: Tensor,
    priorities: Tensor,
    row_slots: Tensor,
    rule: Sequence[int],
    shape: Sequence[int],
    draw: Sequence[int],
    unit: int,
    counts: bool,
) -> None:
    """Select the items of highest priority as the next global batch, each once, and count it in the state.

    Of equal priorities those of the lowest trajectory ids come first, and of one trajectory its first steps.
    The weights are 1. Where fewer items have a mass than the batch has samples, it has no samples. With
    `counts`, where items are slots, the slots count the draws. `draw` is that of `ring_select_`.
    """
    seed, stream, *_ = draw
    num_items, count = len(priorities), len(resolutions)
    numbers, total = _numbers(state, count, draw), int(sums[-32:].sum())
    oldest = int(state[RingState.TAIL]) % shape[1]
    first = int(slots[oldest, Slot.FIRST_ROW]) if len(row_slots) else oldest
    in_order = torch.arange(first, first + num_items) % num_items
    in_order = in_order[sums[in_order] > 0]
    items = in_order[torch.sort(priorities[in_order], descending=True, stable=True).indices][:count]
    if len(items) < count:
        _no_samples(state, resolutions, weights, numbers)
        return
    for i, (item, number) in enumerate(zip(items.tolist(), numbers.tolist(), strict=True)):
        one, point = resolutions[i : i + 1], sums[:item].sum().reshape(1)
        if len(row_slots):
            resolve_rows_(one, sums, slots, row_slots, point, number)
        else:
            resolve_(one, sums, slots, point, rule, unit, seed, stream, number)
    if counts:
        slots[resolutions[:, Resolution.SLOT], Slot.TIMES_SAMPLED] += 1
    weights.fill_(1)
    _advance(state, total, count)


def _numbers(state: Tensor, count: int, draw: Sequence[int]) -> Tensor:
    """Return the sample numbers of the next global batch. [count], int64."""
    stride, offset = draw[2:4]
    return (int(state[RingState.SAMPLES]) + torch.arange(count)) * stride + offset


def _advance(state: Tensor, total: int, count: int) -> None:
    """Count a global batch; `total` 0: it has no samples, and the next one gets its numbers."""
    state[RingState.TOTAL] = total
    if total:
        state[RingState.SAMPLES] += count
        state[RingState.BATCH] += 1
    state[RingState.EMPTY] += int(total == 0)
    state[RingState.INITIAL] = state[RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY]


def _no_samples(state: Tensor, resolutions: Tensor, weights: Tensor, numbers: Tensor) -> None:
    _advance(state, 0, len(numbers))
    resolutions.zero_()
    resolutions[:, [Resolution.ID, Resolution.SLOT]] = Resolution.NO_SAMPLE
    resolutions[:, Resolution.SAMPLE_NUMBER] = numbers
    weights.zero_()


def _weigh(
    state: Tensor,
    resolutions: Tensor,
    weights: Tensor,
    top: Tensor,
    betas: Tensor,
    draw: Sequence[int],
    total: int,
) -> None:
    """Compute the weights of samples; `top`: values of which the least above 0 is the table's least mass."""
    beta = int(betas[min(int(state[RingState.BATCH]), len(betas) - 1)])
    numerator, divisor, normalize = total, int(state[RingState.COUNTS + UpdateCount.DRAWABLE]), draw[5]
    if normalize == Normalize.BATCH:
        numerator, divisor = int(resolutions[:, Resolution.MASS].min()), 1
    elif normalize == Normalize.TABLE:
        numerator, divisor = int(top[top > 0].min()), 1
    log_ratio = log2(torch.tensor(numerator)) - log2(torch.tensor(divisor))
    bits = float_bits(*exp2(scale(log_ratio - log2(resolutions[:, Resolution.MASS]), beta)))
    weights.copy_(bits.to(torch.int32).view(torch.float32))


def ring_update_(
    state: Tensor,
    sums: Tensor,
    minima: Tensor,
    priorities: Tensor,
    slots: Tensor,
    resolutions: Tensor,
    values: Tensor,
    rule: Sequence[int],
    shape: Sequence[int],
    unit: int,
    alpha: int,
    most_bits: int,
) -> None:
    """Set the priorities of samples; of equal items the last wins.

    Values that are no priorities are counted and change nothing; nor do those of records that are no samples.
    Those of evicted trajectories, and of steps that are no anchors of theirs as it is, count for the highest
    priority alone. The state's counts are
    those of `prioritize_`.
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
        if slot >= 0:
            highest = max(int(counts[UpdateCount.HIGHEST_PRIORITY]), bits & (_MINUS_ZERO - 1))
            counts[UpdateCount.HIGHEST_PRIORITY] = highest
        known = slots[slot].tolist() if 0 <= slot < len(slots) else None
        is_current = (
            known is not None
            and known[Slot.STATE] == SlotState.COMMITTED
            and known[Slot.GENERATION] == record[Resolution.GENERATION]
            and 0 <= anchor < known[Slot.NUM_STEPS]
            and (
                unit != MassUnit.STEP
                or bool(anchors_among(rule, torch.tensor(anchor), known[Slot.NUM_STEPS]))
            )
        )
        if not is_current or known is None:
            counts[UpdateCount.STALE] += 1
            continue
        bits &= _MINUS_ZERO - 1
        mass, is_clamped = mass_of(torch.tensor([bits]), alpha, most_bits)
        changes.set(known[Slot.FIRST_ROW] + anchor if unit == MassUnit.STEP else slot, int(mass), bits)
        counts[UpdateCount.APPLIED] += 1
        counts[UpdateCount.CLAMPED] += int(is_clamped)
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
