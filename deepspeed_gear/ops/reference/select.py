"""Reference ops of selection: draws, an epoch's order, tree of masses, resolutions, goals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from deepspeed_gear.errors import ShapeError
from deepspeed_gear.ops.constants import FAN_OUT, tree_levels
from deepspeed_gear.ops.philox import philox_words
from deepspeed_gear.ops.records import (
    GoalStrategy,
    MassUnit,
    RandomPurpose,
    Resolution,
    Slot,
    SlotState,
)
from deepspeed_gear.ops.reference.integers import less, multiply_high, shift_right, signed

_FEISTEL_ROUNDS = 8
_LEAST_BITS = 8


def coordinate(high: Tensor, low: Tensor, total: int | Tensor) -> Tensor:
    """Return floor(word * total / 2^128): uniform over [0, total) up to 2^-64. [...], int64."""
    total = total if isinstance(total, Tensor) else torch.tensor(signed(total))
    middle = high * total
    return multiply_high(high, total) + less(middle + multiply_high(low, total), middle)


def draw_(coordinates: Tensor, seed: int, stream: int, first: int, total: int) -> None:
    """Set coordinates[i] to a point in [0, total) for sample number first + i."""
    if total <= 0:
        raise ShapeError("total", "must be positive", total)
    numbers = torch.arange(len(coordinates)) + first
    coordinates.copy_(
        coordinate(*philox_words(seed, numbers, stream, RandomPurpose.COORDINATE), total)
    )


def permute_(
    coordinates: Tensor, seed: int, stream: int, epoch: int, first: int, size: int
) -> None:
    """Set coordinates[i] to the place of index first + i in the epoch's permutation of [0, size).

    A Feistel network over the next power of two (at least 2^8: fewer bits mix badly), walked along
    its cycles until it lands inside.

    Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
    """
    if not 0 <= first <= size - len(coordinates):
        raise ShapeError("first", f"must keep {len(coordinates)} indices in [0, {size})", first)
    bits = max(_LEAST_BITS, (size - 1).bit_length())
    right_bits = bits - bits // 2
    left_mask = (1 << bits // 2) - 1
    right_mask = (1 << right_bits) - 1
    purposes = (
        RandomPurpose.PERMUTATION + (pair << 8) for pair in range(1, _FEISTEL_ROUNDS // 2 + 1)
    )
    keys = [philox_words(seed, torch.tensor(epoch), stream, purpose) for purpose in purposes]
    index = torch.arange(len(coordinates)) + first
    outside = torch.ones_like(index, dtype=torch.bool)
    while outside.any():
        left = index[outside] >> right_bits
        right = index[outside] & right_mask
        for key_left, key_right in keys:
            left = left ^ (_mix(right + int(key_left)) & left_mask)
            right = right ^ (_mix(left + int(key_right)) & right_mask)
        index[outside] = (left << right_bits) | right
        outside = index >= size
    coordinates.copy_(index)


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finalizer.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    x = (x ^ shift_right(x, 30)) * signed(0xBF58476D1CE4E5B9)
    x = (x ^ shift_right(x, 27)) * signed(0x94D049BB133111EB)
    return x ^ shift_right(x, 31)


def tree_build_(sums: Tensor, num_items: int) -> None:
    """Set every inner node to the sum of its children; the leaves are set already."""
    for (below, width), (offset, parents) in pairwise(tree_levels(num_items)):
        sums[offset : offset + parents] = 0
        children = sums[below : below + width].view(-1, FAN_OUT)
        sums[offset : offset + len(children)] = children.sum(dim=1)


def tree_update_(sums: Tensor, num_items: int, items: Tensor, masses: Tensor) -> None:
    """Set leaves and the nodes above them; of equal items the last wins."""
    check_items(items, num_items)
    for item, mass in zip(items.tolist(), masses.tolist(), strict=True):
        sums[item] = mass
    tree_build_(sums, num_items)


def slot_masses_(
    sums: Tensor, slots: Tensor, log: Tensor, first: int, last: int, rule: Sequence[int], unit: int
) -> None:
    """Set the masses of the slots in entries [first, last) of a ring.

    A committed slot has the mass by the rule, any other 0.
    """
    changed = entries_of(log, first, last, len(slots))
    records = slots[changed]
    masses = masses_by_rule(rule, unit, records[:, Slot.NUM_STEPS])
    tree_update_(
        sums, len(slots), changed, masses * (records[:, Slot.STATE] == SlotState.COMMITTED)
    )


def entries_of(log: Tensor, first: int, last: int, num_slots: int) -> Tensor:
    """Return entries [first, last) of a ring of slots, checked. [last - first], int64."""
    if not 0 <= first <= last <= first + len(log):
        raise ShapeError("entries", f"must be in a log of {len(log)}", (first, last))
    entries = log[torch.arange(first, last) % max(len(log), 1)]
    check_items(entries, num_slots)
    return entries


def check_items(items: Tensor, num_items: int) -> None:
    if len(items) and not 0 <= int(items.min()) <= int(items.max()) < num_items:
        raise ShapeError("items", f"must lie in [0, {num_items})", items.tolist())


def descend(sums: Tensor, num_items: int, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Return the item whose share of [0, total) holds each coordinate, and the rest inside it.

    For masses [3, 0, 5] the coordinates [2, 3, 7] hit the items [0, 2, 2] with the rests [2, 0, 4].
    """
    node = torch.zeros_like(coordinates)
    rest = coordinates.clone()
    for offset, _ in reversed(tree_levels(num_items)):
        children = sums[offset + node[:, None] * FAN_OUT + torch.arange(FAN_OUT)]
        ends = children.cumsum(dim=1)
        child = (rest[:, None] >= ends[:, :-1]).sum(dim=1)
        begins = (ends - children).gather(1, child[:, None])[:, 0]
        node = node * FAN_OUT + child
        rest = rest - begins
    return node, rest


