"""Priority updates from training: for the items of a batch, or for items by id."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import deepspeed_gear.arguments as arguments
from deepspeed_gear.batching import priority_reduction
from deepspeed_gear.batching.batch import Batch
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.batching.priority_reduction import float32_on_device
from deepspeed_gear.batching.transfer.cuda_streams import (
    Event,
    allow_captures_elsewhere,
    refuse_capture,
)
from deepspeed_gear.config.sampler_options import PriorityOptions
from deepspeed_gear.data.splits import split_of
from deepspeed_gear.errors import ConfigError, DataError, ShapeError
from deepspeed_gear.ops.constants import ANY_SLOT, SHARD_BITS
from deepspeed_gear.ops.records import LogEntry, Resolution, Slot
from deepspeed_gear.plan.resolved_plan import Resolved
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.priority_log import PriorityLog, check_priorities
from deepspeed_gear.sampling.priority_masses import PriorityMasses

Ids = Sequence[int] | torch.Tensor


class PriorityReports:
    """Priorities of a replay's tables: reported by batch or by id, and read back.

    Args:
        plan: The resolved plan of the replay.
        train: The training stream of each sampled table.
        late: Appends priorities once a GPU has computed them.
    """

    def __init__(
        self, plan: Resolved, train: Sequence[BatchStream], late: AsyncPriorityUpdates
    ) -> None:
        self._config = plan.config
        self._placement = plan.placement
        self._place = plan.topology.place
        self._late = late
        self._masses = {stream.table.spec.name: stream.state.priorities for stream in train}
        self._sampled = plan.config.sampled_tables
        # All samplers of a mixture reduce priorities in the same way.
        self._sampler = plan.config.sampler_of(self._sampled[0])
        # The only log, where a batch's samples all belong to it; None: see `_parts`.
        self._log: PriorityLog | None = None
        masses = self._masses.get(self._sampled[0])
        if masses is not None and len(self._sampled) == 1 and not masses.spec.rule.split:
            self._log = masses.reports if self._place.reports else None

    def _masses_of(self, table: str) -> PriorityMasses:
        masses = self._masses.get(table)
        if masses is None:
            rule = 'must be "prioritized" or "top_k" for priorities to be reported'
            raise ConfigError(
                "gear.sampler.kind",
                rule,
                self._config.sampler_of(table).kind,
                "choose such a sampler, or do not report priorities",
            )
        return masses

    def report(self, batch: object, priorities: object, mask: object) -> None:
        """Report the priorities of a batch; see `Replay.update_priorities`."""
        # Priorities in the form in which the log has them need one native call.
        if (
            self._log is not None
            and mask is None
            and isinstance(batch, Batch)
            and isinstance(priorities, Tensor)
            and priorities.is_cpu
        ):
            self._late.drain()
            if self._log.add_plain(batch.reported, priorities):
                return
        tables = [self._masses_of(table) for table in self._sampled]
        if not self._place.reports:
            return
        sampler = self._sampler
        assert isinstance(sampler, PriorityOptions)  # as the tables have priorities
        if not isinstance(batch, (Batch, MicroBatch)):
            rule = "must be from this replay's sample or iterator, or a micro batch of packs"
            raise DataError(
                "batch", rule, type(batch).__name__, "give the batch itself, as it was sampled"
            )
        counts = None if mask is None else arguments.tensor("mask", mask)
        if counts is not None and counts.dtype != torch.bool:
            raise DataError(
                "mask", "must be bool", str(counts.dtype), "convert it with mask.bool()"
            )
        given = arguments.tensor("priorities", priorities)
        if isinstance(batch, MicroBatch):
            unit = "group" if self._config.has_group_items else sampler.unit
            _check_packed(unit, batch, given, counts)
        if given.dim() == 2 and self._place.sequence_world > 1:
            rule = "must have shape [B] where ranks share the time axis"
            raise ShapeError(
                "priorities", rule, list(given.shape), "reduce them over the sequence ranks"
            )
        is_late = given.is_cuda
        if is_late:
            self._late.check()
            rule = "cannot be captured where the table is in host memory"
            refuse_capture("update_priorities", rule, "call it after the graph")
        else:
            self._late.drain()
        values, faults = _reduced(batch, given, counts, sampler)
        parts = _parts(tables, batch)
        if is_late:
            none = given.new_zeros(2, dtype=torch.float32)
            self._late.take(parts, float32_on_device(values), none if faults is None else faults)
            return
        rounded = _rounded(values)
        if len(parts) > 1:  # nothing has changed if one of the tables raises
            check_priorities(rounded.numpy())
            for part in parts:
                part.reports.check_room(len(part.resolutions))
        for part in parts:
            part.reports.add(
                part.resolutions, rounded if part.which is None else rounded[part.which]
            )

    def report_by_id(
        self,
        table: str,
        ids: Ids,
        priorities: torch.Tensor | Sequence[float] | np.ndarray,
        steps: Ids | None = None,
        reports: bool = True,
    ) -> int:
        """Report priorities of a table's items by id; see `Replay.set_priorities`.

        Args:
            reports: Whether this rank reports for its replica.
        Returns:
            Number of the items that are stored and admitted by the sampler.
        """
        self._late.drain()
        masses = self._masses_of(table)
        numbers, anchors = _items(masses, ids, steps)
        given = arguments.tensor("priorities", priorities)
        if tuple(given.shape) != numbers.shape:
            raise ShapeError(
                "priorities",
                f"must have shape [{len(numbers)}]",
                list(given.shape),
                "give one priority for each id",
            )
        values = _rounded(given).numpy()
        check_priorities(values)
        with masses.table.lock:
            updates, known = masses.handles_of(numbers, anchors)
        shard = masses.table.spec.shard
        if table in self._placement.spread and shard is not None:
            # The slot's upper bits hold the shard: slot 5 of shard 2 is 2 << SHARD_BITS | 5. Slots
            # of other nodes are not known here: ANY_SLOT, with the id in place of the generation.
            shards = self._placement.shard_of(table, numbers)
            updates = updates.copy()
            updates[:, 0] |= shard.index << SHARD_BITS
            elsewhere = (shards >= 0) & (shards != shard.index)
            updates[elsewhere, 0] = shards[elsewhere] << SHARD_BITS | ANY_SLOT
            updates[elsewhere, 1] = numbers[elsewhere]
            known = known | elsewhere
        if reports:
            masses.reports.add_items(updates[known], values[known], LogEntry.BY_ID)
        return int(known.sum())

    def reporter(self, table: str) -> Callable[[Ids, np.ndarray], int]:
        """Return a function of ids and priorities that reports them; ConfigError without any."""
        self._masses_of(table)
        return partial(self.report_by_id, table)

    def values_of(self, table: str, ids: Ids, steps: Ids | None) -> torch.Tensor:
        """Return priorities at the latest selection, 0 for evicted items. [n], float32."""
        masses = self._masses_of(table)
        numbers, anchors = _items(masses, ids, steps)
        priorities = np.zeros(len(numbers), np.float32)
        with masses.table.lock:
            updates, known = masses.handles_of(numbers, anchors)
            items = updates[known, 0]  # slots
            if masses.by_step:
                items = masses.table.slots[items, Slot.FIRST_ROW] + updates[known, 2]  # rows
            priorities[known] = masses.values[items]
        return torch.from_numpy(priorities)


def _reduced(
    batch: Batch | MicroBatch, given: Tensor, counts: Tensor | None, sampler: PriorityOptions
) -> tuple[Tensor, Tensor | None]:
    """Reduce priorities to one for each sample.

    What a GPU has yet to compute is not read: its faults are raised once it is computed.

    Returns:
        The priorities, [B]; and, on a GPU, whether masks differ, and the number of the first sample
        without a step that counts, from 1, or 0: [2], float32; None: no step can be at fault.
    Raises:
        DataError, ShapeError: The shape does not fit, or, on the host, there is a fault.
    """
    values = given
    faults = None
    if given.dim() == 2 and isinstance(batch, Batch):
        chosen, *others = priority_reduction.masks_of(batch, given, counts)
        differ = chosen.new_zeros(())
        for other in others:
            differ |= (other != chosen).any()
        if given.is_cuda:
            none_counts = ~chosen.any(1)
            empty = torch.where(none_counts.any(), none_counts.float().argmax() + 1, 0)
            faults = torch.stack([differ, empty]).float()
        elif differ:
            priority_reduction.refuse_masks()
        values = priority_reduction.reduce_steps(
            given, chosen, sampler.reduce, sampler.eta, is_checked=not given.is_cuda
        )
    count = batch.num_samples if isinstance(batch, Batch) else batch.num_trajectories
    if values.dim() != 1 or values.numel() != count:
        rule = f"must have shape [{count}], or [{count}, T]"
        raise ShapeError(
            "priorities",
            rule,
            list(given.shape),
            "give one priority for each sample, or for each step of it",
        )
    return values, faults


def _check_packed(unit: str, micro: MicroBatch, priorities: Tensor, mask: Tensor | None) -> None:
    """Raise unless priorities are one for each trajectory of a micro batch, and these are items."""
    if unit == "group":
        rule = (
            'must be "trajectory" for priorities of a micro batch, which may hold a part of a group'
        )
        remedy = (
            "report those of whole groups, each by one of its trajectories: "
            "set_priorities(ids, priorities)"
        )
        raise ConfigError("gear.sampler.unit", rule, unit, remedy)
    if priorities.shape != (micro.num_trajectories,):
        rule = f"must have shape [{micro.num_trajectories}], one for each trajectory"
        raise ShapeError(
            "priorities",
            rule,
            list(priorities.shape),
            "give one priority for each trajectory of the micro batch",
        )
    if mask is not None:
        raise ShapeError(
            "mask",
            "must not be given with a micro batch of packs",
            list(mask.shape),
            "reduce the priorities to one for each trajectory first",
        )


def _parts(tables: Sequence[PriorityMasses], batch: Batch | MicroBatch) -> list[UpdatePart]:
    """Divide a batch's samples among the tables of a mixture.

    Raises:
        DataError: The batch is of a pass over a split. Its priorities would make items of the split
            sampled for training.
    """
    resolutions = batch.reported
    if not resolutions.is_cpu:
        resolutions = resolutions.cpu()
    parts = [UpdatePart(tables[0].reports, resolutions)]
    if len(tables) > 1:
        assert batch.host_source is not None
        which = [torch.nonzero(batch.host_source == index)[:, 0] for index in range(len(tables))]
        parts = [
            UpdatePart(t.reports, resolutions[own], own)
            for t, own in zip(tables, which, strict=True)
        ]
    for masses, part in zip(tables, parts, strict=True):
        rule = masses.spec.rule
        if not rule.split:
            continue
        ids = part.resolutions[:, Resolution.ID].numpy()
        if (split_of(ids, rule.split) != rule.split_index).any():
            raise DataError(
                "batch", "must be from the training stream", None, "nothing was changed"
            )
    return parts


def _rounded(given: Tensor) -> Tensor:
    """Convert priorities to float32 in host memory; positive ones stay above 0.

    Raises:
        DataError: A float64 priority is not valid, or too large for float32.
    """
    if given.dtype == torch.float32 and given.is_cpu:
        return given.contiguous()  # without a call of torch's dispatcher
    given = given.to("cpu")
    rounded = float32_on_device(given)
    if given.dtype == torch.float64:
        check_priorities(given.numpy())
        check_priorities(rounded.numpy())
    return rounded


def _items(masses: PriorityMasses, ids: Ids, steps: Ids | None) -> tuple[np.ndarray, np.ndarray]:
    """Check the items of a call; return ids and steps (0 for whole trajectories). [n] each."""
    numbers = arguments.integers("ids", ids)
    if masses.by_step != (steps is not None):
        rule = "must not be given, as an item is a trajectory"
        if masses.by_step:
            rule = "must be given, as an item is a step"
        raise ShapeError(
            "steps",
            rule,
            None,
            "give the step of each item" if masses.by_step else "leave steps out",
        )
    anchors = np.zeros_like(numbers) if steps is None else arguments.integers("steps", steps)
    if anchors.shape != numbers.shape:
        raise ShapeError(
            "steps",
            f"must have shape [{len(numbers)}]",
            list(anchors.shape),
            "give one step for each id",
        )
    return numbers, anchors


_BLOCKS = 4  # blocks of pinned memory that are allocated at once


class UpdatePart(NamedTuple):
    """The samples of a priority update that belong to one table.

    Attributes:
        reports: Priority log of the table.
        resolutions: Resolutions of the samples. [n, 8], int64, contiguous, in host memory.
        which: Indices of the samples in the batch; None: all. [n], int64.
    """

    reports: PriorityLog
    resolutions: Tensor
    which: Tensor | None = None


class PinnedBlocks:
    """Blocks of pinned host memory for values from a device.

    They are reused, as an allocation of pinned memory may wait for the device.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}

    def fetch(self, values: Tensor) -> tuple[Tensor, Event]:
        """Copy values to the host in the order of their CUDA stream, without waiting.

        Returns:
            The block, and an event after which it has the values.
        """
        free = self._free.setdefault(len(values), [])
        if not free:
            free += torch.empty(_BLOCKS, len(values), dtype=values.dtype, pin_memory=True).unbind()
        host = free.pop()
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(values.device))
        return host, event

    def give_back(self, host: Tensor) -> None:
        """Return a block whose values are read. Any thread."""
        self._free[len(host)].append(host)


