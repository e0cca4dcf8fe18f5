"""Exchange of a selection's resolutions and rows: each node gets those that its ranks read."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.distributed.node_channel import NO_WORDS, NodeChannel
from deepspeed_gear.distributed.row_exchange.device_transport import DeviceTransport
from deepspeed_gear.distributed.row_exchange.exchange_plan import ExchangePlan
from deepspeed_gear.distributed.row_exchange.row_messages import WORD_BYTES, RowMessages
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution, RowSample
from deepspeed_gear.sampling.stream_state import StreamState

MOST_MASS = (1 << 62) - 1  # no mass is greater
HEAD_WORDS = 2  # of a message: its size, the smallest mass that its node has drawn
ROWS = 2  # a further word where rows are sent on their own: the number of their words
Goals = Callable[[int, torch.Tensor], torch.Tensor | None]


@dataclass
class NodeSelection:
    """The selection that is being made.

    Args:
        key, entry, count: Its number, its entry of the ring, its number of samples.
        offset: Of its first sample among those of all tables.
        wanted: Samples that this node's ranks need, ascending.
        needs_all: Whether every node gets the resolutions of all samples, as for a digest.
        asked: Samples whose resolutions this node gets: `wanted`, or all.
        owner: Node that holds each of these.
        first: Sample number of the first one.
        own: Samples that this node holds, as they were resolved.
    """

    key: int
    entry: int
    count: int
    offset: int
    wanted: np.ndarray
    needs_all: bool
    asked: np.ndarray
    owner: np.ndarray
    first: int = 0
    own: list[np.ndarray] = field(default_factory=list)
    records: list[torch.Tensor] = field(default_factory=list)

    def draw(self, first: int, own: np.ndarray, records: torch.Tensor, owner: np.ndarray, done: int) -> None:
        """Add draws to the selection, after the `done` ones in it.

        Args:
            first: Sample number of the first one.
            own: Those that this node holds. [n], int64.
            records: Their resolutions. [n, 8], int64.
            owner: Node that holds each. [count], int64.
            done: How many were drawn before.
        """
        self.first = first - done
        self.own.append(own + done if done else own)
        self.records.append(records)
        begin, end = np.searchsorted(self.asked, [done, done + len(owner)])
        self.owner[begin:end] = owner[self.asked[begin:end] - done]

    def place(self, first: int, owner: np.ndarray) -> None:
        """Set the first sample number, and the node that holds each sample. [count], int64."""
        self.first, self.owner = first, owner[self.asked]


class OwnSamples(NamedTuple):
    """The samples that this node has drawn from its own shard.

    Args:
        sample: Indices in the selection, ascending. [n], int64.
        records: Resolutions. [n, 8], int64.
        steps: Steps of their n-step returns, where windows follow them. [n], int64.
    """

    sample: torch.Tensor
    records: torch.Tensor
    steps: torch.Tensor | None


class ResolutionExchange:
    """Sends resolutions and rows to other nodes; fills this node's ring and arrivals. One thread at a time.

    Args:
        state: Of the stream, in this node's part of the table.
        channel: To the other nodes.
        plan: Which node needs which samples.
        row_messages: Encodes the rows that other nodes read, and decodes theirs.
        goals: Draws the achieved goals of samples.
        transport: Sends the rows, after the messages; None: the messages contain them.
    """

    def __init__(
        self,
        state: StreamState,
        channel: NodeChannel,
        plan: ExchangePlan,
        row_messages: RowMessages,
        goals: Goals,
        transport: DeviceTransport | None = None,
    ) -> None:
        self._state, self._channel, self._row_messages = state, channel, row_messages
        self._transport, self._rows = transport, [NO_WORDS] * plan.num_nodes
        self._head_size = HEAD_WORDS + (transport is not None)
        self._goals, self._index, self._num_nodes = goals, plan.index, plan.num_nodes
        self._ops, self._draws_goals = state.ops, any(need.goals for need in plan.needs)
        self._readers, self._need_of = (torch.from_numpy(part) for part in (plan.readers, plan.need_of))
        everyone = torch.arange(self._num_nodes)  # as if one replica were read by all
        self._everyone = everyone[None], torch.zeros(self._num_nodes, 1, dtype=torch.int16)
        self._words = 5 if row_messages.has_steps else 4  # of a packed resolution
        # Written word by word: after a batch that has emptied the caches, a NumPy call takes 10 us and more.
        words = np.zeros((3, self._num_nodes), np.int64)
        (self._heads, self._ends, found), (self._head_words, self._end_words, self._found_words) = (
            torch.from_numpy(words).unbind(),
            (row.data for row in words),
        )
        self._found = found[:1]
        self._samples = torch.empty(0, RowSample.NUM_WORDS, dtype=torch.int64)
        self._which = torch.empty(0, dtype=torch.int64)
        self.least_drawn = 0  # of the latest selection: the smallest mass that any node has drawn
        self.num_records = 0  # of the latest selection

    def fill(self, selection: NodeSelection, own: np.ndarray, records: torch.Tensor) -> np.ndarray:
        """Exchange a selection: write its resolutions to the ring, and its rows to the arrivals.

        Args:
            own: Samples that this node holds, ascending. [n], int64.
            records: Their resolutions. [n, 8], int64.
        Returns:
            These resolutions.
        """
        try:
            mine = OwnSamples(torch.from_numpy(own), records, self._row_messages.steps_of(records))
            received = self._channel.begin(self._pack(selection, mine))()
            rows = received
            if self._transport is not None:
                rows = self._transport.exchange(self._rows, self._sizes_of(received))
            self._receive(selection, mine, received, rows)
            self.num_records = selection.count
            return records.numpy()
        except Exception as error:
            self._channel.abandon(error)
            raise

    def restore(self, selection: NodeSelection, own: np.ndarray, records: torch.Tensor) -> None:
        """Exchange a selection of a checkpoint, as `fill` does a new one."""
        self.fill(selection, own, records)

    def _pack(self, selection: NodeSelection, mine: OwnSamples) -> list[np.ndarray]:
        """Return the message for each node: this one's smallest mass, resolutions, rows."""
        goals = self._goals(self._state.spec.key, mine.records) if self._draws_goals else None
        samples, parts = self._sent(mine, goals, self._readers, self._need_of, selection.offset)
        if selection.needs_all:
            parts = self._sent(mine, None, *self._everyone, 0)[1]
        parts[self._index] = NO_WORDS
        for node, part in enumerate(parts):
            self._head_words[node] = 0 if self._transport else WORD_BYTES * (HEAD_WORDS + part.size)
        messages = self._row_messages.encode(samples, self._heads)
        if self._transport is not None:
            self._rows = messages
            messages = [np.empty(self._head_size + part.size, np.int64) for part in parts]
            for message, rows in zip(messages, self._rows, strict=True):
                message[ROWS] = len(rows)
        masses = mine.records.numpy()[:, Resolution.MASS]
        self.least_drawn = int(np.minimum.reduce(masses)) if len(masses) else MOST_MASS
        for message, part in zip(messages, parts, strict=True):
            message[1] = self.least_drawn
            message[self._head_size : self._head_size + part.size] = part
        return messages

    def _sent(
        self,
        mine: OwnSamples,
        goals: torch.Tensor | None,
        readers: torch.Tensor,
        need_of: torch.Tensor,
        offset: int,
    ) -> tuple[torch.Tensor, list[np.ndarray]]:
        """Return the samples that other nodes need, and the words of their resolutions for each node."""
        most = len(mine.records) * readers.shape[1]
        samples = torch.empty(most, RowSample.NUM_WORDS, dtype=torch.int64)
        packed = np.empty((most, self._words), np.int64)
        found = samples, torch.from_numpy(packed), self._ends
        route = readers, need_of, offset, self._index, int(self._row_messages.takes_own)
        self._ops.encode_draws_(*found, mine.records, mine.sample, mine.steps, goals, *route)
        bounds, words = [0, *[end * self._words for end in self._end_words]], packed.reshape(-1)
        parts = [words[begin:end] for begin, end in itertools.pairwise(bounds)]
        return samples[: self._end_words[-1]], parts

    def _sizes_of(self, received: list[np.ndarray]) -> list[int]:
        """Return the number of words of the rows from each node."""
        sizes = [int(words[ROWS - 1]) for words in received]
        sizes[self._index] = len(self._rows[self._index])
        return sizes

    def _receive(
        self,
        selection: NodeSelection,
        mine: OwnSamples,
        received: list[np.ndarray],
        messages: list[np.ndarray],
    ) -> None:
        """Write the received resolutions to the ring, and the received rows to the arrivals."""
        self.least_drawn = min(self.least_drawn, *(int(words[0]) for words in received))
        counts: list[int] = np.bincount(selection.owner, minlength=self._num_nodes).tolist()
        counts[self._index] = 0
        for node, count in enumerate(counts):
            head = self._head_size - 1 + count * self._words
            self._head_words[node] = 0 if self._transport else WORD_BYTES * head
        words = [torch.from_numpy(message[self._head_size - 1 :]) for message in received]
        ring, which, samples = self._decode(selection, mine, words)
        self._row_messages.decode(selection.entry, ring, which, samples, self._heads, messages)

    def _decode(
        self, selection: NodeSelection, mine: OwnSamples, words: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fill the ring; return it, the indices of the samples whose rows come, and these as of the op."""
        assert self._state.origins is not None
        ring = self._state.ring[selection.entry][: selection.count]
        count = len(mine.records) + len(selection.asked)
        if count > len(self._which):
            self._samples = torch.empty(count, RowSample.NUM_WORDS, dtype=torch.int64)
            self._which = torch.empty(count, dtype=torch.int64)
        self._ops.decode_draws_(
            ring,
            self._state.origins[selection.entry],
            self._samples,
            self._which,
            self._found,
            words,
            mine.records,
            mine.sample,
            mine.steps,
            torch.from_numpy(selection.owner),
            torch.from_numpy(selection.asked),
            self._need_of,
            selection.first,
            selection.offset,
            self._index,
            int(self._row_messages.takes_own),
        )
        found = self._found_words[0]
        samples, which = self._samples[:found], self._which[:found]
        goals = self._goals(self._state.spec.key, ring[which]) if self._draws_goals else None
        if goals is not None:
            samples[:, RowSample.GOAL] = goals
        return ring, which, samples


NO_ROW = -1  # first row of a trajectory that another node holds: gathering it is an error


class RecordExchange:
    """Sends the records of this node's trajectories to all other nodes; fills this node's ring.

    One thread at a time. No rows are sent: `TrajectoryExchange` sends those of the packs of a step.

    Args:
        state: Of the stream, in this node's part of the table.
        channel: To the other nodes.
    """

    def __init__(self, state: StreamState, channel: NodeChannel) -> None:
        self._state, self._channel = state, channel
        self.least_drawn = MOST_MASS  # of the latest selection: the smallest mass
        self.num_records = 0  # of the latest selection

    def fill(self, selection: NodeSelection, own: np.ndarray, records: torch.Tensor) -> np.ndarray:
        """Exchange a selection: write the records of all its trajectories to the ring.

        Args:
            own: Items that this node holds, ascending. [n], int64.
            records: Their resolutions; of groups those of the leaders. [n, 8], int64.
        Returns:
            The records of this node's trajectories. [m, 8], int64.
        """
        state, words = self._state, records.numpy()
        if state.spec.by_group:
            try:
                with state.table.lock:
                    words, item = state.members(words)
            except Exception as error:  # the other nodes wait for the records
                self._channel.abandon(error)
                raise
            own = own[item]
        item = self._exchange(selection.entry, own, words)
        if state.spec.by_group:
            epochs = state.drawn[selection.entry][1]
            state.entries[selection.entry][1][: len(item)] = epochs[torch.from_numpy(item)]
        return words

    def restore(self, selection: NodeSelection, own: np.ndarray, records: torch.Tensor) -> None:
        """Exchange a selection of a checkpoint, as `fill`.

        Args:
            own: Its records that this node holds, ascending. [m], int64.
            records: They. [m, 8], int64.
        """
        self._exchange(selection.entry, own, records.numpy())

    def _exchange(self, entry: int, own: np.ndarray, words: np.ndarray) -> np.ndarray:
        """Write the records of all nodes to an entry of the ring.

        Args:
            own: Place of each of this node's records in the selection; those of one group share it.
                [m], int64.
            words: They. [m, 8], int64.
        Returns:
            The places of all records. [count], int64, ascending.
        """
        try:
            found = self._channel.gather_ragged(np.concatenate([own[:, None], words], axis=1))
        except Exception as error:
            self._channel.abandon(error)
            raise
        every, state = np.concatenate(found), self._state
        shard = np.repeat(np.arange(len(found)), [len(rows) for rows in found])
        order = np.argsort(every[:, 0], kind="stable")
        places, records, shard = every[order, 0], every[order, 1:], shard[order]
        masses = records[:, Resolution.MASS]
        self.least_drawn, self.num_records = int(masses.min(initial=MOST_MASS)), len(records)
        assert state.origins is not None
        origins = shard << SHARD_BITS | records[:, Resolution.SLOT]
        state.origins.numpy()[entry, : len(records)] = origins
        elsewhere = shard != self._channel.index
        records[elsewhere, Resolution.SLOT] = len(state.table.slots)
        records[elsewhere, Resolution.FIRST_ROW] = NO_ROW
        state.ring_words[entry, : len(records)] = records
        return np.asarray(places)
