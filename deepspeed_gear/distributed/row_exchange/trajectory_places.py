"""Places of a rollout batch's trajectories: which nodes have the rows of which, and which move for a step.
Pure: every rank computes the same from records and packing plan, so no message says who sends what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from deepspeed_gear.context import Context
from deepspeed_gear.distributed.node_channel import NO_WORDS, message_of
from deepspeed_gear.distributed.row_exchange.row_messages import RowExchange
from deepspeed_gear.distributed.sharded_selection import StatusMessage
from deepspeed_gear.errors import PeerError
from deepspeed_gear.ops.constants import SHARD_BITS
from deepspeed_gear.ops.records import Resolution, RowSample
from deepspeed_gear.store.eviction import Evictor

_SLOT = (1 << SHARD_BITS) - 1


@dataclass(frozen=True)
class Moves:
    """Trajectories whose rows move, and where they lie then."""

    outgoing: np.ndarray  # those that this node sends, by receiver: `RowSample`. [n, 7], int64
    incoming: np.ndarray  # those that it receives, by sender: `RowSample`. [m, 7], int64
    used: tuple[int, int]  # rows and slots of the arrivals that were used before
    samples: np.ndarray  # of the batch, those whose rows come. [k], int64
    first_row: np.ndarray  # of each of these, from the beginning of the stream's arrivals. [k], int64
    slot: np.ndarray  # as `first_row`
    has: np.ndarray  # which nodes have the rows of which trajectories afterwards. [S, trajectories], bool
    end: tuple[int, int]  # rows and slots of the arrivals that are used afterwards


class TrajectoryPlaces:
    """The nodes that have the rows of each trajectory of a rollout batch, of one table. `origins` of samples,
    shard << 32 | slot, may repeat, [n], int64; `copies_own`: a node's own rows must be copied, too.
    """

    def __init__(
        self,
        origins: np.ndarray,
        num_steps: np.ndarray,
        final_row: int,
        num_nodes: int,
        index: int,
        copies_own: bool,
    ) -> None:
        known, number = np.unique(origins, return_inverse=True)
        self._number = number.reshape(-1)  # of each sample's trajectory, by shard and slot
        self._owner, self._slots = known >> SHARD_BITS, known & _SLOT
        # Of a trajectory that grows, a later sample has more steps; the rows before them are the same.
        self._steps = np.zeros(len(known), np.int64)
        np.maximum.at(self._steps, self._number, num_steps)
        self._final_row, self._index = final_row, index
        self._has = np.zeros((num_nodes, len(known)), bool)
        if not copies_own:
            self._has[self._owner, np.arange(len(known))] = True
        self._used = 0, 0

    def move(self, needed: np.ndarray) -> Moves | None:
        """Return the `needed` rows, [S, n], that a node lacks, or None; `moved` records the move."""
        wanted = np.zeros_like(self._has)
        for node, samples in enumerate(needed):
            wanted[node, self._number[samples]] = True
        wanted &= ~self._has
        if not wanted.any():
            return None
        to, sent = np.nonzero(wanted & (self._owner == self._index))
        coming = np.nonzero(wanted[self._index])[0]
        rows, (row, slot) = self._steps[coming] + self._final_row, self._used
        begin = np.cumsum(rows) - rows
        at = np.full(self._has.shape[1], -1)
        at[coming] = np.arange(len(coming))
        at = at[self._number]
        samples = np.nonzero(at >= 0)[0]
        at = at[samples]
        return Moves(
            self._samples(to, sent),
            self._samples(self._owner[coming], coming),
            self._used,
            samples,
            row + begin[at],
            slot + at,
            self._has | wanted,
            (row + int(rows.sum()), slot + len(coming)),
        )

    def moved(self, moves: Moves) -> None:
        """Record that rows have moved: those of the latest `move`."""
        self._has, self._used = moves.has, moves.end

    def _samples(self, peer: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Return the words of trajectories that are sent to, or come from, nodes. [n], [n] -> [n, 7]."""
        words = np.zeros((len(which), RowSample.NUM_WORDS), np.int64)
        words[:, RowSample.PEER], words[:, RowSample.SLOT] = peer, self._slots[which]
        words[:, RowSample.NUM_STEPS], words[:, RowSample.GOAL] = self._steps[which], -1
        return words


