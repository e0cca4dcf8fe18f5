"""Asynchronous priority updates, whose values a device has yet to compute: only a thread waits for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepspeed_gear.batching.transfer.cuda_streams import Event, allow_captures_elsewhere
from deepspeed_gear.sampling.priority_log import PriorityLog

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
