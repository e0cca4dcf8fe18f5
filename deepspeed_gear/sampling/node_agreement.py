"""Node agreement: what the nodes that select together tell each other before they draw.

Each selection begins with a status message of every node, its failure included, so that all nodes
make the selection or none does. It has the totals of the node's store, from which every node
computes the same coordinates. Changes that follow from the messages of all nodes come after it;
then totals are sent again.

A store that selects alone is the case of one node: nothing is sent, and its own totals are those of
all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NoReturn

import numpy as np

from deepspeed_gear.distributed.node_channel import (
    NO_WORDS,
    LoneChannel,
    NodeChannel,
    message_of,
)
from deepspeed_gear.errors import PeerError, StoreError
from deepspeed_gear.ops.records import UpdateCount
from deepspeed_gear.outcome import Outcome
from deepspeed_gear.sampling.stream_state import StreamState

#: Longest wait of a node that ends until the others have received its last status.
MOST_LEAVE_S = 10.0


class StatusMessage:
    """The status message of a node, the first of a joint selection."""

    KEY: Final = 0
    STATUS: Final = 1  # 1: it has failed, and an error's text follows
    STOP: Final = 2
    WAITED_US: Final = 3
    WAITING: Final = 4
    TOTAL: Final = 5
    ITEMS: Final = 6
    LEAST: Final = 7
    HIGHEST: Final = 8
    NUM_WORDS: Final = 9


class NodeAgreement:
    """The statuses of the nodes that make a stream's selections together, or of one store alone.

    It takes the table's lock itself, and never holds it while it waits for other nodes.

    Args:
        channel: Leads to the other nodes; None: this store selects alone.
    """

    def __init__(self, state: StreamState, channel: NodeChannel | None = None) -> None:
        self._state = state
        self._masses = state.masses
        self._others = channel
        self.channel: NodeChannel | LoneChannel = LoneChannel() if channel is None else channel
        #: Whether each node holds a part of the items, rather than all of them.
        self.is_spread = state.spec.num_shards > 1
        self._records = np.zeros((self.channel.count, StatusMessage.NUM_WORDS), np.int64)
        self._totals = np.zeros(self.channel.count, np.int64)
        self._number: int | None = None  # global batch of the selection that is being made
        #: How long the others have waited for each node. [S], float64, seconds.
        self.late_s = np.zeros(self.channel.count)

    # ---- what was agreed on ----------------------------------------------------------------------

    @property
    def total(self) -> int:
        """Sum of all masses of all nodes."""
        return int(self._totals.sum()) if self.is_spread else self._masses.total

    @property
    def totals(self) -> np.ndarray:
        """Sum of the masses of each node that holds a part. [S], int64."""
        return self._totals

    @property
    def first_coordinates(self) -> np.ndarray:
        """First coordinate of each node: with totals [5, 0, 3] these are [0, 5, 5]. [S], int64."""
        return np.cumsum(self._totals) - self._totals

    @property
    def has_changes(self) -> bool:
        """Whether changes of masses wait on any node."""
        return bool(self._records[:, StatusMessage.WAITING].any())

    @property
    def num_items(self) -> int:
        """Items with a mass, of a stream with priorities."""
        if self.is_spread:
            return int(self._records[:, StatusMessage.ITEMS].sum())
        return self._state.with_priorities.num_drawable

    @property
    def least(self) -> int:
        """The least mass of an item, of a stream with priorities that normalises by it."""
        if not self.is_spread:
            return self._state.with_priorities.least
        least = self._records[:, StatusMessage.LEAST]
        return int(least[least > 0].min())

    @property
    def highest_priority(self) -> int:
        """The highest priority that any node has applied, as float32 bits."""
        return int(self._records[:, StatusMessage.HIGHEST].max())

    # ---- messages --------------------------------------------------------------------------------

    def exchange_status(
        self,
        number: int,
        messages: Sequence[np.ndarray],
        error: Exception | None,
    ) -> list[np.ndarray]:
        """Begin a selection with the other nodes; return the words that each has sent after its
        status.

        The words are valid until the next exchange ends. `messages`: the words for each node, any
        number; `error`: why this node cannot make the selection.

        Raises:
            StoreError, PeerError: The stream is closing; a node failed, ended, or asks for another
            batch.
        """
        self._number = number
        return self._exchange(messages, error, leaves=False)

    def exchange_totals(self, error: Exception | None) -> None:
        """Exchange the totals after a change of masses; `error`: why this node could not change its
        own.
        """
        records = self.channel.gather(self._status(error))
        self._raise_failure(records, error)
        self._records = records
        self._totals = records[:, StatusMessage.TOTAL].copy()

    def take_out(self, node: int, mass: int, least: np.ndarray) -> None:
        """Subtract an item that a node has taken out of its tree; `least`: the least mass of each
        now.
        """
        self._records[:, StatusMessage.LEAST] = least
        self._records[node, StatusMessage.ITEMS] -= 1
        self._totals[node] -= mass

    def leave(self) -> None:
        """Send that this node makes no further selection, unless another one has sent that."""
        assert self._others is not None
        if not self._others.left:
            self._number = None
            with self._others.parting(MOST_LEAVE_S):
                self._exchange([NO_WORDS] * self._others.count, None, leaves=True)
        self._others.note_left(False)

    def _exchange(
        self, messages: Sequence[np.ndarray], error: Exception | None, leaves: bool
    ) -> list[np.ndarray]:
        assert self._others is not None
        number = -1 if self._number is None else self._number
        words = self._status(error)
        words[StatusMessage.KEY] = number
        words[StatusMessage.STOP] = leaves or self._state.stop.is_set()
        received = self._others.begin([message_of(words, after) for after in messages])()
        records = np.stack([message[: StatusMessage.NUM_WORDS] for message in received])
        self._records = records
        # The node that has waited least was the last to arrive.
        waited_us = records[:, StatusMessage.WAITED_US]
        self.late_s += (waited_us.max() - waited_us) * 1e-6
        agreed = number, False, False
        if (records[:, : StatusMessage.STOP + 1] != agreed).any():
            self._raise_refusal(records, error)
        self._totals = records[:, StatusMessage.TOTAL].copy()
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

    def _raise_refusal(self, records: np.ndarray, error: Exception | None) -> NoReturn:
        """Raise the reason why a node does not make the selection that this one makes."""
        assert self._others is not None
        if records[:, StatusMessage.STOP].any():
            self._others.note_left()
            if self._state.stop.is_set() or self._number is None:
                name = f"stream {self._state.spec.name}"
                raise StoreError(name, "must be open", None, "it was closed while it waited")
            node = int(np.nonzero(records[:, StatusMessage.STOP])[0][0])
            self._others.raise_ended(node, f"it ended before global batch {self._number}")
        self._raise_failure(records, error)
        asked = {
            self._others.name(node): number
            for node, number in enumerate(records[:, StatusMessage.KEY].tolist())
        }
        rule = "must ask for the same global batch"
        remedy = "all ranks must take the same batches in the same order"
        raise PeerError(f"stream {self._state.spec.name}: the nodes", rule, asked, remedy)

    def _raise_failure(self, records: np.ndarray, error: Exception | None) -> None:
        """Raise if a node has failed: its own error there, an error with its text elsewhere."""
        assert self._others is not None
        own = None if error is None else Outcome.of(error)
        there = self._others.first_failure(records[:, StatusMessage.STATUS], own)
        if there is not None:
            raise there if error is None else error
