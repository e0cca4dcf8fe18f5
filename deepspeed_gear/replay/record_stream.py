"""Record stream: the selected trajectories of one rank's rollout batches, one batch after the other."""

from __future__ import annotations

import torch

from deepspeed_gear.checkpoint import position
from deepspeed_gear.config.pack_options import RolloutConfig, room
from deepspeed_gear.errors import EmptyTableError, NotReadyError, StoreError
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.rollout_session import RolloutSession
from deepspeed_gear.replay.selection_queue import Records, SelectedItems, SelectionQueue
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.stream_records import Head


class RecordStream:
    """What rollout batches take from the selections of all tables; the same on every rank.

    Args:
        parts: Of the replay.
        session: Of its ranks.
        size: Of a rollout batch.
    """

    def __init__(self, parts: ReplayParts, session: RolloutSession, size: RolloutConfig) -> None:
        config = parts.plan.config
        assert config.pack is not None
        self._tables, self._streams, self._longest = config.sampled_tables, parts.train, room(config.pack)
        self._session, self._size = session, size
        self.epoch = 0  # of the latest selection
        self.seek(position.start(self._tables), 0, 0)

    def seek(self, at: position.Position, number: int, first_item: int) -> None:
        """Continue at a position to which the streams are already set.

        Args:
            at: The position.
            number: Of the next rollout batch.
            first_item: Items of the next selection that batches have consumed.
        """
        self.where = at  # after the last selection of which no item is left
        self.next_key, self.number = position.batches(at), number
        self._queue = SelectionQueue(self._size.size, self._size.tokens, first_item)

    @property
    def first_item(self) -> int:
        """Items of the next selection that batches have consumed."""
        return self._queue.first_item

    @property
    def holds_batch(self) -> bool:
        """Whether the next rollout batch needs no further selection."""
        return self._queue.holds_batch

    def take(self) -> list[Records]:
        """Return the trajectories of the next rollout batch, by table. Collective.

        Raises:
            PeerError, StoreError, NotReadyError: As `Replay.rollout`; nothing is taken.
        """
        return self._queue.take(self._select)

    def consume(self) -> None:
        """Consume the rollout batch that was taken: rows of which no batch has an item may be evicted."""
        self.number += 1
        ended = self._queue.consume()
        if ended is not None:
            self.where = position.after(self._tables, ended.heads)
            for stream in self._streams:
                stream.release(ended.key)

    def _select(self) -> SelectedItems:
        """Make or read the next selection of every table."""
        key = self.next_key
        found: list[Selection] = []

        def select() -> None:
            for stream in self._streams:
                stream.request(key)
            found[:] = [stream.get(key) for stream in self._streams]

        try:
            self._session.agree(select)
        except StoreError as error:
            if not isinstance(error, NotReadyError) or isinstance(error, EmptyTableError):
                for stream in self._streams:  # so that new priorities can correct the old ones
                    stream.give_up()
            raise
        self.next_key += 1
        heads = [selection.head for selection in found]
        self.epoch = heads[0][Head.EPOCH]
        parts = [_read(stream, one) for stream, one in zip(self._streams, found, strict=True)]
        return SelectedItems(key, heads, parts, self._longest)


def _read(stream: BatchStream, selection: Selection) -> Records:
    """Return copies of the records of a selection, and their PER weights."""
    count, origins = selection.head[Head.COUNT], selection.origins
    records: torch.Tensor = selection.resolutions[:count].clone()
    weights = stream.weights(selection.head, records)
    return Records(records, weights, None if origins is None else origins[:count].clone())
