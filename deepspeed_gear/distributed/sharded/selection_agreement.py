"""Agreement of the nodes before each selection: all of them make it, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import numpy as np
import torch

from deepspeed_gear.distributed.node_channel import NO_WORDS, NodeChannel, message_of
from deepspeed_gear.errors import PeerError, StoreError
from deepspeed_gear.ops.records import LogEntry, UpdateCount
from deepspeed_gear.outcome import Outcome
from deepspeed_gear.sampling.priority_masses import PriorityMasses
from deepspeed_gear.sampling.selector import LocalSelector
from deepspeed_gear.sampling.stream_state import StreamState

OUTCOME_WORDS = 64
_WAITS = 64  # exchanges whose waits are added up at once
MOST_LEAVE_S = 10.0  # longest wait of a node that ends until the others have received its last status


class StatusMessage:
    """The status message of a node, the first of a joint selection."""

    KEY: Final = 0
    STATUS: Final = 1
    STOP: Final = 2
    WAITED_US: Final = 3
    WAITING: Final = 4
    TOTAL: Final = 5
    ITEMS: Final = 6
    LEAST: Final = 7
    HIGHEST: Final = 8
    NUM_WORDS: Final = 9
    FINE: Final = 0  # of StatusMessage.STATUS
    FAILED: Final = 1  # of StatusMessage.STATUS: an error's text follows


class SelectionAgreement(LocalSelector):
    """A selector whose selections begin with a status message of every node, failures included.

    Args:
        state: Of the stream, in this node's part of the table.
        channel: To the other nodes; shared by the streams of one thread.
    """

    def __init__(self, state: StreamState, channel: NodeChannel) -> None:
        super().__init__(state, state.table.lock)
        self.channel, self._table = channel, state.table
        self._num_nodes, self._index = channel.count, channel.index
        self._records = np.zeros((self._num_nodes, StatusMessage.NUM_WORDS), np.int64)
        self._totals = np.zeros(self._num_nodes, np.int64)
        self._waiting = False
        self._key: int | None = None  # of the selection that is being made
        self.num_selections = 0
        self._late_us = np.zeros(self._num_nodes, np.int64)  # wait of the others for each node
        self._waited_us = np.zeros((_WAITS, self._num_nodes), np.int64)  # not in `_late_us` yet
        self._num_waits = 0

    def _exchange_status(
        self,
        error: Exception | None,
        stop: bool,
        more: Sequence[np.ndarray] | None = None,
        limiter: np.ndarray = NO_WORDS,
    ) -> list[np.ndarray]:
        """Exchange status messages, with more words for each node after them.

        Args:
            error: Why this node cannot make the selection; None: it can.
            stop: Whether it makes no further one.
            more: Words for each node.
            limiter: State of the rate limiter, for all nodes.
        Returns:
            The words of each node after its status; valid until the next exchange ends.
        """
        record = self._record()
        words = np.concatenate([record, limiter]) if len(limiter) else record
        words[StatusMessage.KEY] = -1 if self._key is None else self._key
        words[StatusMessage.STATUS], words[StatusMessage.STOP] = (
            (StatusMessage.FINE if error is None else StatusMessage.FAILED),
            stop,
        )
        after = [NO_WORDS] * self._num_nodes if more is None else more
        messages = self.channel.begin([message_of(words, part.reshape(-1)) for part in after])()
        records = self._records = np.stack([part[: StatusMessage.NUM_WORDS] for part in messages])
        self._note_waits(records[:, StatusMessage.WAITED_US])
        if (
            records[:, : StatusMessage.STOP + 1] != (words[StatusMessage.KEY], StatusMessage.FINE, False)
        ).any():
            self._raise_refusal(records, error)
        self._waiting = bool(records[:, StatusMessage.WAITING].any())
        self._totals = records[:, StatusMessage.TOTAL].copy()
        return [part[StatusMessage.NUM_WORDS :] for part in messages]

    def _raise_refusal(self, records: np.ndarray, error: Exception | None) -> NoReturn:
        """Raise the reason why a node does not make the selection that this one makes."""
        if records[:, StatusMessage.STOP].any():
            self.channel.note_left()
            self._raise_stop(records)
        self._raise_failure(records, error)
        asked = {self.channel.name(i): key for i, key in enumerate(records[:, StatusMessage.KEY].tolist())}
        raise PeerError(
            f"stream {self.spec.name}: the nodes",
            "must ask for the same global batch",
            asked,
            "all ranks must take the same batches in the same order",
        )

    def leave(self) -> None:
        """Send the other nodes that this one makes no further selection, unless one of them has sent that."""
        if not self.channel.left:
            self._key = None
            with self.channel.parting(MOST_LEAVE_S):
                self._exchange_status(None, True)
        self.channel.note_left(False)

    def _record(self) -> np.ndarray:
        """Return the status of this node's shard."""
        words = np.zeros(StatusMessage.NUM_WORDS, np.int64)
        masses, priorities = self.masses, self.state.priorities
        with self._table.lock:
            words[StatusMessage.TOTAL] = masses.total
            if priorities is None:
                words[StatusMessage.WAITING] = masses.waiting
            else:
                words[StatusMessage.ITEMS] = priorities.num_drawable
                words[StatusMessage.HIGHEST] = priorities.counts[UpdateCount.HIGHEST_PRIORITY]
                if priorities.rule.normalize == "table":
                    words[StatusMessage.LEAST] = priorities.least
        words[StatusMessage.WAITED_US] = int(self.channel.last_wait_s * 1e6)
        return words

    def _note_waits(self, waited_us: np.ndarray) -> None:
        """Store how long each node has waited in the last exchange; `_add_waits` sums them later."""
        self._waited_us[self._num_waits] = waited_us
        self._num_waits += 1
        if self._num_waits == len(self._waited_us):
            self._add_waits()

    def _add_waits(self) -> None:
        """Sum the waits: the node that has waited least was the last to arrive."""
        waited_us = self._waited_us[: self._num_waits]
        self._late_us += (waited_us.max(1, keepdims=True) - waited_us).sum(0)
        self._num_waits = 0

    @property
    def late_s(self) -> np.ndarray:
        """How long the others have waited for each node. [S], float64, seconds."""
        self._add_waits()
        return self._late_us * 1e-6

    def _raise_stop(self, records: np.ndarray) -> None:
        if self.state.stop.is_set() or self._key is None:
            name = f"stream {self.spec.name}"
            raise StoreError(name, "must be open", None, "it was closed while it waited")
        node = int(np.nonzero(records[:, StatusMessage.STOP])[0][0])
        self.channel.raise_ended(node, f"it ended before global batch {self._key}")

    def _raise_failure(self, records: np.ndarray, error: Exception | None) -> None:
        """Raise if a node has failed: its own error there, an error with its text elsewhere."""
        if not records[:, StatusMessage.STATUS].any():
            return
        own = np.zeros(OUTCOME_WORDS, np.int64) if error is None else Outcome.of(error).words(OUTCOME_WORDS)
        every = self.channel.gather(own)
        if error is not None:
            raise error
        node = int(np.nonzero(records[:, StatusMessage.STATUS])[0][0])
        raise Outcome.read(every[node]).error(self.channel.name(node))

    def _apply_together(self, action: Callable[[], None]) -> None:
        """Change this node's masses, and exchange the new totals."""
        error: Exception | None = None
        try:
            with self._table.lock:
                action()
        except Exception as caught:
            error = caught
        words = self._record()
        words[StatusMessage.STATUS] = StatusMessage.FINE if error is None else StatusMessage.FAILED
        records = self.channel.gather(words)
        self._raise_failure(records, error)
        self._records, self._totals = records, records[:, StatusMessage.TOTAL].copy()


