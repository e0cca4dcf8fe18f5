"""Priority updates from training: of a batch, or of items by id."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.batching.priority_reduction import (
    float32_on_device,
    mask_of,
    mask_unseen,
    reduce_steps,
    refuse_empty,
    refuse_masks,
)
from deepspeed_gear.batching.transfer.cuda_streams import Event, allow_captures_elsewhere, refuse_capture
from deepspeed_gear.config.sampler_options import PriorityOptions
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.errors import ConfigError, DataError, ShapeError
from deepspeed_gear.ops.constants import ANY_SLOT, SHARD_BITS
from deepspeed_gear.ops.records import LogEntry, Resolution, Slot
from deepspeed_gear.sampling.priority_log import PriorityLog, check_priorities
from deepspeed_gear.sampling.priority_masses import PriorityMasses


def as_given(
    batch: Batch | MicroBatch | None, priorities: object, mask: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return priorities and mask as tensors, after checks of the arguments.

    Raises:
        DataError: One is of a wrong type.
    """
    if not isinstance(batch, (Batch, MicroBatch)):
        rule = "must be from this replay's sample or iterator, or a micro batch of packs"
        raise DataError("batch", rule, type(batch).__name__)
    counts = None if mask is None else arguments.tensor("mask", mask)
    if counts is not None and counts.dtype != torch.bool:
        raise DataError("mask", "must be bool", str(counts.dtype))
    return arguments.tensor("priorities", priorities), counts


