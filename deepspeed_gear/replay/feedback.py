"""Priorities that come back from training: of a batch, or of items by id."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepspeed_gear.collection.batch import Batch
from deepspeed_gear.config import PrioritizedSampler, Sampler, TopKSampler
from deepspeed_gear.errors import DataError, ShapeError
from deepspeed_gear.ops.constants import ANY_SLOT, BY_ID, R_ID, SHARD_BITS
from deepspeed_gear.selection.priorities import PriorityMasses
from deepspeed_gear.selection.reports import check_priorities
from deepspeed_gear.store.split import split_of
from deepspeed_gear.store.table import FIRST_ROW


def report(
    tables: Sequence[PriorityMasses],
    sampler: Sampler,
    batch: Batch,
    priorities: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Report the priorities of a batch; see `Replay.update_priorities`."""
    values = priorities.detach() if priorities.requires_grad else priorities
    if values.dim() == 2:
        assert isinstance(sampler, (PrioritizedSampler, TopKSampler))
        values = reduce_steps(values, mask_of(batch, values, mask), sampler.reduce, sampler.eta)
    if values.dim() != 1 or values.numel() != batch.num_samples:
        rule = f"must have shape [{batch.num_samples}], or [{batch.num_samples}, T]"
        raise ShapeError("priorities", rule, list(priorities.shape))
    records, rounded = batch.reported, as_float32(values)
    if not records.is_cpu:
        records = records.cpu()
    if len(tables) == 1:
        _check_split(tables[0], records)
        tables[0].reports.add(records, rounded)
        return
    check_priorities(rounded.numpy())
    source = batch.source.cpu()
    parts = [source == index for index in range(len(tables))]
    for masses, part in zip(tables, parts, strict=True):
        _check_split(masses, records[part])
        masses.reports.check_room(int(part.sum()))
    for masses, part in zip(tables, parts, strict=True):
        masses.reports.add(records[part], rounded[part])


def _check_split(masses: PriorityMasses, records: torch.Tensor) -> None:
    """Refuse samples of an evaluation pass: a priority would make them samples of training.

    Raises:
        DataError: One is of another split.
    """
    rule = masses.spec.rule
    if rule.split and (split_of(records[:, R_ID].numpy(), rule.split) != rule.split_index).any():
        raise DataError("batch", "must be from the training stream", None, "nothing was changed")


def as_float32(values: torch.Tensor | Sequence[float]) -> torch.Tensor:
    """Return priorities as they are stored; one that is too small for it stays above 0.

    Returns:
        Of the same shape, in host memory, float32, contiguous.

    Raises:
        DataError: One is negative, infinite or NaN, seen in float64.
    """
    given = values if isinstance(values, torch.Tensor) else torch.as_tensor(np.asarray(values))
    if given.requires_grad:
        given = given.detach()
    if given.dtype == torch.float32 and given.is_cpu:
        return given.contiguous()
    given = given.to("cpu")
    rounded = given.to(torch.float32)
    if given.dtype == torch.float64:
        check_priorities(given.numpy())
        tiny = torch.finfo(torch.float32).smallest_normal
        rounded = torch.where((given > 0) & (rounded == 0), tiny, rounded)
        check_priorities(rounded.numpy())
    return rounded.contiguous()


def mask_of(
    batch: Batch, values: torch.Tensor, mask: torch.Tensor | None, is_checked: bool = True
) -> torch.Tensor:
    """Return which steps of [B, T] count: what is given, else those of this shape that learn, else all.

    Args:
        batch: The batch.
        values: [B, T].
        mask: What is given. [B, T], bool.
        is_checked: Compare masks of this shape; else two different ones are refused unseen.
    Raises:
        ShapeError: The batch has different masks of this shape, or the given one has another.
    """
    if mask is not None:
        if mask.shape != values.shape:
            raise ShapeError(
                "mask", f"must have the shape of the priorities {list(values.shape)}", list(mask.shape)
            )
        return mask
    names = {id(m): name for name, m in batch.mask.items() if m.shape == values.shape}  # equal windows: once
    fitting = [batch.learns(name) for name in names.values()]
    others = [m for m in fitting[1:] if m is not fitting[0]]
    # A look at them waits for their device.
    if any(not is_checked or not m.equal(fitting[0]) for m in others):
        rule = "must be given where fields of the same length have different masks"
        raise ShapeError("mask", rule, None, 'as batch.learns("reward")')
    return fitting[0] if fitting else torch.ones_like(values, dtype=torch.bool)