class ReplicatedSelector(SelectionAgreement):
    """Selects from a store that stays equal to those of all other nodes. One thread at a time.

    Args:
        state: Of the stream in this node's store, with priorities.
        channel: To the other nodes.
    """

    def __init__(self, state: StreamState, channel: NodeChannel) -> None:
        super().__init__(state, channel)
        self._here = LocalSelector(state)
        self._reports = np.empty((0, LogEntry.NUM_WORDS), np.int64)
        self._received: list[np.ndarray] = []  # reports of all nodes

    @property
    def _priorities(self) -> PriorityMasses:
        return self.state.with_priorities

    def begin(self, key: int, entry: int, count: int) -> bool:
        self._key = key
        error: Exception | None = None
        try:
            with self._table.lock:
                self._due = self._priorities.reports.due(key)
                self._reports = np.concatenate([self._reports[:0], *(rows for _, rows in self._due)])
        except Exception as caught:
            error = caught
        received = self._exchange_status(error, self.state.stop.is_set(), [self._reports] * self._num_nodes)
        self.num_selections += 1
        self._received = [words.reshape(-1, LogEntry.NUM_WORDS) for words in received]
        return True

    def apply(self, key: int) -> int:
        def change() -> None:
            self._priorities.apply_reports(key, [rows for rows in self._received if len(rows)])
            if self._due:
                self._priorities.reports.take(self._due)

        self._apply_together(change)
        return self.total

    def resolve(self, rows: torch.Tensor, done: int, coordinates: torch.Tensor, first: int) -> None:
        with self._table.lock:
            self._here.resolve(rows, done, coordinates, first)

    def finish(self, key: int, entry: int, count: int) -> int:
        with self._table.lock:
            return self._here.finish(key, entry, count)

    def highest(self, count: int) -> torch.Tensor:
        with self._table.lock:
            return self._here.highest(count)
