"""Priorities that come back: each process reports into a log of its own, a selection takes all in one order.

A selection of global batch n sees exactly the reports that belong to batches before n - lag. A report belongs
to the batch that its process had last asked for, so a process's reports for a batch are complete when it asks
for a later one: no clock decides. Among those of one batch the order is that of the sample numbers, reports
by id come after them, and the last one wins.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from deepspeed_gear.errors import DataError, ShapeError, StoreError
from deepspeed_gear.ops.records import LogEntry, Resolution
from deepspeed_gear.sampling.selection_readers import SelectionReaders
from deepspeed_gear.sampling.stream_spec import StreamSpec
from deepspeed_gear.store.memory_layout import Region
from deepspeed_gear.store.table import Table

NEVER = -(1 << 62)  # asked for nothing yet


class LogEnds:
    """Ends of a process's log, counted up for ever."""

    HEAD: Final = 0
    TAIL: Final = 1
    NEXT: Final = 2  # the head after the selection
    TAKING: Final = 3  # of the first log: all heads move to LogEnds.NEXT
    NUM_WORDS: Final = 16


@dataclass
class AppendPromise:
    """Reports whose values a device has yet to compute: of which global batch, and how many."""

    batch: int
    count: int


class PriorityLog:
    """The logs of all processes.

    Process and thread safety: any thread may call `ask`, `add`, `promise` and `keep`, which take the table's
    lock themselves; the rest wants that lock.

    Args:
        spec: The stream, with priorities.
        table: Its table.
    """

    def __init__(self, spec: StreamSpec, table: Table) -> None:
        assert spec.priorities is not None
        self.spec, self.table, self.ops, self.rule = spec, table, table.ops, spec.priorities
        views, at = table.views, spec.at
        self._log: np.ndarray = views[at + "log"]
        self._log_words: memoryview = self._log.data
        self.ends: memoryview = views[at + "ends"].data
        self._ends: list[memoryview] = [ends.data for ends in views[at + "ends"]]
        self.asked: np.ndarray = views[at + "asked"]
        self._asked_words: memoryview = self.asked.data
        self._peer, self._num_peers = table.memory.peer, len(self.asked)
        self._my_log = torch.from_numpy(self._log[self._peer])
        self._peers = SelectionReaders(spec, table, self.asked, table.lock.timeout_s)
        self._promises: deque[AppendPromise] = deque()
        self._current = NEVER  # what this process has asked for, while promises are to be kept
        self._mutex = threading.Lock()

    @staticmethod
    def regions(spec: StreamSpec, num_peers: int) -> list[Region]:
        """Return what the reports of a stream keep in the store."""
        assert spec.priorities is not None
        return [
            Region(spec.at + "log", "int64", (num_peers, spec.priorities.log_size, LogEntry.NUM_WORDS)),
            Region(spec.at + "ends", "int64", (num_peers, LogEnds.NUM_WORDS)),
            Region(spec.at + "asked", "int64", (num_peers,)),
        ]

    def initialise(self) -> None:
        """Begin in new memory."""
        self.asked[:] = NEVER

    def ask(self, key: int) -> None:
        """Say that this process asks for a global batch: what it reports from now on belongs to that one.

        While reports of an older one are promised, the others hear of that one only: so they wait for these.
        """
        with self._mutex:
            self._current = key
            self._asked_words[self._peer] = self._promises[0].batch if self._promises else key

    def restart(self, key: int) -> None:
        """Forget what was asked for: a global batch is loaded at which to go on."""
        self.asked[:] = NEVER
        for peer in range(self._num_peers):
            waiting = (
                np.arange(self.ends[peer, LogEnds.HEAD], self.ends[peer, LogEnds.TAIL]) % self.rule.log_size
            )
            if (self._log[peer, waiting, LogEntry.BATCH] >= key).any():  # of batches that come again: due now
                self._log[peer, waiting, LogEntry.BATCH] = NEVER

    def give_up(self) -> None:
        """Take back what this process asked for: no selection can be made before its reports are due."""
        peer = self._peer
        with self._mutex, self.table.lock:
            waiting = (
                np.arange(self.ends[peer, LogEnds.HEAD], self.ends[peer, LogEnds.TAIL]) % self.rule.log_size
            )
            self._log[peer, waiting, LogEntry.BATCH] = NEVER
            for promise in self._promises:
                promise.batch = NEVER
            self._current = self._asked_words[peer] = NEVER

    def too_early(self, key: int) -> bool:
        """Whether this process itself has yet to ask for what a selection of this global batch needs."""
        return self.rule.lag > 0 and bool(self._asked_words[self._peer] < key - self.rule.lag)

    def late(self, key: int) -> list[int]:
        """Return the living processes whose reports are not complete for a global batch."""
        return self._peers.lagging(key - self.rule.lag)

    def wait_awake(self, key: int) -> None:
        """Wait for their reports without sleeping, but not for long."""
        self._peers.wait_awake(key - self.rule.lag)

    # ---- adding ----------------------------------------------------------------------------------

    def add_items(self, updates: np.ndarray, priorities: np.ndarray, order: np.ndarray | int) -> None:
        """Report priorities of any items; as `add`.

        Args:
            updates: Slot, generation and anchor of each item. [n, 3], int64.
            priorities: Finite, at least 0. [n], float32.
            order: Their sample numbers, or BY_ID. [n], int64.
        """
        samples = np.zeros((len(updates), Resolution.NUM_WORDS), np.int64)
        (
            samples[:, (Resolution.SLOT, Resolution.GENERATION, Resolution.ANCHOR)],
            samples[:, Resolution.SAMPLE_NUMBER],
        ) = updates, order
        self.add(torch.from_numpy(samples), torch.from_numpy(np.array(priorities, np.float32)))

    def add(self, samples: torch.Tensor, priorities: torch.Tensor) -> None:
        """Report priorities of what was drawn; a later selection applies them.

        Args:
            samples: Their resolutions. [n, 8], int64, contiguous.
            priorities: Finite, at least 0. [n], float32, contiguous.
        Raises:
            DataError: A priority is negative, infinite or NaN; nothing has changed.
            StoreError: More wait than the log holds; nothing has changed.
        """
        with self._mutex:
            assert not self._promises, "reports lie in the log in the order of their batches"
            self.check_room(priorities.numel())
            self._write(samples, priorities, self._asked_words[self._peer])

    def promise(self, count: int) -> None:
        """Say that priorities will be reported for what this process has asked for last.

        Raises:
            StoreError: More wait than the log holds; nothing has changed.
        """
        with self._mutex:
            self.check_room(count)
            batch = self._current if self._promises else self._asked_words[self._peer]
            self._current = batch
            self._promises.append(AppendPromise(batch, count))

    def keep(self, samples: torch.Tensor, priorities: torch.Tensor | None) -> None:
        """Report what was promised first; None: nothing comes of it. As `add`.

        Raises:
            DataError: A priority is negative, infinite or NaN; nothing is reported.
        """
        with self._mutex:
            promise = self._promises.popleft()
            try:
                if priorities is not None:
                    self._write(samples, priorities, promise.batch)
            finally:
                following = self._promises[0].batch if self._promises else self._current
                self._asked_words[self._peer] = following

    def _write(self, samples: torch.Tensor, priorities: torch.Tensor, batch: int) -> None:
        ends, count = self._ends[self._peer], priorities.numel()
        tail = ends[LogEnds.TAIL]
        try:
            self.ops.append_reports_(self._my_log, samples, priorities, tail, batch)
        except (RuntimeError, ShapeError):
            check_priorities(priorities.numpy())
            raise
        with (
            self.table.lock
        ):  # so that the process that makes the next selection sees the entries after the tail
            ends[LogEnds.TAIL] = tail + count

    def check_room(self, count: int) -> None:
        """Refuse more reports than the log holds.

        Raises:
            StoreError: There are more.
        """
        ends = self._ends[self._peer]
        waiting = ends[LogEnds.TAIL] - ends[LogEnds.HEAD] + sum(promise.count for promise in self._promises)
        if count > self.rule.log_size - waiting:
            raise StoreError(
                f"stream {self.spec.name}: priorities",
                f"must be at most {self.rule.log_size} between two global batches on a rank",
                f"{waiting} wait, {count} more",
                "report them in parts, with a sample() between the parts",
            )

    def check_size(self, count: int) -> None:
        """Refuse more reports of a checkpoint than all logs hold.

        Raises:
            StoreError: There are more.
        """
        if count > self.rule.log_size * self._num_peers:
            raise StoreError(
                f"stream {self.spec.name}: the checkpoint's reports",
                f"must be at most {self.rule.log_size * self._num_peers}",
                count,
                "raise the batch size or gear.prefetch to what they were",
            )

    # ---- taking ----------------------------------------------------------------------------------

    def due(self, key: int) -> list[tuple[int, np.ndarray]]:
        """Return the reports of each process that a selection of a global batch applies."""
        batch, size, due = key - self.rule.lag, self.rule.log_size, []
        for peer, ends in enumerate(self._ends):
            head, tail = ends[LogEnds.HEAD], ends[LogEnds.TAIL]
            if head == tail:
                continue
            entries = self._entries(peer, head, tail)
            if self._log_words[peer, (tail - 1) % size, LogEntry.BATCH] >= batch:
                entries = entries[: np.searchsorted(entries[:, LogEntry.BATCH], batch)]
            if len(entries):
                due.append((peer, entries))
        return due

    def _entries(self, peer: int, head: int, tail: int) -> np.ndarray:
        size = self.rule.log_size
        first, end = head % size, head % size + tail - head
        log = self._log[peer]
        return log[first:end] if end <= size else np.concatenate([log[first:], log[: end - size]])

    def take(self, due: list[tuple[int, np.ndarray]]) -> None:
        """Take applied reports out of all logs, or out of none: some alone, applied again, would win."""
        first = self._ends[0]
        for peer, entries in due:
            ends = self._ends[peer]
            ends[LogEnds.NEXT] = ends[LogEnds.HEAD] + len(entries)
        first[LogEnds.TAKING] = 1  # the commit point
        for peer, _ in due:
            ends = self._ends[peer]
            ends[LogEnds.HEAD] = ends[LogEnds.NEXT]
        first[LogEnds.TAKING] = 0

    def recover(self) -> None:
        """Make the heads whole after a process died while they moved."""
        wanted, other = (
            (LogEnds.HEAD, LogEnds.NEXT) if self.ends[0, LogEnds.TAKING] else (LogEnds.NEXT, LogEnds.HEAD)
        )
        for peer in range(self._num_peers):
            self.ends[peer, wanted] = self.ends[peer, other]
        self.ends[0, LogEnds.TAKING] = 0

    # ---- content ---------------------------------------------------------------------------------

    def waiting(self) -> np.ndarray:
        """Return all reports that wait, in their order. [n, 6], int64."""
        ends = [
            (peer, self.ends[peer, LogEnds.HEAD], self.ends[peer, LogEnds.TAIL])
            for peer in range(self._num_peers)
        ]
        return _sorted(np.concatenate([self._entries(*of_peer) for of_peer in ends]))

    def restore(self, log: np.ndarray) -> None:
        """Take up what `waiting` has returned; everything else is gone."""
        for peer, part in enumerate(np.array_split(log, self._num_peers)):  # in the order of a selection
            self._log[peer, : len(part)] = part
            self.ends[peer, LogEnds.HEAD] = self.ends[peer, LogEnds.NEXT] = 0
            self.ends[peer, LogEnds.TAIL] = len(part)
        self.asked[:] = NEVER


def check_priorities(priorities: np.ndarray) -> None:
    """Refuse what is no priority.

    Raises:
        DataError: One is negative, infinite or NaN.
    """
    if len(priorities) == 0 or (priorities.min() >= 0 and priorities.max() < np.inf):  # a NaN is neither
        return
    with np.errstate(invalid="ignore"):
        at = int(np.nonzero(~((priorities >= 0) & (priorities < np.inf)))[0][0])
    raise DataError(
        f"priority {at}", "must be finite and at least 0", float(priorities[at]), "nothing was changed"
    )


def _sorted(entries: np.ndarray) -> np.ndarray:
    return entries[np.lexsort((entries[:, LogEntry.SAMPLE_NUMBER], entries[:, LogEntry.BATCH]))]