def reduce_steps(
    values: torch.Tensor, mask: torch.Tensor, how: str, eta: float, is_checked: bool = True
) -> torch.Tensor:
    """Reduce priorities over the steps that count.

    Args:
        values: [B, T].
        mask: [B, T], bool.
        how: "max", "mean" or "mix".
        eta: Part of the maximum in "mix".
        is_checked: Look at the mask, which waits for its device; else such a sample gives NaN.
    Returns:
        [B], of the values' dtype, at least float32.
    Raises:
        ShapeError: A sample has no step that counts.
    Source: Kapturowski et al., "Recurrent Experience Replay in Distributed Reinforcement Learning", ICLR
        2019, section 2.3: p = eta * max_i d_i + (1 - eta) * mean(d).
    """
    if values.dtype in (torch.float16, torch.bfloat16):
        values = values.float()  # a sum of them is more than they can hold
    counts = mask.sum(1)
    if is_checked and not bool((counts > 0).all()):
        at = int(torch.nonzero(counts == 0)[0])
        raise ShapeError(f"mask of sample {at}", "must have a step that counts", None, "give another mask")
    zero = torch.zeros((), dtype=values.dtype, device=values.device)
    # A NaN outside the mask does not count; one inside stays, and is refused.
    counted = torch.where(mask, values, zero)
    mean = counted.sum(1) / counts
    if how == "mean":
        return mean
    highest = torch.where(mask, values, -torch.inf).amax(1)
    return highest if how == "max" else eta * highest + (1 - eta) * mean


def report_by_id(
    masses: PriorityMasses,
    ids: Sequence[int] | torch.Tensor,
    priorities: torch.Tensor | Sequence[float],
    steps: Sequence[int] | torch.Tensor | None,
    reports: bool,
) -> int:
    """Report priorities of items by id; see `Replay.set_priorities`."""
    numbers, anchors = _items(masses, ids, steps)
    values = as_float32(priorities).numpy()
    if values.shape != numbers.shape:
        raise ShapeError("priorities", f"must have shape [{len(numbers)}]", list(values.shape))
    check_priorities(values)
    with masses.table.lock:
        updates, known = masses.handles_of(numbers, anchors)
    shard = masses.table.spec.shard
    if masses.shard_of is not None and shard is not None:
        updates, known = _over_nodes(masses.shard_of(numbers), shard.index, numbers, updates, known)
    if reports:
        masses.reports.add_items(updates[known], values[known], BY_ID)
    return int(known.sum())


def _over_nodes(
    shards: np.ndarray, own: int, ids: np.ndarray, updates: np.ndarray, known: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return handles with the shard in the slot's upper half, by id where another node holds the item.

    Args:
        shards: Which shard has each trajectory, if any has; -1 for none. [n].
        own: This node's.
        ids: [n].
        updates: Handles of those that this node's store knows. [n, 3], int64.
        known: Which these are. [n], bool.
    """
    found = updates.copy()
    found[:, 0] = own << SHARD_BITS | updates[:, 0]
    elsewhere = (shards >= 0) & (shards != own)
    found[elsewhere, 0] = shards[elsewhere] << SHARD_BITS | ANY_SLOT
    found[elsewhere, 1] = ids[elsewhere]
    return found, known | elsewhere


def priorities_of(
    masses: PriorityMasses, ids: Sequence[int] | torch.Tensor, steps: Sequence[int] | torch.Tensor | None
) -> torch.Tensor:
    """Return the priorities that the latest cut has drawn with. [n], float32."""
    numbers, anchors = _items(masses, ids, steps)
    with masses.table.lock:
        updates, known = masses.handles_of(numbers, anchors)
        found = np.zeros(len(numbers), np.float32)
        slots = updates[known, 0]
        items = masses.table.slots[slots, FIRST_ROW] + updates[known, 2] if masses.by_step else slots
        found[known] = masses.values[items]
    return torch.from_numpy(found)


def _items(
    masses: PriorityMasses, ids: Sequence[int] | torch.Tensor, steps: Sequence[int] | torch.Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.asarray(ids, np.int64).reshape(-1)
    if masses.by_step != (steps is not None):
        need = (
            "must be given, as an item is a step"
            if masses.by_step
            else "must not be given, as an item is a trajectory"
        )
        raise ShapeError("steps", need, None)
    anchors = np.zeros_like(numbers) if steps is None else np.asarray(steps, np.int64).reshape(-1)
    if anchors.shape != numbers.shape:
        raise ShapeError("steps", f"must have shape [{len(numbers)}]", list(anchors.shape))
    return numbers, anchors
