"""Priorities that come back from training: of a batch, or of items by id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import torch

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.transfer.cuda_streams import refuse_capture
from deepspeed_gear.config.sampler_options import PriorityOptions
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.errors import DataError, ShapeError
from deepspeed_gear.ops.constants import ANY_SLOT, SHARD_BITS
from deepspeed_gear.ops.records import LogEntry, Resolution, Slot
from deepspeed_gear.replay.async_priority_updates import AsyncPriorityUpdates, UpdatePart
from deepspeed_gear.sampling.priority_log import check_priorities
from deepspeed_gear.sampling.priority_masses import PriorityMasses


def as_given(
    batch: Batch | None, priorities: object, mask: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return priorities and mask as tensors, with what a program gives checked.

    Raises:
        DataError: One is of a wrong type.
    """
    if not isinstance(batch, Batch):
        rule = "must be from this replay's sample or iterator"
        raise DataError("batch", rule, type(batch).__name__)
    counts = None if mask is None else arguments.tensor("mask", mask)
    if counts is not None and counts.dtype != torch.bool:
        raise DataError("mask", "must be bool", str(counts.dtype))
    return arguments.tensor("priorities", priorities), counts


def report(
    tables: Sequence[PriorityMasses],
    sampler: PriorityOptions,
    batch: Batch,
    priorities: torch.Tensor,
    mask: torch.Tensor | None,
    late: AsyncPriorityUpdates,
) -> None:
    """Report the priorities of a batch; see `Replay.update_priorities`.

    Args:
        tables: Those that are sampled.
        sampler: How [B, T] becomes [B].
        batch: The batch.
        priorities: [B], or [B, T].
        mask: Which steps of [B, T] count. [B, T], bool.
        late: Reports what a device has yet to compute.
    """
    values = priorities
    if values.is_cuda:
        _report_later(tables, sampler, batch, values, mask, late)
        return
    late.drain()
    if values.dim() == 2:
        values = reduce_steps(values, mask_of(batch, values, mask), sampler.reduce, sampler.eta)
    _check_size(values, batch, priorities)
    parts, rounded = _parts(tables, batch), as_float32(values)
    if len(parts) > 1:  # nothing has changed where one of the tables refuses
        check_priorities(rounded.numpy())
        for part in parts:
            part.reports.check_room(len(part.records))
    for part in parts:
        part.reports.add(part.records, rounded if part.which is None else rounded[part.which])


def _report_later(
    tables: Sequence[PriorityMasses],
    sampler: PriorityOptions,
    batch: Batch,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    late: AsyncPriorityUpdates,
) -> None:
    """Report what a GPU has yet to compute, without a look at anything that lies there."""
    rule = "cannot be captured where the table is in host memory"
    refuse_capture("update_priorities", rule, "call it behind the graph")
    given, faults = values, values.new_zeros(2, dtype=torch.float32)
    if values.dim() == 2:
        chosen, differ = _mask_unseen(batch, values, mask)
        none_counts = ~chosen.any(1)
        empty = torch.where(
            none_counts.any(), none_counts.float().argmax() + 1, 0
        )  # a sample, counted from 1
        faults = torch.stack([differ, empty]).float()
        values = reduce_steps(values, chosen, sampler.reduce, sampler.eta, is_checked=False)
    _check_size(values, batch, given)
    late.take(_parts(tables, batch), float32_on_device(values), faults, _check_late)


def _check_size(values: torch.Tensor, batch: Batch, given: torch.Tensor) -> None:
    if values.dim() != 1 or values.numel() != batch.num_samples:
        rule = f"must have shape [{batch.num_samples}], or [{batch.num_samples}, T]"
        raise ShapeError("priorities", rule, list(given.shape))


def _check_late(values: torch.Tensor, faults: torch.Tensor) -> None:
    """Raise what an earlier look would have found.

    Raises:
        ShapeError, DataError: As `report`.
    """
    differ, empty = faults.tolist()
    if differ:
        _refuse_masks()
    if empty:
        _refuse_empty(int(empty) - 1)
    check_priorities(values.numpy())


def _parts(tables: Sequence[PriorityMasses], batch: Batch) -> list[UpdatePart]:
    """Return what of a batch goes to which table.

    Raises:
        DataError: A sample is of an evaluation pass.
    """
    records = batch.reported
    if not records.is_cpu:
        records = records.cpu()
    if len(tables) == 1:
        _check_split(tables[0], records)
        return [UpdatePart(tables[0].reports, records)]
    assert batch.host_source is not None
    which = [torch.nonzero(batch.host_source == index)[:, 0] for index in range(len(tables))]
    parts = [UpdatePart(t.reports, records[own], own) for t, own in zip(tables, which, strict=True)]
    for masses, part in zip(tables, parts, strict=True):
        _check_split(masses, part.records)
    return parts


