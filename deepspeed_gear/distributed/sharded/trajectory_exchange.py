"""Exchange of whole trajectories between node leaders, for the packs of a step."""

from __future__ import annotations

import numpy as np
import torch

from deepspeed_gear.distributed.node_channel import NodeChannel, message_of
from deepspeed_gear.distributed.row_exchange.device_transport import DeviceTransport
from deepspeed_gear.distributed.row_exchange.row_messages import WORD_BYTES, RowMessages
from deepspeed_gear.distributed.row_exchange.trajectory_places import Moves
from deepspeed_gear.distributed.sharded.selection_agreement import StatusMessage
from deepspeed_gear.errors import PeerError
from deepspeed_gear.ops.records import Resolution

NO_BATCH = -1  # minus the number of an exchange, in place of the number of a global batch


class TrajectoryExchange:
    """Sends the rows of trajectories to the nodes that need them; fills this node's arrivals.

    One thread at a time, the one of the channel's other exchanges.

    Args:
        channel: To the other nodes.
        messages: Encodes and decodes the rows.
        transport: Sends the rows, after messages with their sizes; None: the channel does.
    """

    def __init__(
        self, channel: NodeChannel, messages: RowMessages, transport: DeviceTransport | None = None
    ) -> None:
        self._channel, self._messages, self._transport = channel, messages, transport
        self._number = 0

    def send(self, moves: Moves) -> None:
        """Exchange the rows of trajectories. Collective over the leaders of the nodes that hold the table.

        Args:
            moves: On every node those of one `TrajectoryPlaces`.
        Raises:
            PeerError: Another node does not exchange the rows of this step.
            LostNodeError: A node does not answer in time. After an error the channel cannot be used again.
        """
        try:
            self._number += 1
            received, head = self._exchanged(torch.from_numpy(moves.outgoing))
            incoming, count = torch.from_numpy(moves.incoming), len(moves.incoming)
            heads = torch.full((self._channel.count,), head)
            places = torch.empty(count, Resolution.NUM_WORDS, dtype=torch.int64)  # as `moves` has them
            which = torch.arange(count)
            self._messages.decode(0, places, which, incoming, heads, received, moves.used)
        except Exception as error:
            self._channel.abandon(error)
            raise

    def _exchanged(self, outgoing: torch.Tensor) -> tuple[list[np.ndarray], int]:
        """Return the words from each node, and the bytes before the rows in them."""
        channel, transport = self._channel, self._transport
        head = 0 if transport is not None else WORD_BYTES * (1 + StatusMessage.NUM_WORDS)
        rows = self._messages.encode(outgoing, torch.full((channel.count,), head))
        if transport is None:
            for message in rows:
                message[1 : 1 + StatusMessage.NUM_WORDS] = self._status()
            received = channel.begin(rows)()
            self._check(received)
            return received, WORD_BYTES * StatusMessage.NUM_WORDS
        status = self._status()
        found = channel.begin([message_of(status, np.array([len(words)])) for words in rows])()
        self._check(found)
        coming = [int(words[StatusMessage.NUM_WORDS]) for words in found]
        coming[channel.index] = len(rows[channel.index])
        return transport.exchange(rows, coming), 0

    def _status(self) -> np.ndarray:
        """Return a status message with the number of this exchange, which is no number of a global batch."""
        words = np.zeros(StatusMessage.NUM_WORDS, np.int64)
        words[StatusMessage.KEY] = NO_BATCH - self._number
        return words

    def _check(self, received: list[np.ndarray]) -> None:
        """Raise unless all nodes exchange rows, for equally many steps before.

        Raises:
            PeerError: One selects a batch, or has exchanged the rows of more or fewer steps.
        """
        found = [NO_BATCH - int(words[StatusMessage.KEY]) for words in received]
        if any(number != self._number for number in found):
            raise PeerError(
                "the nodes",
                "must gather the packs of the same steps",
                {self._channel.name(node): number for node, number in enumerate(found)},
                "all ranks must take the same steps in the same order",
            )
