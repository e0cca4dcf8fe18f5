"""Priority log: each process appends updates to its own log; a selection applies all in one order.

A selection of batch n applies exactly the updates (reports) of batches before n - lag. An update
belongs to the batch that its process had last requested, so those of a batch are complete when it
requests a later one: no clock is involved. Within a batch they are ordered by sample number, those
by id last; an item's last one wins.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import torch

from deepspeed_gear.errors import ShapeError, StoreError
from deepspeed_gear.ops.records import LogEntry, PriorityUpdate, Resolution
from deepspeed_gear.sampling.mass_rules import check_finite
from deepspeed_gear.sampling.selection import PeerProgress
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.records import NOTHING
from deepspeed_gear.store.table import Table

T = TypeVar("T")
# A native call that appends and publishes updates: samples, priorities, batch -> whether it did. It
# does where they need no conversion and the log has room.
Append = Callable[[torch.Tensor, torch.Tensor, int], bool]
NEVER = -(1 << 62)  # no batch was requested yet


class LogEnds:
    """Ends of a process's log, as counters that never wrap."""

    HEAD: Final = 0
    TAIL: Final = 1
    NEXT: Final = 2  # the head after the selection
    TAKING: Final = 3  # of the first log: all heads move to LogEnds.NEXT
    NUM_WORDS: Final = 16


@dataclass
class _Deferred:
    """Updates whose values a device has yet to compute."""

    batch: int  # their global batch
    count: int