NO_BATCH = -1  # minus the number of an exchange, in place of the number of a global batch


class TrajectoryExchange:
    """Sends trajectories' rows to the nodes that need them; fills the arrivals. The channel's thread."""

    def __init__(self, rows: RowExchange) -> None:
        self._rows, self._number = rows, 0
        self._evictor: Evictor | None = None  # of a table whose media are exchanged
        if (media := rows.table.media) is not None and media.spec.column in rows.names:
            self._evictor = Evictor(rows.table, Context(timeout_s=rows.table.lock.timeout_s))

    def send(self, moves: Moves) -> Callable[[], None]:
        """Exchange rows, and the media that they name; return the function that adds these to the store,
        whose errors are those of one node. Collective over the leaders. PeerError: another one does not
        exchange in this step; LostNodeError: none in time. After an error the channel is broken.
        """
        channel = self._rows.channel
        with channel.abandoned_on_error():
            self._number += 1
            # As the status of a selection, whose key is no number of a global batch.
            status = np.zeros(StatusMessage.NUM_WORDS, np.int64)
            status[StatusMessage.KEY] = NO_BATCH - self._number
            received = self._rows.send(status, [NO_WORDS] * channel.count, torch.from_numpy(moves.outgoing))
            found = [NO_BATCH - int(words[StatusMessage.KEY]) for words in received]
            if any(number != self._number for number in found):  # it selects, or has done more or fewer steps
                rule = "must gather the packs of the same steps"
                numbers = {channel.name(node): number for node, number in enumerate(found)}
                remedy = "all ranks must take the same steps in the same order"
                raise PeerError("the nodes", rule, numbers, remedy)
            count = len(moves.incoming)
            places = torch.empty(count, Resolution.NUM_WORDS, dtype=torch.int64)  # as `moves` has them
            incoming, sizes = torch.from_numpy(moves.incoming), [len(status)] * channel.count
            if moves.used == (0, 0) and self._rows.table.media is not None:  # of the rollout batch before
                self._rows.table.media.arrivals[:] = 0
            self._rows.fill(0, places, torch.arange(count), incoming, received, sizes, moves.used)
            return (lambda: None) if self._evictor is None else self._fetch_media(places, moves.incoming)

    def _fetch_media(self, places: torch.Tensor, incoming: np.ndarray) -> Callable[[], None]:
        """Fetch what rows from other nodes name and this node lacks; return the function that adds it.

        Two exchanges: numbers, asked of the node that a trajectory comes from, then their contents.
        """
        table, channel, asked = self._rows.table, self._rows.channel, dict[int, int]()
        assert table.media is not None
        assert self._evictor is not None
        rows, first = table.media.arrivals, table.first_arrival[0]
        begins = places[:, Resolution.FIRST_ROW].numpy() - first
        for sender, begin, steps in zip(
            incoming[:, RowSample.PEER].tolist(), begins, incoming[:, RowSample.NUM_STEPS], strict=True
        ):
            numbers = rows[begin : begin + steps]
            asked.update(dict.fromkeys(numbers[numbers != 0].tolist(), sender))
        named = list(asked)
        with table.lock:
            lacking = table.media.find(np.array(named, np.int64)) < 0
        wanted = [(asked[number], number) for number, lacks in zip(named, lacking, strict=True) if lacks]
        every, node = channel.gather_ragged(np.array(wanted, np.int64).reshape(-1, 2))
        messages = []
        for to in range(channel.count):
            numbers = every[(node == to) & (every[:, 0] == channel.index), 1]
            contents = table.media.contents(numbers, table.lock).values()
            messages.append(message_of(table.media.spec.send(contents).view(np.int64)))
        received = channel.begin(messages)()
        name = f"table {table.spec.name}"
        found = [item for words in received for item in table.media.spec.received(name, words.view(np.uint8))]
        # Copies: the words are those of the channel until its next exchange.
        items, evictor = {i.number: i._replace(content=i.content.copy()) for i in found}, self._evictor
        given = items, np.array(named, np.int64), table.lock, evictor.release, evictor.pinned
        return partial(table.media.add, *given)
