"""Reference op of epochs over a table on a device: every item once, and each replica's part.

The order is the permutation of `permute_`, keyed by the epoch: no array holds it. All state is in
`RingState`, so that the op can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_gear.ops.records import Resolution, RingState, UpdateCount
from deepspeed_gear.ops.reference import select


@dataclass(frozen=True)
class _Plan:
    """Where a batch lies in the epochs. Of shared items all numbers count all replicas' samples."""

    epoch: int  # of its first sample,
    first: int  # number of that epoch's first sample,
    size: int  # and its items; 0: the batch has no samples
    samples: int  # number of the batch's first sample
    cuts: bool  # whether an epoch ends early, because the table has changed


def _plan(state: Tensor, total: int, span: int, drops_tail: bool) -> _Plan:
    epoch, first, size = (
        int(state[word]) for word in (RingState.EPOCH, RingState.EPOCH_FIRST, RingState.EPOCH_SIZE)
    )
    samples = int(state[RingState.SAMPLES])
    least = span if drops_tail else 1
    left = first + size - samples if size else 0
    is_same = size == total and all(
        state[then] == state[now]
        for then, now in (
            (RingState.EPOCH_NEXT, RingState.NEXT),
            (RingState.EPOCH_TAIL, RingState.TAIL),
            (RingState.EPOCH_STEPS, RingState.STEPS),
        )
    )
    if left >= least and is_same:
        return _Plan(epoch, first, size, samples, False)
    if total < least:
        return _Plan(epoch, first, 0, samples, False)
    if 0 < left < least:
        samples += left  # the tail that is left out has numbers, too
    return _Plan(epoch + (size > 0), samples, total, samples, left >= least)


def ring_epoch_(
    state: Tensor,
    resolutions: Tensor,
    epochs: Tensor,
    slots: Tensor,
    sums: Tensor,
    rule: Sequence[int],
    shape: Sequence[int],
    draw: Sequence[int],
    unit: int,
) -> None:
    """Take the next global batch of an epoch, and count it in the state.

    `draw`: seed, stream, stride, offset, whether items are shared, and whether the tail is dropped.
    Items are slots, and an epoch is a permutation of the coordinates [0, sum of all masses). A
    batch takes the next ones, and goes on with the next epoch where one ends; or, with a dropped
    tail, begins the next epoch if the rest does not fill the batch of all replicas. Where the table
    has changed since the latest batch, its epoch ends, which is counted, and the next one begins.

    Shared items are the same for every replica: replica `offset` of `stride` takes every stride-th
    sample, and numbers and epochs are those of one replica with the whole batch. Other items are
    the replica's own; its epoch e has the key e * stride + offset.

    `epochs` has the epoch of each sample, [B], int64. The batch has no samples where no item has a
    mass, or where an epoch with a dropped tail has fewer items than the batch.
    """
    seed, stream, stride, offset, is_shared, drops_tail = draw
    count = len(resolutions)
    if count == 0:
        return
    total = int(sums[-32:].sum())
    span = count * stride if is_shared else count
    plan = _plan(state, total, span, bool(drops_tail))
    order = torch.arange(count) * (stride if is_shared else 1) + (offset if is_shared else 0)
    numbers = plan.samples + order if is_shared else (plan.samples + order) * stride + offset
    at = plan.samples - plan.first + order
    turns = at // plan.size if plan.size else torch.zeros_like(at)
    epochs.copy_(plan.epoch + turns)
    resolutions.zero_()
    resolutions[:, [Resolution.ID, Resolution.SLOT]] = Resolution.NO_SAMPLE
    resolutions[:, Resolution.SAMPLE_NUMBER] = numbers
    for turn in sorted(set(turns.tolist())) if plan.size else ():
        which = (turns == turn).nonzero()[:, 0]
        index = at[which] - turn * plan.size
        least = int(index[0])
        run = torch.zeros(int(index[-1]) - least + 1, dtype=torch.int64)
        epoch = plan.epoch + turn
        key = epoch if is_shared else epoch * stride + offset
        select.permute_(run, seed, stream, key, least, plan.size)
        points = run[index - least]
        for k, i in enumerate(which.tolist()):
            one = resolutions[i : i + 1]
            point = points[k : k + 1]
            select.resolve_(one, sums, slots, point, rule, unit, seed, stream, int(numbers[i]))
    _advance(state, plan, span)


def _advance(state: Tensor, plan: _Plan, span: int) -> None:
    """Count a global batch; one without samples leaves its numbers to the next one."""
    if plan.size:
        turns = (plan.samples - plan.first + span - 1) // plan.size
        state[RingState.SAMPLES] = plan.samples + span
        state[RingState.BATCH] += 1
        state[RingState.EPOCH] = plan.epoch + turns
        state[RingState.EPOCH_FIRST] = plan.first + turns * plan.size
        state[RingState.EPOCH_SIZE] = plan.size
        state[RingState.EPOCH_NEXT] = state[RingState.NEXT]
        state[RingState.EPOCH_TAIL] = state[RingState.TAIL]
        state[RingState.EPOCH_STEPS] = state[RingState.STEPS]
        state[RingState.EPOCHS_CUT] += int(plan.cuts)
    state[RingState.TOTAL] = plan.size
    state[RingState.EMPTY] += int(plan.size == 0)
    state[RingState.INITIAL] = state[RingState.COUNTS + UpdateCount.HIGHEST_PRIORITY]
