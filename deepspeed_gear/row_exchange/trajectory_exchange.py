"""Trajectory exchange: sends rows and media of trajectories to the nodes whose packs read them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from deepspeed_gear.distributed.node_channel import NO_WORDS, message_of
from deepspeed_gear.errors import PeerError
from deepspeed_gear.ops.records import Resolution, RowSample
from deepspeed_gear.row_exchange.row_messages import RowExchange
from deepspeed_gear.row_exchange.trajectory_places import Moves
from deepspeed_gear.sampling.selection_rounds import StatusMessage
from deepspeed_gear.store.eviction import Evictor
from deepspeed_gear.timeouts import Context

NO_BATCH = -1  # minus the number of an exchange, in place of the number of a global batch


class TrajectoryExchange:
    """Sends trajectories' rows to the nodes that need them; fills the arrivals. The channel's
    thread.
    """

    def __init__(self, rows: RowExchange) -> None:
        self._rows = rows
        self._number = 0
        self._evictor: Evictor | None = None  # of a table whose media are exchanged
        media = rows.table.media
        #: Columns that are exchanged and name items.
        self._of_items = [] if media is None else [n for n in media.spec.names if n in rows.names]
        if self._of_items:
            self._evictor = Evictor(rows.table, Context(timeout_s=rows.table.lock.timeout_s))

    def send(self, moves: Moves) -> Callable[[], None]:
        """Exchange rows, and the media that they name; return the function that adds these to the
        store, whose errors are those of one node. Collective over the leaders. PeerError: another
        one does not exchange in this step; LostNodeError: none in time. After an error the channel
        is broken.
        """
        channel = self._rows.channel
        with channel.abandoned_on_error():
            self._number += 1
            # As the status of a selection, but the number is not that of a global batch.
            status = np.zeros(StatusMessage.NUM_WORDS, np.int64)
            status[StatusMessage.NUMBER] = NO_BATCH - self._number
            received = self._rows.send(
                status, [NO_WORDS] * channel.count, torch.from_numpy(moves.outgoing)
            )
            sent = [NO_BATCH - int(words[StatusMessage.NUMBER]) for words in received]
            # Another node selects, or has done more or fewer steps.
            if any(number != self._number for number in sent):
                rule = "must gather the packs of the same steps"
                numbers = {channel.name(node): number for node, number in enumerate(sent)}
                remedy = "all ranks must take the same steps in the same order"
                raise PeerError("the nodes", rule, numbers, remedy)
            count = len(moves.incoming)
            # In the order of `moves.incoming`.
            places = torch.empty(count, Resolution.NUM_WORDS, dtype=torch.int64)
            incoming = torch.from_numpy(moves.incoming)
            sizes = [len(status)] * channel.count
            # Media of the rollout batch before have no further readers.
            if moves.used == (0, 0) and self._rows.table.media is not None:
                self._rows.table.media.clear_arrivals()
            self._rows.fill(0, places, torch.arange(count), incoming, received, sizes, moves.used)
            return (
                (lambda: None)
                if self._evictor is None
                else self._fetch_media(places, moves.incoming)
            )

    def _fetch_media(self, places: torch.Tensor, incoming: np.ndarray) -> Callable[[], None]:
        """Fetch what rows from other nodes name and this node lacks; return the function that adds
        it.

        Two exchanges: numbers, asked of the node that a trajectory comes from, then their contents.
        """
        table = self._rows.table
        channel = self._rows.channel
        asked = dict[int, int]()
        assert table.media is not None
        assert self._evictor is not None
        first_row, first_slot = table.first_arrival
        begins = (places[:, Resolution.FIRST_ROW].numpy() - first_row).tolist()
        slots = (places[:, Resolution.SLOT].numpy() - first_slot).tolist()
        steps = incoming[:, RowSample.NUM_STEPS].tolist()
        for one in self._of_items:
            _, arrived, by_slot = table.media.numbers[one]
            for index, sender in enumerate(incoming[:, RowSample.PEER].tolist()):
                end = begins[index] + steps[index]
                at = slice(slots[index], slots[index] + 1) if by_slot else slice(begins[index], end)
                numbers = arrived[at]
                asked.update(dict.fromkeys(numbers[numbers != 0].tolist(), sender))
        named = list(asked)
        with table.lock:
            lacking = table.media.find(np.array(named, np.int64)) < 0
        wanted = [
            (asked[number], number) for number, lacks in zip(named, lacking, strict=True) if lacks
        ]
        every, node = channel.all_gather_ragged(np.array(wanted, np.int64).reshape(-1, 2))
        messages = []
        for to in range(channel.count):
            numbers = every[(node == to) & (every[:, 0] == channel.index), 1]
            contents = table.media.contents(numbers, table.lock).values()
            messages.append(message_of(table.media.spec.send(contents).view(np.int64)))
        received = channel.begin(messages)()
        name = f"table {table.spec.name}"
        received_items = [
            item
            for words in received
            for item in table.media.spec.received(name, words.view(np.uint8))
        ]
        # Copies: the words are those of the channel until its next exchange.
        items = {i.number: i._replace(content=i.content.copy()) for i in received_items}
        evictor = self._evictor
        given = items, np.array(named, np.int64), table.lock, evictor.release, evictor.pinned
        return partial(table.media.add, *given)
