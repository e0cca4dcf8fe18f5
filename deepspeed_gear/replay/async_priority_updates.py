"""Priority updates that a GPU has yet to compute: a thread appends them to the priority logs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_gear.batching import priority_reduction
from deepspeed_gear.batching.transfer.cuda_streams import (
    Event,
    allow_captures_elsewhere,
)
from deepspeed_gear.sampling.priority_log import PriorityLog, check_priorities

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