class PriorityLog:
    """All processes' priority logs. `ask`, `add`, `defer`, `keep` take the lock; the rest
    requires it.
    """

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        assert spec.priorities is not None
        self.spec = spec
        self.table = table
        self.ops = table.ops
        self.rule = spec.priorities
        views = table.views
        at = spec.at
        self._log: np.ndarray = views[at + "log"]
        self._log_words: memoryview = self._log.data
        self.ends: list[memoryview] = [ends.data for ends in views[at + "ends"]]
        self.asked: np.ndarray = views[at + "asked"]
        self._asked_words: memoryview = self.asked.data
        self._peer = table.memory.peer
        self._num_peers = len(self.asked)
        self._my_log = torch.from_numpy(self._log[self._peer])
        self._requests = PeerProgress(spec, table, self.asked)
        self._append: Append | None = None  # set by `append_by`
        self._deferred: deque[_Deferred] = deque()
        self._current = NEVER  # batch last requested, while updates are deferred
        self._before = NEVER  # batch requested before that
        self._mutex = threading.Lock()

    @staticmethod
    def regions(spec: StreamSpec, num_peers: int) -> list[Region]:
        """Return the regions of a stream's priority logs in the store."""
        assert spec.priorities is not None
        return [
            Region(
                spec.at + "log", "int64", (num_peers, spec.priorities.log_size, LogEntry.NUM_WORDS)
            ),
            Region(spec.at + "ends", "int64", (num_peers, LogEnds.NUM_WORDS)),
            Region(spec.at + "asked", "int64", (num_peers,)),
        ]

    def append_by(self, call: Append) -> None:
        """Append and publish later updates by a native call, where it can."""
        self._append = call

    def initialise(self) -> None:
        self.asked[:] = NEVER

    def ask(self, number: int) -> None:
        """Record that this process requests a batch, which later updates belong to; while updates
        of an older one are deferred (`defer`), publish that one, so that others wait for them.
        """
        with self._mutex:
            latest = self._latest
            if number != latest:
                self._before = latest
            self._current = number
            self._publish_request()

    def _publish_request(self) -> None:
        """Publish the batch that this process requests; the oldest one with deferred updates."""
        self._asked_words[self._peer] = self._deferred[0].batch if self._deferred else self._current

    def restart(self, number: int) -> None:
        """Reset what all processes request, after a checkpoint at batch `number` was loaded."""
        self.asked[:] = NEVER
        for peer in range(self._num_peers):
            waiting = self._waiting(peer)
            # Of batches that are selected again: due now.
            if (self._log[peer, waiting, LogEntry.BATCH] >= number).any():
                self._log[peer, waiting, LogEntry.BATCH] = NEVER

    def withdraw(self, is_made: Callable[[], bool]) -> None:
        """Take back this process's last request unless its batch `is_made`: later updates belong to
        the batch before, and count for this one. No process makes it until this one requests it
        again.
        """
        with self._mutex, self.table.lock:
            if not is_made():
                self._current = self._before
                self._publish_request()

    def give_up(self) -> None:
        """Withdraw this process's request; its updates are then due at the next selection."""
        with self._mutex, self.table.lock:
            self._log[self._peer, self._waiting(self._peer), LogEntry.BATCH] = NEVER
            for deferred in self._deferred:
                deferred.batch = NEVER
            self._current = self._asked_words[self._peer] = NEVER

    def _waiting(self, peer: int) -> np.ndarray:
        """Return the places of a process's waiting updates in its log, in their order.
        [n], int64.
        """
        ends = self.ends[peer]
        return np.arange(ends[LogEnds.HEAD], ends[LogEnds.TAIL]) % self.rule.log_size

    def too_early(self, number: int) -> bool:
        """Return whether this process itself has yet to request a batch that this selection waits
        for.
        """
        return self.rule.lag > 0 and bool(self._asked_words[self._peer] < number - self.rule.lag)

    def late(self, number: int) -> list[int]:
        """Return the living processes whose updates are not complete for a global batch."""
        return self._requests.lagging(number - self.rule.lag)

    def wait_awake(self, number: int) -> None:
        """Spin briefly until the updates for a global batch are complete."""
        self._requests.wait_awake(number - self.rule.lag)

    def add_items(
        self, updates: np.ndarray, priorities: np.ndarray, order: np.ndarray | int
    ) -> None:
        """As `add`, of any items: slot, generation, anchor [n, 3]; sample numbers or BY_ID [n].
        int64.
        """
        samples = np.zeros((len(updates), Resolution.NUM_WORDS), np.int64)
        samples[:, (Resolution.SLOT, Resolution.GENERATION, Resolution.ANCHOR)] = updates
        samples[:, Resolution.SAMPLE_NUMBER] = order
        self.add(torch.from_numpy(samples), torch.from_numpy(np.array(priorities, np.float32)))

    def add(self, samples: torch.Tensor, priorities: torch.Tensor) -> None:
        """Append priorities [n], float32, of drawn samples [n, 8], for a later selection; both
        contiguous.

        DataError: one is negative or not finite; StoreError: more wait than the log holds. Nothing
        changes.
        """
        with self._mutex:
            assert not self._deferred, "reports lie in the log in the order of their batches"
            self._write(samples, priorities, self._asked_words[self._peer])

    def add_plain(self, samples: torch.Tensor, priorities: torch.Tensor) -> bool:
        """Append priorities of samples, as `add`, if one native call can.

        Returns:
            Whether it could: both are dense and contiguous tensors in host memory, of as many rows
            and of the dtypes that `add` requires, and the log has room.
        """
        append = self._append
        if append is None:
            return False
        with self._mutex:
            assert not self._deferred, "reports lie in the log in the order of their batches"
            try:
                return append(samples, priorities, self._asked_words[self._peer])
            except RuntimeError:
                check_priorities(priorities.detach().numpy())
                raise

    @property
    def _latest(self) -> int:
        """The batch that this process last requested."""
        return self._current if self._deferred else int(self._asked_words[self._peer])

    def defer(self, count: int) -> None:
        """Reserve log entries for deferred updates of the batch that this process last
        requested.
        """
        with self._mutex:
            self.check_room(count)
            self._current = batch = self._latest
            self._deferred.append(_Deferred(batch, count))

    def keep(self, samples: torch.Tensor, priorities: torch.Tensor | None) -> None:
        """Append the oldest deferred updates, as `add`; None: drop them."""
        with self._mutex:
            deferred = self._deferred.popleft()
            try:
                if priorities is not None:
                    self._write(samples, priorities, deferred.batch)
            finally:
                self._publish_request()

    def _write(self, samples: torch.Tensor, priorities: torch.Tensor, batch: int) -> None:
        call = self._append
        if call is not None and _refusing(priorities, call, samples, priorities, batch):
            return
        count = priorities.numel()
        self.check_room(count)
        ends = self.ends[self._peer]
        tail = ends[LogEnds.TAIL]
        if tail > ends[LogEnds.HEAD]:  # after a load no batch was requested; the log stays in order
            batch = max(
                batch, self._log_words[self._peer, (tail - 1) % self.rule.log_size, LogEntry.BATCH]
            )
        append = self.ops.append_reports_
        _refusing(priorities, append, self._my_log, samples, priorities, tail, batch)
        # The lock orders the entries before the tail, for the process that selects next.
        with self.table.lock:
            ends[LogEnds.TAIL] = tail + count

    def check_room(self, count: int) -> None:
        """Raise a StoreError if the log cannot hold `count` more updates."""
        ends = self.ends[self._peer]
        waiting = ends[LogEnds.TAIL] - ends[LogEnds.HEAD]
        if self._deferred:
            waiting += sum(deferred.count for deferred in self._deferred)
        if count > self.rule.log_size - waiting:
            rule = f"must be at most {self.rule.log_size} between two global batches on a rank"
            given = f"{waiting} wait, {count} more"
            name = f"stream {self.spec.name}: priorities"
            raise StoreError(
                name, rule, given, "report them in parts, with a sample() between the parts"
            )

    def due(self, number: int) -> list[tuple[int, np.ndarray]]:
        """Return the updates of each process that a selection of a global batch applies."""
        batch = number - self.rule.lag
        size = self.rule.log_size
        due = []
        for peer, ends in enumerate(self.ends):
            head = ends[LogEnds.HEAD]
            tail = ends[LogEnds.TAIL]
            if head == tail:
                continue
            log = self._log[peer]
            first = head % size
            end = head % size + tail - head
            entries = (
                log[first:end] if end <= size else np.concatenate([log[first:], log[: end - size]])
            )
            if self._log_words[peer, (tail - 1) % size, LogEntry.BATCH] >= batch:
                entries = entries[: np.searchsorted(entries[:, LogEntry.BATCH], batch)]
            if len(entries):
                due.append((peer, entries))
        return due

    def take(self, due: list[tuple[int, np.ndarray]]) -> None:
        """Remove applied updates from all logs or none: a part, applied again, would override
        others.
        """
        first = self.ends[0]
        for peer, entries in due:
            ends = self.ends[peer]
            ends[LogEnds.NEXT] = ends[LogEnds.HEAD] + len(entries)
        first[LogEnds.TAKING] = 1  # the commit point
        for peer, _ in due:
            ends = self.ends[peer]
            ends[LogEnds.HEAD] = ends[LogEnds.NEXT]
        first[LogEnds.TAKING] = 0

    def recover(self) -> None:
        """Repair the heads of the logs after a process died inside `take`."""
        to = LogEnds.NEXT
        of = LogEnds.HEAD
        if self.ends[0][LogEnds.TAKING]:
            to, of = of, to
        for ends in self.ends:
            ends[to] = ends[of]
        self.ends[0][LogEnds.TAKING] = 0

    def waiting(self) -> np.ndarray:
        """Return all waiting updates, in their order. [n, 6], int64."""
        entries = np.concatenate(
            [self._log[peer, self._waiting(peer)] for peer in range(self._num_peers)]
        )
        return entries[np.lexsort((entries[:, LogEntry.SAMPLE_NUMBER], entries[:, LogEntry.BATCH]))]

    def restore(self, log: np.ndarray) -> None:
        """Replace the logs by updates that `waiting` returned; StoreError: they do not fit."""
        most = self.rule.log_size * self._num_peers
        if len(log) > most:
            name = f"stream {self.spec.name}: the checkpoint's reports"
            remedy = "raise the batch size or gear.prefetch to what they were"
            raise StoreError(name, f"must be at most {most}", len(log), remedy)
        # In the order of a selection.
        for peer, part in enumerate(np.array_split(log, self._num_peers)):
            self._log[peer, : len(part)] = part
            ends = self.ends[peer]
            ends[LogEnds.HEAD] = 0
            ends[LogEnds.NEXT] = 0
            ends[LogEnds.TAIL] = len(part)
        self.asked[:] = NEVER


def _refusing(priorities: torch.Tensor, call: Callable[..., T], *arguments: Any) -> T:
    """Make a native call, whose error is a DataError where a priority is the cause."""
    try:
        return call(*arguments)
    except (RuntimeError, ShapeError):
        check_priorities(priorities.numpy())
        raise


def check_priorities(priorities: np.ndarray) -> None:
    check_finite("priority", priorities, "nothing was changed")


def without_slots(log: np.ndarray, is_saved: np.ndarray, any_slot: np.ndarray) -> np.ndarray:
    """Return updates of which those of slots that are not saved go to `any_slot` as stale ones,
    which count for the highest priority, or are dropped where it is [0]. [n, 6], int64; [n], bool;
    [1] or [0].
    """
    kept = log.copy() if len(any_slot) else log[is_saved]
    if len(any_slot):
        kept[~is_saved, PriorityUpdate.SLOT] = any_slot
        kept[~is_saved, PriorityUpdate.GENERATION] = NOTHING
    return np.asarray(kept)
