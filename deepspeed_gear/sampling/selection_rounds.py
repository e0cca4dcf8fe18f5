"""Selection rounds: the messages in which nodes that select together share their totals and draws.

Each selection begins with a status message of every node, its failure included, so that all nodes
make the selection or none does. It has the totals of the node's store, from which every node
computes the same coordinates. Changes that follow from the messages of all nodes come after it;
then totals are sent again.

A store that selects alone is the case of one node: nothing is sent, and its own totals are those of
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Final, NoReturn

import numpy as np
import torch

from deepspeed_gear.data.statistics.running_moments import merge
from deepspeed_gear.distributed.node_channel import (
    NO_WORDS,
    LoneChannel,
    NodeChannel,
    message_of,
)
from deepspeed_gear.errors import PeerError, StoreError
from deepspeed_gear.ops.records import LogEntry, UpdateCount
from deepspeed_gear.outcome import Outcome
from deepspeed_gear.sampling.batch_admission import NodeRate
from deepspeed_gear.sampling.mass_rules import WindowEdge
from deepspeed_gear.sampling.stream_state import StreamState
from deepspeed_gear.store.prompt_spec import Progress

PACKED_REPORT_WORDS = 3
_NO_REPORTS = np.empty((0, LogEntry.NUM_WORDS), np.int64)
#: Longest wait of a node that ends until the others have received its last status.
MOST_LEAVE_S = 10.0


class StatusMessage:
    """The status message of a node, the first of a joint selection."""

    NUMBER: Final = 0
    STATUS: Final = 1  # 1: it has failed, and an error's text follows
    STOP: Final = 2
    WAITED_US: Final = 3
    WAITING: Final = 4
    TOTAL: Final = 5
    ITEMS: Final = 6
    LEAST: Final = 7
    HIGHEST: Final = 8
    NUM_WORDS: Final = 9


class SelectionRounds:
    """The rounds of messages by which the nodes of a stream make its selections together.

    `begin` and `apply` are collective over the node leaders. They take the table's lock themselves,
    and never hold it while they wait for other nodes. A store alone calls neither.

    Args:
        channel: Leads to the other nodes; None: this store selects alone.
    """

    def __init__(self, state: StreamState, channel: NodeChannel | None = None) -> None:
        self._state = state
        self._masses = state.masses
        self.is_alone = channel is None  # whether this store selects alone
        self.channel: NodeChannel | LoneChannel = LoneChannel() if channel is None else channel
        #: Whether each node holds a part of the items, rather than all of them.
        self.is_spread = state.spec.num_shards > 1
        self._statuses = np.zeros((self.channel.count, StatusMessage.NUM_WORDS), np.int64)
        #: Sum of the masses of each node that holds a part. [S], int64.
        self.totals = np.zeros(self.channel.count, np.int64)
        self._number: int | None = None  # global batch of the selection that is being made
        self.num_selections = 0  # made with other nodes
        self._lock = state.table.lock
        self._sends_moments = self.is_spread and state.numbers is not None
        self._has_window = state.spec.rule.window is not None
        has_later_changes = self._has_window or state.spec.sampler.walks
        #: Whether masses change by the statuses of all nodes, and so after these.
        self._applies_together = state.priorities is not None or has_later_changes
        self._is_first = True  # the window's edge is not known yet
        self._reports: list[np.ndarray] = []  # packed priority updates that each node has sent
        self._due: list[tuple[int, np.ndarray]] = []  # this node's, which the selection takes
        self._moments = np.empty((0, 0))  # of all nodes that hold a part
        #: How long the others have waited for each node. [S], float64, seconds.
        self.late_s = np.zeros(self.channel.count)

    @property
    def _nodes(self) -> NodeChannel:
        """The channel to the other nodes, of a store that does not select alone."""
        assert not isinstance(self.channel, LoneChannel)
        return self.channel

    # ---- state that is equal on all nodes --------------------------------------------------------

    @property
    def total(self) -> int:
        """Sum of all masses of all nodes."""
        return int(self.totals.sum()) if self.is_spread else self._masses.total

    @property
    def first_coordinates(self) -> np.ndarray:
        """First coordinate of each node: with totals [5, 0, 3] these are [0, 5, 5]. [S], int64."""
        return np.cumsum(self.totals) - self.totals

    @property
    def num_items(self) -> int:
        """Items with a mass, of a stream with priorities."""
        if self.is_spread:
            return int(self._statuses[:, StatusMessage.ITEMS].sum())
        return self._state.with_priorities.num_drawable

    @property
    def least(self) -> int:
        """The least mass of an item, of a stream with priorities that normalises by it."""
        if not self.is_spread:
            return self._state.with_priorities.least
        least = self._statuses[:, StatusMessage.LEAST]
        return int(least[least > 0].min())

    @property
    def moments(self) -> np.ndarray:
        """The running moments of all stores, as of the selection. [6, elements], float64."""
        return self._moments if self.is_spread else self._state.table.extents.moments

    # ---- a selection begins ----------------------------------------------------------------------

    def begin(self, number: int, count: int) -> bool:
        """Begin a selection with the other nodes. Returns whether the limiters of all admit it.

        Raises:
            NotReadyError: They do not, and a node waits no longer.
            StoreError, PeerError: The stream is closing; a node failed, ended, or asks for another
                batch.
        """
        self._number = number
        is_open = True
        error = None
        messages = [NO_WORDS] * self.channel.count
        try:
            messages = self._messages(number, count)
        except Exception as caught:
            error = caught
        received = self._status_round(messages, error)
        if self._state.joint_limiter is not None:
            received, is_open = self._rate_round(number, count, received)
            if not is_open and not self._state.spec.is_optional:
                return False
        if self._sends_moments:
            received = self._merge_moments(received)
        self._reports = received
        self.num_selections += 1
        return is_open

    def _messages(self, number: int, count: int) -> list[np.ndarray]:
        """Return what follows this node's status: the words of its limiter, its running moments,
        and the priority updates that are due, for each node.
        """
        reports = [NO_WORDS] * self.channel.count
        if self._state.priorities is not None:
            reports = self._packed_reports(number)
        heads = list[np.ndarray]()
        with self._lock:
            if not self._applies_together:
                self._masses.apply(number)
            # After the changes, so that it counts what can be drawn.
            limiter = self._state.joint_limiter
            if limiter is not None:
                ledger = self._state.table.ledger
                heads.append(limiter.rate(count) if ledger is None else limiter.progress())
            if self._sends_moments:
                heads.append(self._state.table.extents.moments.reshape(-1).view(np.int64))
        return [np.concatenate([*heads, part]) for part in reports] if heads else reports

    def _packed_reports(self, number: int) -> list[np.ndarray]:
        """Return this node's due priority updates, packed, for each node: those of its items, or
        all.
        """
        masses = self._state.with_priorities
        with self._lock:
            self._due = masses.reports.due(number)
            reports = np.concatenate([_NO_REPORTS, *(rows for _, rows in self._due)])
        packed = np.empty((len(reports), PACKED_REPORT_WORDS), np.int64)
        ends = np.empty(self._state.spec.num_shards, np.int64)
        tensors = [torch.from_numpy(words) for words in (packed, ends, reports)]
        masses.ops.encode_reports_(*tensors, number - masses.rule.lag)
        if not self.is_spread:
            return [packed.reshape(-1)] * self.channel.count
        return [packed[begin:end].reshape(-1) for begin, end in pairwise([0, *ends.tolist()])]

    def _rate_round(
        self, number: int, count: int, received: list[np.ndarray]
    ) -> tuple[list[np.ndarray], bool]:
        """Take the words of the nodes' limiters; return the rest, and whether they admit the
        samples.

        Raises:
            NotReadyError: They do not, and a node waits no longer.
        """
        limiter = self._state.joint_limiter
        ledger = self._state.table.ledger
        assert limiter is not None
        num_words = NodeRate.NUM_WORDS if ledger is None else Progress.NUM_WORDS
        rates = np.stack([words[:num_words] for words in received])
        rest = [words[num_words:] for words in received]
        if ledger is not None:
            # What can be drawn depends on the first open number of all stores. The next exchange
            # overwrites what was received.
            rest = [words.copy() for words in rest]
            with self._lock:
                ledger.take_progress(rates)
                rate = limiter.rate(count)
            rates = self.channel.all_gather(rate)
        with self._lock:
            is_open = limiter.apply(rates, count)
            error = None
            if limiter.was_empty or not (is_open or self._state.spec.is_optional):
                error = limiter.given_up(rates, number, count)
        if error is not None:
            raise error
        return rest, is_open

    def _merge_moments(self, received: list[np.ndarray]) -> list[np.ndarray]:
        """Take the running moments of the nodes, and merge them; return the rest of the words."""
        assert self._state.numbers is not None
        shape = self._state.numbers.shape[1:]
        size = prod(shape)
        self._moments = merge([words[:size].view(np.float64).reshape(shape) for words in received])
        return [words[size:] for words in received]

    # ---- changes of masses -----------------------------------------------------------------------

    def apply(self, number: int) -> None:
        """Apply the changes of masses that follow from the statuses of all nodes, and exchange the
        new totals; all others were applied before the statuses.
        """
        if self._has_changes:
            edge = self._window_edge() if self._has_window else None
            error = None
            try:
                with self._lock:
                    self._change_masses(number, edge)
            except Exception as caught:
                error = caught
            # The new totals of all nodes, or the failure of one that could not change its masses.
            statuses = self.channel.all_gather(self._status(error))
            self._raise_failure(statuses, error)
            self._statuses = statuses
            self.totals = statuses[:, StatusMessage.TOTAL].copy()
        self._is_first = False

    @property
    def _has_changes(self) -> bool:
        """Whether any node's masses change after the status of all nodes."""
        if self._state.priorities is not None or (self._has_window and self._is_first):
            return True
        return self._applies_together and bool(self._statuses[:, StatusMessage.WAITING].any())

    def _window_edge(self) -> WindowEdge:
        """Find the edge of the window of the newest items, over the items of all nodes."""
        window = self._state.spec.rule.window
        assert window is not None
        with self._lock:
            _, _, ids, counts, values = self._state.with_ages.contents()
        return window.edge(ids, counts, values, self.channel.all_gather)

    def _change_masses(self, number: int, edge: WindowEdge | None) -> None:
        """Change this store's masses after the status of all nodes. Requires the lock."""
        if self._state.priorities is not None:
            self._apply_reports(number)
            return
        if edge is not None:
            self._state.with_ages.queue_window(edge)
        self._masses.apply(number)

    def _apply_reports(self, number: int) -> None:
        """Apply the priority updates that all nodes have sent to this one. Requires the lock."""
        masses = self._state.with_priorities
        highest = int(masses.counts[UpdateCount.HIGHEST_PRIORITY])
        highest = max(highest, int(self._statuses[:, StatusMessage.HIGHEST].max()))
        masses.counts[UpdateCount.HIGHEST_PRIORITY] = highest
        packed = np.concatenate(self._reports).reshape(-1, PACKED_REPORT_WORDS)
        reports = np.empty((len(packed), LogEntry.NUM_WORDS), np.int64)
        latest = number - masses.rule.lag
        masses.ops.decode_reports_(torch.from_numpy(reports), torch.from_numpy(packed), latest)
        masses.apply_reports(number, [masses.known_reports(reports)] if len(reports) else [])
        if self._due:
            masses.reports.take(self._due)

    def restart(self) -> None:
        """Find the window's edge anew at the next selection: the table's content was replaced."""
        self._is_first = True

    def take_out(self, node: int, mass: int, least: np.ndarray) -> None:
        """Subtract an item that a node has taken out of its tree; `least`: the least mass of each
        now.
        """
        self._statuses[:, StatusMessage.LEAST] = least
        self._statuses[node, StatusMessage.ITEMS] -= 1
        self.totals[node] -= mass

    # ---- messages --------------------------------------------------------------------------------

    def leave(self) -> None:
        """Send that this node makes no further selection, unless another one has sent that."""
        if not self._nodes.left:
            self._number = None
            with self._nodes.parting(MOST_LEAVE_S):
                self._status_round([NO_WORDS] * self.channel.count, None, leaves=True)
        self._nodes.note_left(False)

    def _status_round(
        self, messages: Sequence[np.ndarray], error: Exception | None, leaves: bool = False
    ) -> list[np.ndarray]:
        """Send each node this one's status and a message; return the messages of all nodes.

        They are valid until the next exchange ends. `error`: why this node cannot make the
        selection; `leaves`: it makes no further one.
        """
        number = -1 if self._number is None else self._number
        words = self._status(error)
        words[StatusMessage.NUMBER] = number
        words[StatusMessage.STOP] = leaves or self._state.stop.is_set()
        received = self._nodes.begin([message_of(words, after) for after in messages])()
        statuses = np.stack([message[: StatusMessage.NUM_WORDS] for message in received])
        self._statuses = statuses
        # The node that has waited least was the last to arrive.
        waited_us = statuses[:, StatusMessage.WAITED_US]
        self.late_s += (waited_us.max() - waited_us) * 1e-6
        expected = number, False, False
        if (statuses[:, : StatusMessage.STOP + 1] != expected).any():
            self._raise_refusal(statuses, error)
        self.totals = statuses[:, StatusMessage.TOTAL].copy()
        return [message[StatusMessage.NUM_WORDS :] for message in received]

    def _status(self, error: Exception | None) -> np.ndarray:
        """Return the status of this node's store; failed with an error."""
        words = np.zeros(StatusMessage.NUM_WORDS, np.int64)
        words[StatusMessage.STATUS] = error is not None
        priorities = self._state.priorities
        with self._state.table.lock:
            words[StatusMessage.TOTAL] = self._masses.total
            words[StatusMessage.LEAST] = self.own_least
            if priorities is None:
                words[StatusMessage.WAITING] = self._masses.waiting
            else:
                words[StatusMessage.ITEMS] = priorities.num_drawable
                words[StatusMessage.HIGHEST] = priorities.counts[UpdateCount.HIGHEST_PRIORITY]
        words[StatusMessage.WAITED_US] = int(self.channel.last_wait_s * 1e6)
        return words

    @property
    def own_least(self) -> int:
        """The least mass in this node's store, where weights are normalised by it; else 0."""
        priorities = self._state.priorities
        if priorities is None or priorities.rule.normalize != "table":
            return 0
        return priorities.least

    def _raise_refusal(self, statuses: np.ndarray, error: Exception | None) -> NoReturn:
        """Raise the reason why a node does not make the selection that this one makes."""
        if statuses[:, StatusMessage.STOP].any():
            self._nodes.note_left()
            if self._state.stop.is_set() or self._number is None:
                name = f"stream {self._state.spec.name}"
                raise StoreError(name, "must be open", None, "it was closed while it waited")
            node = int(np.nonzero(statuses[:, StatusMessage.STOP])[0][0])
            self._nodes.raise_ended(node, f"it ended before global batch {self._number}")
        self._raise_failure(statuses, error)
        asked = {
            self._nodes.name(node): number
            for node, number in enumerate(statuses[:, StatusMessage.NUMBER].tolist())
        }
        rule = "must ask for the same global batch"
        remedy = "all ranks must take the same batches in the same order"
        raise PeerError(f"stream {self._state.spec.name}: the nodes", rule, asked, remedy)

    def _raise_failure(self, statuses: np.ndarray, error: Exception | None) -> None:
        """Raise if a node has failed: its own error there, an error with its text elsewhere."""
        own = None if error is None else Outcome.of(error)
        there = self._nodes.first_failure(statuses[:, StatusMessage.STATUS], own)
        if there is not None:
            raise there if error is None else error