def check_packed(unit: str, micro: MicroBatch, priorities: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Check that priorities are those of a micro batch's trajectories, and trajectories are items.

    Raises:
        ConfigError: Items are groups, of which a micro batch may have a part.
        ShapeError: They are not one for each trajectory.
    """
    if unit == "group":
        rule = 'must be "trajectory" for priorities of a micro batch, which may hold a part of a group'
        remedy = (
            "report those of whole groups, each by one of its trajectories: set_priorities(ids, priorities)"
        )
        raise ConfigError("gear.sampler.unit", rule, unit, remedy)
    if priorities.shape != (micro.num_trajectories,):
        rule = f"must have shape [{micro.num_trajectories}], one for each trajectory"
        raise ShapeError("priorities", rule, list(priorities.shape))
    if mask is not None:
        raise ShapeError("mask", "must not be given with a micro batch of packs", list(mask.shape))


def report(
    tables: Sequence[PriorityMasses],
    sampler: PriorityOptions,
    batch: Batch | MicroBatch,
    priorities: torch.Tensor,
    mask: torch.Tensor | None,
    late: AsyncPriorityUpdates,
) -> None:
    """Report the priorities of a batch; see `Replay.update_priorities`.

    Args:
        sampler: Defines the reduction of [B, T] to [B].
        priorities: [B], or [B, T].
        mask: Which steps of [B, T] count. [B, T], bool.
        late: Appends updates that a device has yet to compute.
    """
    values = priorities
    if values.is_cuda:
        late.check()
        _report_later(tables, sampler, batch, values, mask, late)
        return
    late.drain()
    if values.dim() == 2 and isinstance(batch, Batch):
        values = reduce_steps(values, mask_of(batch, values, mask), sampler.reduce, sampler.eta)
    _check_size(values, batch, priorities)
    parts, rounded = _parts(tables, batch), _rounded(values)
    if len(parts) > 1:  # nothing has changed if one of the tables raises
        check_priorities(rounded.numpy())
        for part in parts:
            part.reports.check_room(len(part.records))
    for part in parts:
        part.reports.add(part.records, rounded if part.which is None else rounded[part.which])


def _report_later(
    tables: Sequence[PriorityMasses],
    sampler: PriorityOptions,
    batch: Batch | MicroBatch,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    late: AsyncPriorityUpdates,
) -> None:
    """Enqueue priorities that a GPU has yet to compute, without reading its memory."""
    rule = "cannot be captured where the table is in host memory"
    refuse_capture("update_priorities", rule, "call it after the graph")
    given, faults = values, values.new_zeros(2, dtype=torch.float32)
    if values.dim() == 2 and isinstance(batch, Batch):
        chosen, differ = mask_unseen(batch, values, mask)
        none_counts = ~chosen.any(1)
        empty = torch.where(
            none_counts.any(), none_counts.float().argmax() + 1, 0
        )  # a sample, counted from 1
        faults = torch.stack([differ, empty]).float()
        values = reduce_steps(values, chosen, sampler.reduce, sampler.eta, is_checked=False)
    _check_size(values, batch, given)
    late.take(_parts(tables, batch), float32_on_device(values), faults, _check_late)


def _check_size(values: torch.Tensor, batch: Batch | MicroBatch, given: torch.Tensor) -> None:
    count = batch.num_samples if isinstance(batch, Batch) else batch.num_trajectories
    if values.dim() != 1 or values.numel() != count:
        rule = f"must have shape [{count}], or [{count}, T]"
        raise ShapeError("priorities", rule, list(given.shape))


def _check_late(values: torch.Tensor, faults: torch.Tensor) -> None:
    """Raise errors of deferred priorities and masks.

    Raises:
        ShapeError, DataError: As `report`.
    """
    differ, empty = faults.tolist()
    if differ:
        refuse_masks()
    if empty:
        refuse_empty(int(empty) - 1)
    check_priorities(values.numpy())


def _parts(tables: Sequence[PriorityMasses], batch: Batch | MicroBatch) -> list[UpdatePart]:
    """Divide a batch's samples among the tables.

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


def _check_split(masses: PriorityMasses, records: torch.Tensor) -> None:
    """Raise for samples of an evaluation pass: a priority would make them samples of training.

    Raises:
        DataError: A sample is of another split.
    """
    rule = masses.spec.rule
    if rule.split and (split_of(records[:, Resolution.ID].numpy(), rule.split) != rule.split_index).any():
        raise DataError("batch", "must be from the training stream", None, "nothing was changed")


def as_float32(values: torch.Tensor | Sequence[float]) -> torch.Tensor:
    """Convert priorities to float32, in which positive ones stay above 0.

    Returns:
        Of the same shape, in host memory, float32, contiguous.

    Raises:
        DataError: One is negative, infinite or NaN, checked in float64.
    """
    return _rounded(arguments.tensor("priorities", values))


def _rounded(given: torch.Tensor) -> torch.Tensor:
    """Convert a dense tensor; see `as_float32`."""
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
        reports: Whether this rank reports priorities.
        shard_of: Ids -> shard of each, -1 for none; None: this store has all. [n] -> [n], int64.
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
        shards: The shard of each trajectory, -1 for none. [n].
        ids: [n].
        updates: Handles of items in this node's store. [n, 3], int64.
        known: Which items these are. [n], bool.
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
    """Return the priorities at the latest selection. [n], float32."""
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


_BLOCKS = 4  # of pinned memory, allocated at once


class UpdatePart(NamedTuple):
    """The samples of a priority update that belong to one table.

    Args:
        reports: The priority log of the table.
        records: Resolutions of its samples. [n, 8], int64, contiguous, in host memory.
        which: Their indices in the batch; None: all. [n], int64.
    """

    reports: PriorityLog
    records: Tensor
    which: Tensor | None = None


Check = Callable[[Tensor, Tensor], None]  # of values and faults


class _Job(NamedTuple):
    parts: Sequence[UpdatePart]
    values: Tensor  # followed by the faults
    event: Event
    check: Check


class Blocks(Protocol):
    """Host memory for values from a device."""

    def fetch(self, values: Tensor) -> tuple[Tensor, Event]:
        """Copy values to the host; return them and an event after the copy. Does not wait. [n], float32."""
        ...

    def give_back(self, host: Tensor) -> None:
        """Return memory of `fetch` that is no longer needed. Any thread."""
        ...


class PinnedBlocks:
    """Reused blocks of pinned memory, since an allocation of it may wait for the device."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def fetch(self, values: Tensor) -> tuple[Tensor, Event]:
        """Copy values after the work of their stream so far."""
        free = self._free.setdefault(len(values), [])
        if not free:
            free += torch.empty(_BLOCKS, len(values), dtype=values.dtype, pin_memory=True).unbind()
        host = free.pop()
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(values.device))
        return host, event

    def give_back(self, host: Tensor) -> None:
        """Return a block whose copy is done."""
        self._free[len(host)].append(host)


class AsyncPriorityUpdates:
    """Appends priority updates to the logs when their device has computed them. Called by one thread.

    Errors in them are raised by the next call of `check` or `drain`; such updates are dropped.

    Args:
        timeout_s: Longest wait of `close` for the device, in seconds.
        blocks: Host memory for the values; None: pinned memory.
    """

    def __init__(self, timeout_s: float, blocks: Blocks | None = None) -> None:
        self._timeout_s, self._blocks = timeout_s, PinnedBlocks() if blocks is None else blocks
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def take(self, parts: Sequence[UpdatePart], values: Tensor, faults: Tensor, check: Check) -> None:
        """Enqueue an update, which is appended to the logs when its values are computed.

        Args:
            parts: The samples of each table.
            values: Priorities of the whole batch, on their device. [B], float32.
            faults: Errors found while computing them, on their device. [n], float32.
            check: Raises if values or faults, in host memory, are invalid.
        Raises:
            StoreError: A log cannot hold so many updates; nothing has changed.
        """
        for part in parts:
            part.reports.check_room(len(part.records))
        host, event = self._blocks.fetch(torch.cat([values, faults]))
        for part in parts:
            part.reports.promise(len(part.records))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gear reports", daemon=True)
            self._thread.start()
        self._jobs.put(_Job(parts, host, event, check))

    def check(self) -> None:
        """Raise an error of the updates since the last call.

        Raises:
            DataError, ShapeError: A priority was negative, infinite or NaN, or a mask wrong.
        """
        if not self._errors.empty():
            raise self._errors.get()

    def drain(self) -> None:
        """Wait until all updates are appended, then `check`."""
        if self._thread is not None:
            self._jobs.join()
        self.check()

    def close(self) -> None:
        """End the thread when all updates are appended; safe to call twice.

        After `timeout_s`, updates that the device has not computed are dropped.
        """
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(self._timeout_s)
            self._thread = None

    def _run(self) -> None:
        allow_captures_elsewhere()
        while (job := self._jobs.get()) is not None:
            self._report(job)
            self._blocks.give_back(job.values)
            self._jobs.task_done()
        self._jobs.task_done()

    def _report(self, job: _Job) -> None:
        count = sum(len(part.records) for part in job.parts)
        values, faults = job.values[:count], job.values[count:]
        is_good = False
        try:
            job.event.synchronize()
            job.check(values, faults)
            is_good = True
        except Exception as error:
            self._errors.put(error)
        for part in job.parts:  # also for a failed update: selections wait for it
            own = values if part.which is None else values[part.which]
            try:
                part.reports.keep(part.records, own if is_good else None)
            except Exception as error:
                self._errors.put(error)