class AsyncPriorityUpdates:
    """Appends priority updates to the logs once their device has computed them.

    A thread waits for the device. Updates with errors are dropped, and the next `check` or `drain`
    raises. One thread calls the methods.

    Args:
        timeout_s: Longest wait of `close`, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._blocks = PinnedBlocks()
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def take(self, parts: Sequence[UpdatePart], values: Tensor, faults: Tensor) -> None:
        """Enqueue the update of a batch, which is appended once the device has computed it.

        Args:
            parts: The samples by table.
            values: Priorities. [B], float32, on the device.
            faults: Whether masks differ; number of the first sample without a step that counts,
                from 1, or 0. [2], float32, on the device.
        Raises:
            StoreError: A log cannot hold so many updates; nothing has changed.
        """
        for part in parts:
            part.reports.check_room(len(part.resolutions))
        host, event = self._blocks.fetch(torch.cat([values, faults]))
        for part in parts:
            part.reports.defer(len(part.resolutions))  # selections wait for these until `_report`
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gear reports", daemon=True)
            self._thread.start()
        self._jobs.put(partial(self._report, parts, host, event))

    def check(self) -> None:
        """Raise the first error in the updates since the last call, if there is one."""
        if not self._errors.empty():
            raise self._errors.get()

    def drain(self) -> None:
        """Wait until all updates are appended, then `check`."""
        if self._thread is not None:
            self._jobs.join()
        self.check()

    def close(self) -> None:
        """End the thread when all updates are appended, or after `timeout_s`. Idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(self._timeout_s)
            self._thread = None

    def _run(self) -> None:
        allow_captures_elsewhere()
        while (job := self._jobs.get()) is not None:
            job()
            self._jobs.task_done()
        self._jobs.task_done()

    def _report(self, parts: Sequence[UpdatePart], host: Tensor, event: Event) -> None:
        """Append an update after its event: `host` then has its values and the faults."""
        values = host[: sum(len(part.resolutions) for part in parts)]
        is_good = False
        try:
            event.synchronize()
            differ, empty = host[len(values) :].tolist()
            if differ:
                priority_reduction.refuse_masks()
            if empty:
                priority_reduction.refuse_empty(int(empty) - 1)
            check_priorities(values.numpy())
            is_good = True
        except Exception as error:
            self._errors.put(error)
        for part in parts:  # also for a failed update: selections wait for it
            own = values if part.which is None else values[part.which]
            try:
                part.reports.keep(part.resolutions, own if is_good else None)
            except Exception as error:
                self._errors.put(error)
        self._blocks.give_back(host)
