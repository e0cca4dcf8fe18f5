"""Reference ops of selection: draws, the tree of masses, resolutions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from deepspeed_gear.ops.records import MassUnit, RandomPurpose, Resolution, Slot, SlotState

from ...errors import ShapeError
from ..constants import FAN_OUT, tree_levels
from .integers import LOW_32, as_tensor, less, multiply_high, shift_right

_PHILOX_ROUNDS = 10


def philox(seed: int, numbers: Tensor, stream: int, purpose: int) -> tuple[Tensor, Tensor]:
    """Make one random word of 128 bits for each sample number: Philox4x32-10.

    Args:
        seed: The key, 64 bits.
        numbers: Sample numbers, the lower half of the counter. [...], int64.
        stream: 32 bits of the counter.
        purpose: The last 32 bits: the purpose of the word.
    Returns:
        The upper and the lower 64 bits, as the bits of int64. [...] each.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11.
    """
    key_0, key_1 = seed & LOW_32, (seed >> 32) & LOW_32
    c0, c1 = numbers & LOW_32, shift_right(numbers, 32)
    c2, c3 = torch.full_like(c0, stream & LOW_32), torch.full_like(c0, purpose & LOW_32)
    for _ in range(_PHILOX_ROUNDS):
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = shift_right(product_1, 32) ^ c1 ^ key_0
        c2 = shift_right(product_0, 32) ^ c3 ^ key_1
        c1, c3 = product_1 & LOW_32, product_0 & LOW_32
        key_0, key_1 = (key_0 + 0x9E3779B9) & LOW_32, (key_1 + 0xBB67AE85) & LOW_32
    return (c1 << 32) | c0, (c3 << 32) | c2


def coordinate(high: Tensor, low: Tensor, total: int | Tensor) -> Tensor:
    """Return floor(word * total / 2^128): uniform over [0, total) up to 2^-64 relative. [...], int64."""
    total = as_tensor(total, high)
    middle = high * total
    carry = less(middle + multiply_high(low, total), middle)
    return multiply_high(high, total) + carry


def draw_(coordinates: Tensor, seed: int, stream: int, first: int, total: int) -> None:
    """Set coordinates[i] to a point in [0, total) for sample number first + i."""
    if total <= 0:
        raise ShapeError("total", "must be positive", total)
    numbers = torch.arange(len(coordinates), device=coordinates.device) + first
    coordinates.copy_(coordinate(*philox(seed, numbers, stream, RandomPurpose.COORDINATE), total))


def tree_build_(sums: Tensor, num_items: int) -> None:
    """Set every inner node to the sum of its children; the leaves are set already."""
    levels = tree_levels(num_items)
    for (below, width), (offset, parents) in pairwise(levels):
        sums[offset : offset + parents] = 0
        children = sums[below : below + width].view(-1, FAN_OUT)
        sums[offset : offset + len(children)] = children.sum(dim=1)


def tree_update_(sums: Tensor, num_items: int, items: Tensor, masses: Tensor) -> None:
    """Set leaves and add the changes to the nodes above them; of equal items the last wins."""
    if len(items) == 0:
        return
    check_items(items, num_items)
    nodes, group = torch.unique(items, return_inverse=True)
    last = torch.zeros_like(nodes).scatter_reduce_(0, group, torch.arange(len(items)), "amax")
    change = masses[last] - sums[nodes]
    for offset, _ in tree_levels(num_items):
        sums.index_add_(0, offset + nodes, change)
        nodes = nodes // FAN_OUT


def slot_masses_(
    sums: Tensor, slots: Tensor, log: Tensor, first: int, last: int, rule: Sequence[int], unit: int
) -> None:
    """Set the masses of the slots in entries [first, last) of a ring to what a rule gives them now.

    A committed trajectory has one unit of mass for each anchor (unit step), or one unit or one for each step
    (unit trajectory, by length) if it has an anchor at all.
    """
    if not 0 <= first <= last <= first + len(log):
        raise ShapeError("entries", f"must be in a log of {len(log)}", (first, last))
    if first == last:
        return
    changed = log[torch.arange(first, last) % len(log)]
    check_items(changed, len(slots))
    records = slots[changed]
    num_steps = records[:, Slot.NUM_STEPS]
    anchors = num_anchors(rule, num_steps)
    if unit != MassUnit.STEP:
        anchors = (anchors > 0) * (num_steps if unit == MassUnit.LENGTH else 1)
    tree_update_(sums, len(slots), changed, anchors * (records[:, Slot.STATE] == SlotState.COMMITTED))


def check_items(items: Tensor, num_items: int) -> None:
    """Reject items outside the tree.

    Raises:
        ShapeError: An item is outside [0, num_items).
    """
    if len(items) and not 0 <= int(items.min()) <= int(items.max()) < num_items:
        raise ShapeError("items", f"must lie in [0, {num_items})", items.tolist())


def descend(sums: Tensor, num_items: int, coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Find the item whose share of [0, total) holds each coordinate.

    Returns:
        The item, and the rest of the coordinate inside it, in [0, mass of the item). [B], int64 each.
    """
    node, rest = torch.zeros_like(coordinates), coordinates.clone()
    for offset, _ in reversed(tree_levels(num_items)):
        children = sums[offset + node[:, None] * FAN_OUT + torch.arange(FAN_OUT)]
        ends = children.cumsum(dim=1)
        child = (rest[:, None] >= ends[:, :-1]).sum(dim=1)
        begins = (ends - children).gather(1, child[:, None])[:, 0]
        node, rest = node * FAN_OUT + child, rest - begins
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
    """Set resolutions[i] to the record of the item that coordinates[i] hits; its sample number is first + i.

    Where an item is a trajectory, the anchor is a second draw over the anchors that the rule admits; where it
    is a step, the rest of the coordinate is the index of the anchor: one unit of mass each.
    """
    check_coordinates(sums, len(slots), coordinates)
    item, rest = descend(sums, len(slots), coordinates)
    numbers = torch.arange(len(coordinates)) + first
    slot = slots[item]
    num_steps = slot[:, Slot.NUM_STEPS]
    index = rest
    if unit != MassUnit.STEP:
        index = coordinate(*philox(seed, numbers, stream, RandomPurpose.ANCHOR), num_anchors(rule, num_steps))
    anchor = anchor_at(rule, num_steps, index)
    parts = (slot[:, Slot.ID], item, slot[:, Slot.GENERATION], slot[:, Slot.FIRST_ROW], num_steps, anchor)
    resolutions.copy_(torch.stack((*parts, sums[item], numbers), dim=1))
    assert resolutions.shape[1] == Resolution.NUM_WORDS


def check_coordinates(sums: Tensor, num_items: int, coordinates: Tensor) -> None:
    """Reject coordinates beyond the tree's total: they would hit no item.

    Raises:
        ShapeError: A coordinate is outside [0, total).
    """
    total = int(sums[tree_levels(num_items)[-1][0] :].sum())
    if len(coordinates) and not 0 <= int(coordinates.min()) <= int(coordinates.max()) < total:
        raise ShapeError("coordinates", f"must lie in [0, {total})", coordinates.tolist())


def num_anchors(rule: Sequence[int], num_steps: Tensor) -> Tensor:
    """Count the anchors of trajectories. Rule: as `AnchorRule` of common/slot.h. [B], int64."""
    first, trim, stride, most, _ = rule
    room = num_steps - first - trim
    return ((room + stride - 1) // stride).clamp(min=0, max=most)


def anchor_at(rule: Sequence[int], num_steps: Tensor, index: Tensor) -> Tensor:
    """Return the index-th anchor of trajectories. [B], int64."""
    first, _, stride, _, from_end = rule
    distance = first + index * stride
    return num_steps - 1 - distance if from_end else distance