def _mask_unseen(
    batch: Batch, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which steps of [B, T] count, and whether masks differ, which nobody has looked at. [], bool."""
    differ = torch.zeros((), dtype=torch.bool, device=values.device)
    if mask is not None:
        if mask.shape != values.shape:
            _refuse_shape(mask, values)
        return mask, differ
    fitting = _fitting(batch, values)
    chosen = fitting[0] if fitting else torch.ones_like(values, dtype=torch.bool)
    for other in fitting[1:]:
        differ = differ | (other != chosen).any()
    return chosen, differ


def float32_on_device(values: torch.Tensor) -> torch.Tensor:
    """Return priorities as they are stored, without a look at them; one that is too small stays above 0.

    Returns:
        Of the same shape and device, float32, contiguous.
    """
    rounded = values.to(torch.float32).contiguous()
    if values.dtype == torch.float64:
        tiny = torch.finfo(torch.float32).smallest_normal
        rounded = torch.where((values > 0) & (rounded == 0), tiny, rounded)
    return rounded


def _check_split(masses: PriorityMasses, records: torch.Tensor) -> None:
    """Refuse samples of an evaluation pass: a priority would make them samples of training.

    Raises:
        DataError: One is of another split.
    """
    rule = masses.spec.rule
    if rule.split and (split_of(records[:, Resolution.ID].numpy(), rule.split) != rule.split_index).any():
        raise DataError("batch", "must be from the training stream", None, "nothing was changed")


def as_float32(values: torch.Tensor | Sequence[float]) -> torch.Tensor:
    """Return priorities as they are stored; one that is too small for it stays above 0.

    Returns:
        Of the same shape, in host memory, float32, contiguous.

    Raises:
        DataError: One is negative, infinite or NaN, seen in float64.
    """
    given = arguments.tensor("priorities", values)
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
            _refuse_shape(mask, values)
        return mask
    fitting = _fitting(batch, values)
    # A look at them waits for their device.
    if any(not is_checked or not other.equal(fitting[0]) for other in fitting[1:]):
        _refuse_masks()
    return fitting[0] if fitting else torch.ones_like(values, dtype=torch.bool)


def _fitting(batch: Batch, values: torch.Tensor) -> list[torch.Tensor]:
    """Return the different masks of the shape of [B, T], each of the steps that learn."""
    names = {id(m): name for name, m in batch.mask.items() if m.shape == values.shape}  # equal windows: once
    found = [batch.learns(name) for name in names.values()]
    return [mask for at, mask in enumerate(found) if all(mask is not before for before in found[:at])]


def _refuse_masks() -> NoReturn:
    rule = "must be given where fields of the same length have different masks"
    raise ShapeError("mask", rule, None, 'as batch.learns("reward")')


def _refuse_empty(sample: int) -> NoReturn:
    rule = "must have a step that counts"
    raise ShapeError(f"mask of sample {sample}", rule, None, "give another mask")


def _refuse_shape(mask: torch.Tensor, values: torch.Tensor) -> NoReturn:
    rule = f"must have the shape of the priorities {list(values.shape)}"
    raise ShapeError("mask", rule, list(mask.shape))


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
        _refuse_empty(at)
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
    shard_of: Callable[[np.ndarray], np.ndarray] | None = None,
) -> int:
    """Report priorities of items by id; see `Replay.set_priorities`.

    Args:
        masses: Of the training stream.
        ids: As there.
        priorities: As there.
        steps: As there.
        reports: Whether this rank reports.
        shard_of: Ids -> shard that has each, -1 for none; None: this store has all. [n] -> [n], int64.
    """
    numbers, anchors = _items(masses, ids, steps)
    given = arguments.tensor("priorities", priorities)
    if tuple(given.shape) != numbers.shape:
        raise ShapeError("priorities", f"must have shape [{len(numbers)}]", list(given.shape))
    values = as_float32(given).numpy()
    check_priorities(values)
    with masses.table.lock:
        updates, known = masses.handles_of(numbers, anchors)
    shard = masses.table.spec.shard
    if shard_of is not None and shard is not None:
        updates, known = _over_nodes(shard_of(numbers), shard.index, numbers, updates, known)
    if reports:
        masses.reports.add_items(updates[known], values[known], LogEntry.BY_ID)
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
        items = masses.table.slots[slots, Slot.FIRST_ROW] + updates[known, 2] if masses.by_step else slots
        found[known] = masses.values[items]
    return torch.from_numpy(found)


def _items(
    masses: PriorityMasses, ids: Sequence[int] | torch.Tensor, steps: Sequence[int] | torch.Tensor | None
) -> tuple[np.ndarray, np.ndarray]:
    numbers = arguments.integers("ids", ids)
    if masses.by_step != (steps is not None):
        need = (
            "must be given, as an item is a step"
            if masses.by_step
            else "must not be given, as an item is a trajectory"
        )
        raise ShapeError("steps", need, None)
    anchors = np.zeros_like(numbers) if steps is None else arguments.integers("steps", steps)
    if anchors.shape != numbers.shape:
        raise ShapeError("steps", f"must have shape [{len(numbers)}]", list(anchors.shape))
    return numbers, anchors