def resolve_(
    resolutions: Tensor,
    sums: Tensor,
    slots: Tensor,
    coordinates: Tensor,
    rule: Sequence[int],
    unit: int,
    seed: int,
    stream: int,
    first: int,
) -> None:
    """Set resolutions[i] to the record of the item that coordinates[i] hits.

    Its sample number is first + i. The anchor in a trajectory is a second draw over the anchors
    that the rule admits; where items are steps it follows from the rest of the coordinate.
    """
    check_coordinates(sums, len(slots), coordinates)
    item, rest = descend(sums, len(slots), coordinates)
    numbers = torch.arange(len(coordinates)) + first
    slot = slots[item]
    num_steps = slot[:, Slot.NUM_STEPS]
    index = rest
    if unit != MassUnit.STEP:
        words = philox_words(seed, numbers, stream, RandomPurpose.ANCHOR)
        index = coordinate(*words, num_anchors(rule, num_steps))
    anchor = anchor_at(rule, num_steps, index)
    parts = (
        slot[:, Slot.ID],
        item,
        slot[:, Slot.GENERATION],
        slot[:, Slot.FIRST_ROW],
        num_steps,
        anchor,
    )
    resolutions.copy_(torch.stack((*parts, sums[item], numbers), dim=1))
    assert resolutions.shape[1] == Resolution.NUM_WORDS


def check_coordinates(sums: Tensor, num_items: int, coordinates: Tensor) -> None:
    """Raise ShapeError unless all coordinates lie in [0, total of the tree)."""
    total = int(sums[tree_levels(num_items)[-1][0] :].sum())
    if len(coordinates) and not 0 <= int(coordinates.min()) <= int(coordinates.max()) < total:
        raise ShapeError("coordinates", f"must lie in [0, {total})", coordinates.tolist())


def num_anchors(rule: Sequence[int], num_steps: Tensor) -> Tensor:
    """Count the anchors of trajectories. Rule: as `AnchorRule` of common/slot.h. [B], int64."""
    first, trim, stride, most, _ = rule
    return ((num_steps - first - trim + stride - 1) // stride).clamp(min=0, max=most)


def masses_by_rule(rule: Sequence[int], unit: int, num_steps: Tensor) -> Tensor:
    """Return the masses of trajectories without priorities. [B], int64.

    With the unit step it is the number of anchors. Otherwise it is 1, or by length the number of
    steps; 0 without an anchor.
    """
    anchors = num_anchors(rule, num_steps)
    if unit == MassUnit.STEP:
        return anchors
    return (anchors > 0) * (num_steps if unit == MassUnit.LENGTH else 1)


def anchor_at(rule: Sequence[int], num_steps: Tensor, index: Tensor) -> Tensor:
    """Return the step of the anchor with this index among those of its trajectory. [B], int64."""
    first, _, stride, _, from_end = rule
    distance = first + index * stride
    return num_steps - 1 - distance if from_end else distance


def draw_goals_(
    goal_step: Tensor,
    resolutions: Tensor,
    seed: int,
    stream: int,
    strategy: int,
    fraction: int,
    final_row: int,
) -> None:
    """Set the row of the achieved goal that each sample gets, [B], int64; -1 for its own goal.

    `strategy` is a `GoalStrategy`: a row after the anchor, the last one, or any; `fraction` the
    share of the samples that get one, Q62; `final_row` 1 where trajectories have T+1 goals, else 0.

    Source: Andrychowicz et al., "Hindsight Experience Replay", NeurIPS 2017, section 4.5.
    """
    numbers = resolutions[:, Resolution.SAMPLE_NUMBER]
    anchors = resolutions[:, Resolution.ANCHOR]
    rows = resolutions[:, Resolution.NUM_STEPS] + final_row
    first = {
        GoalStrategy.FUTURE: anchors + 1,
        GoalStrategy.FINAL: rows - 1,
        GoalStrategy.EPISODE: torch.zeros_like(rows),
    }[strategy]
    high, _ = philox_words(seed, numbers, stream, RandomPurpose.RELABELLING)
    chosen = shift_right(high, 2) < fraction  # as Q62
    room = (rows - first).clamp(min=1)
    goals = first + coordinate(*philox_words(seed, numbers, stream, RandomPurpose.GOAL), room)
    goal_step.copy_(torch.where(chosen & (first < rows), goals, -1))
