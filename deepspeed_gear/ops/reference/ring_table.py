"""Reference ops of a table in the memory of one device: adding, drawing, updates, writing of rows.

Rows and slots are rings: row r lies at r modulo the number of rows, trajectory `id` in slot id
modulo the number of slots, and a trajectory never wraps. The stored ones are [tail, next). All
state is in tensors, so that the ops can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.philox import philox_words
from deepspeed_gear.ops.records import (
    MassUnit,
    Normalize,
    OpenTrajectory,
    PlacedStep,
    PlacedTrajectory,
    RandomPurpose,
    Resolution,
    RingState,
    Slot,
    SlotState,
    Source,
    UpdateCount,
)
from deepspeed_gear.ops.reference import priorities as priority_ops
from deepspeed_gear.ops.reference import select
from deepspeed_gear.ops.reference.integers import LOW_32

_NO_STEP = [-1, 0, 0, -1, 0, 0]


class _Items:
    """The items of a table, slots or rows: priorities, masses, and the trees above these."""

    def __init__(
        self,
        state: Tensor,
        trees: Sequence[Tensor],
        shape: Sequence[int],
        unit: int = MassUnit.TRAJECTORY,
    ) -> None:
        self.state = state
        (self.sums, self.minima, self.priorities) = trees
        self.are_rows = len(self.priorities) > 0 and unit == MassUnit.STEP
        self.masses = self.sums[: shape[0] if self.are_rows else shape[1]]
        self.num_drawable = int((self.masses > 0).sum())

    def set(self, item: int, mass: int, bits: int) -> None:
        self.masses[item] = mass
        if len(self.priorities):
            self.priorities[item] = torch.tensor([bits]).to(torch.int32).view(torch.float32)[0]

    def clear(self, slots: Tensor, slot: int, num_steps: int) -> None:
        first = int(slots[slot, Slot.FIRST_ROW])
        for item in range(first, first + num_steps) if self.are_rows else [slot]:
            self.set(item, 0, 0)
        self.state[RingState.STEPS] -= num_steps
        slots[slot, Slot.STATE] = SlotState.FREE

    def repair(self) -> None:
        """Set the nodes above the masses that have changed, and count those that can be drawn."""
        select.tree_build_(self.sums, len(self.masses))
        if len(self.minima):
            priority_ops.minima_build_(self.minima, self.sums, len(self.masses))
        change = int((self.masses > 0).sum()) - self.num_drawable
        self.state[RingState.COUNTS + UpdateCount.DRAWABLE] += change

    def first_priority(self, initial: int, alpha: int, most_bits: int) -> tuple[int, int]:
        """Return float32 bits and mass of new items' priority; the mass is 0 without priorities."""
        bits = initial if initial >= 0 else int(self.state[RingState.INITIAL])
        mass, _ = priority_ops.mass_of(torch.tensor([bits]), alpha, most_bits)
        return bits, int(mass) if len(self.priorities) else 0


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

    The oldest trajectories are evicted until rows and slots suffice. `placed` has the place of each
    one (see `PlacedTrajectory`), slot -1 where nothing was added: a length of 0, or an invalid one,
    which is counted. Without priorities an item is a slot. With them it is a slot, or where the
    unit is a step a row; the first priority is `initial` (float32 bits), or where that is negative
    the highest one when a batch was last drawn: as in host memory, where reports and additions
    between two batches have no order. `shape`: rows, slots, 1 where columns have a row more than
    steps, the longest trajectory.
    """
    num_rows, num_slots, final_row, most_steps = shape
    if len(lengths) > num_slots or len(lengths) >= num_rows // (most_steps + final_row):
        raise ShapeError("lengths", "must fit, and one more, into the rows and slots", len(lengths))
    items = _Items(state, (sums, minima, priorities), shape, unit)
    bits, mass = items.first_priority(initial, alpha, most_bits)
    head, following, tail = (
        int(state[word]) for word in (RingState.HEAD, RingState.NEXT, RingState.TAIL)
    )
    old_next = following
    for i, steps in enumerate(lengths.tolist()):
        placed[i] = torch.tensor([-1, 0, 0, -1, 0])
        if not 0 <= steps <= most_steps:
            state[RingState.REFUSED] += 1
        if not 0 < steps <= most_steps:
            continue
        rows = steps + final_row
        # Of 10 rows with the head at 18 (row 8), a trajectory of 3 rows begins at 20 (row 0).
        at = head % num_rows
        begin = head if at + rows <= num_rows else head - at + num_rows
        placed[i] = torch.tensor([following % num_slots, begin % num_rows, steps, following, begin])
        head = begin + rows
        following += 1
    # Evict the oldest trajectories while the new ones take their rows or their slots.
    while tail < old_next:
        slot = tail % num_slots
        if int(begins[slot]) + num_rows >= head and tail >= following - num_slots:
            break
        items.clear(slots, slot, int(slots[slot, Slot.NUM_STEPS]))
        tail += 1
    for slot, first, steps, number, begin in placed[placed[:, PlacedTrajectory.SLOT] >= 0].tolist():
        extent = [first, steps, steps + final_row]
        record = [SlotState.COMMITTED, number // num_slots, number, *extent, 0]
        slots[slot] = torch.tensor([*record, int(state[RingState.BATCH])])
        begins[slot] = begin
        state[RingState.STEPS] += steps
        if items.are_rows:
            admitted = _anchors(rule, steps)
            row_slots[first : first + steps] = slot
            for step in range(steps):
                items.set(first + step, mass * (step in admitted), bits * (step in admitted))
        else:
            own = int(select.masses_by_rule(rule, unit, torch.tensor(steps)))
            items.set(slot, mass if own and len(priorities) else own, bits if own else 0)
    items.repair()
    state[RingState.HEAD] = head
    state[RingState.NEXT] = following
    state[RingState.TAIL] = tail


def _anchors(rule: Sequence[int], num_steps: int) -> set[int]:
    steps = torch.tensor(num_steps)
    return set(
        select.anchor_at(rule, steps, torch.arange(int(select.num_anchors(rule, steps)))).tolist()
    )


def ring_extend_(
    state: Tensor,
    slots: Tensor,
    opened: Tensor,
    owners: Tensor,
    sums: Tensor,
    minima: Tensor,
    priorities: Tensor,
    placed: Tensor,
    begun: Tensor,
    truncations: Tensor,
    terminated: Tensor,
    truncated: Tensor | None,
    mask: Tensor | None,
    rule: Sequence[int],
    shape: Sequence[int],
    unit: int,
    alpha: int,
    initial: int,
    most_bits: int,
    next_step: bool,
) -> None:
    """Reserve rows for a step of every environment, and set the masses that follow from it.

    Environment e owns the rows [e * part, (e + 1) * part), with part = rows / environments; its
    trajectories lie one after the other in them, and one that might not fit before the end begins
    at the first of them. Ids follow the order in which trajectories begin, and the oldest ones, by
    id, are evicted: those up to the newest one whose rows are needed, and those beyond the slots,
    less one for each environment.

    A step continues the open trajectory of its environment (`opened`, see `OpenTrajectory`), or
    begins one: after an end (`terminated`, `truncated`), after the longest length (the last step is
    marked in `truncations`, a column or empty), or where the open one was evicted. Environments
    where `mask` is False have no step; with `next_step` nor has the one after an end, in which the
    environment resets itself. If the same call evicts the open trajectory of an environment, its
    step is dropped and counted.

    `placed` has the place of each step (see `PlacedStep`), `begun` the first three words of those
    that begin a trajectory, slot -1 elsewhere. `owners` has the slot of each row. Masses are those
    of `ring_add_` for the steps so far; steps that were anchors before keep their priority.
    """
    num_rows, num_slots, final_row, most_steps = shape
    num_envs = len(opened)
    part = num_rows // num_envs
    if num_rows % num_envs or part < 2 * (most_steps + final_row) or num_slots < 2 * num_envs:
        rule_ = "must have rows for two longest trajectories, and two slots, of each environment"
        raise ShapeError("shape", rule_, list(shape))
    items = _Items(state, (sums, minima, priorities), shape, unit)
    bits, mass = items.first_priority(initial, alpha, most_bits)
    following = int(state[RingState.NEXT])
    tail = int(state[RingState.TAIL])
    stays = tail  # the first id that is not evicted
    for env in range(num_envs):
        placed[env] = torch.tensor(_NO_STEP)
        begun[env] = torch.tensor([-1, 0, 0])
        if mask is not None and not mask[env]:
            continue
        steps, number, next_row, ended = opened[env].tolist()
        if next_step and ended:
            opened[env, OpenTrajectory.ENDED] = 0
            continue
        known = slots[number % num_slots].tolist()
        begin = known[Slot.FIRST_ROW]
        is_open = (
            steps > 0 and known[Slot.STATE] == SlotState.COMMITTED and known[Slot.ID] == number
        )
        if is_open and steps < most_steps:
            place = [number % num_slots, begin + steps, 1, number, begin, steps]
            needed = [place[PlacedStep.ROW] + final_row]
        else:
            if is_open and len(truncations):
                truncations[begin + steps - 1] = True
            first = env * part + (next_row if next_row + most_steps + final_row <= part else 0)
            place = [following % num_slots, first, 1, following, first, 0]
            needed = [first, first + final_row]
            following += 1
        placed[env] = torch.tensor(place)
        for row in needed:
            owner = slots[int(owners[row])].tolist()
            ahead = row - owner[Slot.FIRST_ROW]
            if owner[Slot.STATE] == SlotState.COMMITTED and 0 <= ahead < owner[Slot.NUM_ROWS]:
                stays = max(stays, owner[Slot.ID] + 1)
    stays = max(stays, following - (num_slots - num_envs))
    for slot in (number % num_slots for number in range(tail, stays)):
        items.clear(slots, slot, int(slots[slot, Slot.NUM_STEPS]))
    for env in range(num_envs):
        slot, row, _, number, first, step = placed[env].tolist()
        if slot < 0:
            continue
        ended = bool(terminated[env]) or (truncated is not None and bool(truncated[env]))
        if number < stays:
            placed[env] = torch.tensor(_NO_STEP)
            opened[env, OpenTrajectory.NUM_STEPS] = 0
            opened[env, OpenTrajectory.ENDED] = int(ended)
            state[RingState.DROPPED] += 1
            continue
        steps = step + 1
        if step == 0:
            begun[env] = placed[env, : PlacedStep.ID]
            record = [SlotState.COMMITTED, number // num_slots, number, first, 0, 0, 0]
            slots[slot] = torch.tensor([*record, int(state[RingState.BATCH])])
            owners[row] = slot
        owners[row + final_row] = slot
        slots[slot, Slot.NUM_STEPS] = steps
        slots[slot, Slot.NUM_ROWS] = steps + final_row
        state[RingState.STEPS] += 1
        before, after = (
            int(select.masses_by_rule(rule, unit, torch.tensor(n))) for n in (step, steps)
        )
        if items.are_rows:
            old = _anchors(rule, step)
            new = _anchors(rule, steps)
            for anchor in sorted(old ^ new):
                items.set(first + anchor, mass * (anchor in new), bits * (anchor in new))
        elif not len(priorities):
            items.set(slot, after, 0)
        elif before == 0 or after == 0:
            items.set(slot, mass * (after > 0), bits * (after > 0))
        next_row = first - env * part + steps + final_row
        opened[env] = torch.tensor([0 if ended else steps, number, next_row, int(ended)])
    items.repair()
    state[RingState.NEXT] = following
    state[RingState.TAIL] = stays


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

    Their rows and slots are used again when they would have been evicted. `removed` has the slot of
    each id, -1 where nothing was removed, or another of equal ids was. `shape` and `unit` are those
    of `ring_add_`.
    """
    _, num_slots, final_row, _ = shape
    items = _Items(state, (sums, minima, priorities), shape, unit)
    removed.fill_(-1)
    for i, number in enumerate(ids.tolist()):
        slot = number % num_slots
        record = slots[slot].tolist()
        if number < 0 or record[Slot.STATE] != SlotState.COMMITTED or record[Slot.ID] != number:
            continue
        items.clear(slots, slot, record[Slot.NUM_ROWS] - final_row)
        slots[slot, Slot.NUM_STEPS] = 0
        removed[i] = slot
    items.repair()


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

    `draw`: seed, stream, stride, offset, stratified (0 or 1) and normalize. Sample i has the number
    (samples so far + i) * stride + offset; the draws are those of `draw_` and `resolve_`
    (`resolve_rows_` where `row_slots` is not empty), the weights those of `importance_` with the
    exponent of the batch in `betas`, whose last one stays in force. Empty `weights` are not
    computed. Where no item has a mass the batch has no samples: its records are marked so, its
    weights are 0, and the state counts it.
    """
    seed, stream, _, _, stratified, _ = draw
    total = int(sums[-32:].sum())
    count = len(resolutions)
    numbers = _numbers(state, count, draw)
    if total == 0:
        _no_samples(state, resolutions, weights, numbers)
        return
    points = select.coordinate(
        *philox_words(seed, numbers, stream, RandomPurpose.COORDINATE), total
    )
    if stratified:
        whole, rest = divmod(total, count)
        j = torch.arange(count)
        points = j * whole + (j * rest + points) // count
    for i, number in enumerate(numbers.tolist()):
        one = resolutions[i : i + 1]
        point = points[i : i + 1]
        if len(row_slots):
            priority_ops.resolve_rows_(one, sums, slots, row_slots, point, number)
        else:
            select.resolve_(one, sums, slots, point, rule, unit, seed, stream, number)
    _complete(state, resolutions, weights, sums, minima, betas, draw, total)


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
    """Draw the next global batch as `ring_select_`; a trajectory is drawn at most `most` times.

    Samples are drawn one after the other. The slots count the draws; one that makes `most` of them
    sets the mass to 0 before the next sample is drawn, with all nodes above. The last sample leaves
    masses as they are; all that are used up are for `ring_remove_`. The weights are of the masses
    after the last draw, their total is that before the first. Where fewer draws are left than
    samples, the batch has no samples, and nothing but the state items. Items are slots.
    """
    seed, stream, _, _, stratified, _ = draw
    count = len(resolutions)
    if stratified or most < 1:
        raise ShapeError("draw", "must not be stratified, and most at least 1", [*draw, most])
    numbers = _numbers(state, count, draw)
    first_total = int(sums[-32:].sum())
    left = (most - slots[:, Slot.TIMES_SAMPLED])[sums[: shape[1]] > 0].sum()
    if first_total == 0 or left < count:
        _no_samples(state, resolutions, weights, numbers)
        return
    for i, number in enumerate(numbers.tolist()):
        one = resolutions[i : i + 1]
        total = int(sums[-32:].sum())
        words = philox_words(seed, numbers[i : i + 1], stream, RandomPurpose.COORDINATE)
        select.resolve_(
            one, sums, slots, select.coordinate(*words, total), rule, unit, seed, stream, number
        )
        slot = int(one[0, Resolution.SLOT])
        slots[slot, Slot.TIMES_SAMPLED] += 1
        if slots[slot, Slot.TIMES_SAMPLED] >= most and i + 1 < count:
            items = _Items(state, (sums, minima, torch.zeros(0)), shape)
            items.set(slot, 0, 0)
            items.repair()
    _complete(state, resolutions, weights, sums, minima, betas, draw, first_total)


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
    """Select the items of highest priority, each once, as the next global batch.

    Of equal priorities those of the lowest trajectory ids come first, and of one trajectory its
    first steps. The weights are 1. Where fewer items have a mass than the batch has samples, it has
    no samples. With `counts`, where items are slots, the slots count the draws. `draw` is that of
    `ring_select_`.
    """
    seed, stream, *_ = draw
    num_items = len(priorities)
    count = len(resolutions)
    numbers = _numbers(state, count, draw)
    total = int(sums[-32:].sum())
    oldest = int(state[RingState.TAIL]) % shape[1]
    first = int(slots[oldest, Slot.FIRST_ROW]) if len(row_slots) else oldest
    in_order = torch.arange(first, first + num_items) % num_items
    in_order = in_order[sums[in_order] > 0]
    items = in_order[torch.sort(priorities[in_order], descending=True, stable=True).indices][:count]
    if len(items) < count:
        _no_samples(state, resolutions, weights, numbers)
        return
    for i, (item, number) in enumerate(zip(items.tolist(), numbers.tolist(), strict=True)):
        one = resolutions[i : i + 1]
        point = sums[:item].sum().reshape(1)
        if len(row_slots):
            priority_ops.resolve_rows_(one, sums, slots, row_slots, point, number)
        else:
            select.resolve_(one, sums, slots, point, rule, unit, seed, stream, number)
    if counts:
        slots[resolutions[:, Resolution.SLOT], Slot.TIMES_SAMPLED] += 1
    weights.fill_(1)
    _advance(state, total, count)


def _numbers(state: Tensor, count: int, draw: Sequence[int]) -> Tensor:
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


def _complete(
    state: Tensor,
    resolutions: Tensor,
    weights: Tensor,
    sums: Tensor,
    minima: Tensor,
    betas: Tensor,
    draw: Sequence[int],
    total: int,
) -> None:
    if len(weights):
        beta = int(betas[min(int(state[RingState.BATCH]), len(betas) - 1)])
        numerator = total
        divisor = int(state[RingState.COUNTS + UpdateCount.DRAWABLE])
        normalize = draw[5]
        if normalize == Normalize.BATCH:
            numerator = int(resolutions[:, Resolution.MASS].min())
            divisor = 1
        elif normalize == Normalize.TABLE:
            top = minima[-32:] if len(minima) else sums[:32]  # a tree of one level has no minima
            numerator = int(top[top > 0].min())
            divisor = 1
        priority_ops.importance_(weights, resolutions, numerator, divisor, beta)
    _advance(state, total, len(resolutions))


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
    """Set the priorities of samples as `prioritize_`; of equal items the last wins.

    Values that are no priorities are counted and change nothing; nor do those of records that are
    no samples. Those of evicted trajectories, and of steps that are no anchors of theirs as it is,
    count for the highest priority alone.
    """
    bits = values.view(torch.int32).long() & LOW_32
    valid = priority_ops.is_priority(bits)
    state[RingState.REFUSED] += (~valid).sum()
    known = torch.where(resolutions[:, Resolution.SLOT] < 0, 0, bits)
    updates = priority_ops.updates_of(resolutions, known)[valid]
    counts = state[RingState.COUNTS : RingState.COUNTS + UpdateCount.NUM_WORDS]
    item = MassUnit.STEP if unit == MassUnit.STEP else MassUnit.TRAJECTORY
    priority_ops.prioritize_(
        sums, minima, priorities, counts, slots, updates, rule, alpha, item, most_bits
    )


def scatter_(
    columns: Sequence[Tensor], values: Sequence[Tensor], placed: Tensor, sources: Sequence[int]
) -> None:
    """Write the rows of trajectories to their places; a slot of -1 in `placed` is left out.

    A column of steps takes values [n, steps (+ 1), *shape], of which the trajectory's own are
    written; one of a row per trajectory takes [n, *shape]. Nothing is converted.
    """
    for column, rows, source in zip(columns, values, sources, strict=True):
        for i, (slot, first, steps, *_) in enumerate(placed.tolist()):
            if slot < 0:
                continue
            own = rows[i : i + 1] if source == Source.TRAJECTORY else rows[i]
            begin = slot if source == Source.TRAJECTORY else first
            num_rows = (
                1 if source == Source.TRAJECTORY else steps + (source == Source.STEPS_PLUS_ONE)
            )
            if steps < 0 or num_rows > len(own) or not 0 <= begin <= len(column) - num_rows:
                raise ShapeError(f"place {i}", "must lie in the columns", [slot, first, steps])
            column[begin : begin + num_rows] = own[:num_rows]
