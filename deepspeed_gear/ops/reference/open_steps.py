"""Reference op of open trajectories in the memory of one device: a step of every environment."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.records import (
    MassUnit,
    OpenTrajectory,
    PlacedStep,
    RingState,
    Slot,
    SlotState,
)
from deepspeed_gear.ops.reference.priorities import mass_of
from deepspeed_gear.ops.reference.ring_table import MassChanges
from deepspeed_gear.ops.reference.select import anchor_at, num_anchors

_NO_STEP = [-1, 0, 0, -1, 0, 0]


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

    Environment e owns the rows [e * part, (e + 1) * part), with part = rows / environments; its trajectories
    lie one after the other in them, and one that might not fit before the end begins at the first of them.
    Ids follow the order in which trajectories begin, and the oldest ones, by id, are evicted: those up to the
    newest one whose rows are needed, and those beyond the slots, less one for each environment.

    A step continues the open trajectory of its environment (`opened`, see `OpenTrajectory`), or begins one:
    after an end (`terminated`, `truncated`), after the longest length (the last step is marked in
    `truncations`, a column or empty), or where the open one was evicted. Environments where `mask` is False
    have no step; with `next_step` nor has the one after an end, in which the environment resets itself. If
    the same call evicts the open trajectory of an environment, its step is dropped and counted.

    `placed` has the place of each step (see `PlacedStep`), `begun` the first three words of those that begin
    a trajectory, slot -1 elsewhere. `owners` has the slot of each row. Masses are those of `ring_add_` for
    the steps so far; steps that were anchors before keep their priority.
    """
    num_rows, num_slots, final_row, most_steps = shape
    num_envs = len(opened)
    part = num_rows // num_envs
    if num_rows % num_envs or part < 2 * (most_steps + final_row) or num_slots < 2 * num_envs:
        rule_ = "must have rows for two longest trajectories, and two slots, of each environment"
        raise ShapeError("shape", rule_, list(shape))
    by_row = len(priorities) > 0 and unit == MassUnit.STEP
    bits = initial if initial >= 0 else int(state[RingState.INITIAL])
    mass = int(mass_of(torch.tensor([bits]), alpha, most_bits)[0]) if len(priorities) else 0
    following, tail = int(state[RingState.NEXT]), int(state[RingState.TAIL])
    stays = tail  # the first id that is not evicted
    for env in range(num_envs):
        placed[env], begun[env] = torch.tensor(_NO_STEP), torch.tensor([-1, 0, 0])
        if mask is not None and not mask[env]:
            continue
        steps, number, next_row, ended = opened[env].tolist()
        if next_step and ended:
            opened[env, OpenTrajectory.ENDED] = 0
            continue
        known = slots[number % num_slots].tolist()
        begin = known[Slot.FIRST_ROW]
        is_open = steps > 0 and known[Slot.STATE] == SlotState.COMMITTED and known[Slot.ID] == number
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
    changes = MassChanges(sums, minima, priorities, num_rows if by_row else num_slots)
    for number in range(tail, stays):
        slot = number % num_slots
        first, steps = int(slots[slot, Slot.FIRST_ROW]), int(slots[slot, Slot.NUM_STEPS])
        for item in range(first, first + steps) if by_row else [slot]:
            changes.set(item, 0, 0)
        state[RingState.STEPS] -= steps
        slots[slot, Slot.STATE] = 0
    for env in range(num_envs):
        slot, row, _, number, first, step = placed[env].tolist()
        if slot < 0:
            continue
        ended = bool(terminated[env]) or (truncated is not None and bool(truncated[env]))
        if number < stays:
            placed[env] = torch.tensor(_NO_STEP)
            opened[env, OpenTrajectory.NUM_STEPS], opened[env, OpenTrajectory.ENDED] = 0, int(ended)
            state[RingState.DROPPED] += 1
            continue
        steps = step + 1
        if step == 0:
            begun[env] = placed[env, : PlacedStep.ID]
            born = int(state[RingState.BATCH])
            slots[slot] = torch.tensor(
                [SlotState.COMMITTED, number // num_slots, number, first, 0, 0, 0, born]
            )
            owners[row] = slot
        owners[row + final_row] = slot
        slots[slot, Slot.NUM_STEPS], slots[slot, Slot.NUM_ROWS] = steps, steps + final_row
        state[RingState.STEPS] += 1
        before, after = (int(num_anchors(rule, torch.tensor(n))) for n in (step, steps))
        if by_row:
            old, new = (
                set(anchor_at(rule, torch.tensor(n), torch.arange(count)).tolist())
                for n, count in ((step, before), (steps, after))
            )
            for anchor in sorted(old ^ new):
                changes.set(first + anchor, mass * (anchor in new), bits * (anchor in new))
        elif not len(priorities):
            by_length = (after > 0) * (steps if unit == MassUnit.LENGTH else 1)
            changes.set(slot, after if unit == MassUnit.STEP else by_length, 0)
        elif before == 0 or after == 0:
            changes.set(slot, mass * (after > 0), bits * (after > 0))
        next_row = first - env * part + steps + final_row
        opened[env] = torch.tensor([0 if ended else steps, number, next_row, int(ended)])
    changes.apply(state)
    state[RingState.NEXT], state[RingState.TAIL] = following, stays
