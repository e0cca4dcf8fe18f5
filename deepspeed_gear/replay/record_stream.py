"""Record stream: the selected trajectories of one rank's rollout batches, one batch after the other.

`SelectionQueue` divides selections into batches. One whose size is in items takes a selection. One whose size
is in tokens takes the items that fit, from the rest of a selection and the next one: what is left begins the
next batch, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.checkpoint import position
from deepspeed_gear.config.pack_options import RolloutConfig, room
from deepspeed_gear.errors import EmptyTableError, NotReadyError, StoreError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.rollout_data import item_numbers
from deepspeed_gear.replay.rollout_session import RolloutSession
from deepspeed_gear.sampling.batch_stream import BatchStream
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.records import Head


class Records(NamedTuple):
    """Trajectories of one table.

    Args:
        resolutions: [n, 8], int64, contiguous.
        weights: Their PER weights. [n], float32.
        origins: shard << 32 | slot of each; None: each node holds all of the table. [n], int64.
    """

    resolutions: torch.Tensor
    weights: torch.Tensor
    origins: torch.Tensor | None = None

    def chosen(self, own: torch.Tensor) -> Records:
        """Return some of them. Mask of [n], bool."""
        origins = None if self.origins is None else self.origins[own]
        return Records(self.resolutions[own].contiguous(), self.weights[own], origins)

    def then(self, other: Records) -> Records:
        """Return these and others after them."""
        origins = None
        if self.origins is not None and other.origins is not None:
            origins = torch.cat([self.origins, other.origins])
        resolutions = torch.cat([self.resolutions, other.resolutions])
        return Records(resolutions, torch.cat([self.weights, other.weights]), origins)


class SelectedItems:
    """The items of one selection. Those of several tables take turns, in proportion to their numbers.

    Args:
        key: Number of the selection.
        heads: Its head in each table.
        parts: Its trajectories in each table; those of one item are neighbours.
        longest: Most steps of a trajectory that are trained.
    """

    def __init__(self, key: int, heads: list[list[int]], parts: list[Records], longest: int) -> None:
        self.key, self.heads, self.parts = key, heads, parts
        items = [item_numbers(part.resolutions[:, Resolution.SAMPLE_NUMBER].numpy()) for part in parts]
        counts = [int(item[-1]) + 1 if len(item) else 0 for item in items]
        turns = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
        place = np.empty(len(turns), np.int64)
        place[np.argsort(turns, kind="stable")] = np.arange(len(turns))
        tables = np.split(place, np.cumsum(counts)[:-1])
        #: Place in the order of the item of each trajectory, by table.
        self._places = [of_table[item] for of_table, item in zip(tables, items, strict=True)]
        #: Steps of each item, in the order.
        self.steps = np.zeros(len(turns), np.int64)
        for at, part in zip(self._places, parts, strict=True):
            steps = part.resolutions[:, Resolution.NUM_STEPS].numpy()
            np.add.at(self.steps, at, steps.clip(max=longest))

    def __len__(self) -> int:
        return len(self.steps)

    def trajectories(self, first: int, end: int) -> list[Records]:
        """Return the trajectories of a range of items, by table."""
        if end - first == len(self):
            return self.parts
        chosen = [torch.from_numpy((at >= first) & (at < end)) for at in self._places]
        return [part.chosen(own) for own, part in zip(chosen, self.parts, strict=True)]


class SelectionQueue:
    """Divides the stream of selected items into batches. Equal on every rank.

    Args:
        num_items: Items of a selection, and most items of a batch.
        tokens: Most steps of a batch; None: a batch is a selection.
        first_item: Items of the first selection that batches have consumed.
    """

    def __init__(self, num_items: int, tokens: int | None, first_item: int = 0) -> None:
        self._num_items, self._tokens, self.first_item = num_items, tokens, first_item
        self._held: list[SelectedItems] = []  # from the first one with an item that is not consumed
        self._num_taken = 0  # items of the batch that was taken last, until it is consumed

    @property
    def holds_batch(self) -> bool:
        """Whether the next batch needs no further selection."""
        return self._next_items()[1]

    def take(self, select: Callable[[], SelectedItems]) -> list[Records]:
        """Take the items of the next batch, and return their trajectories, by table.

        An item of more steps than a batch may have is a batch of its own.

        Args:
            select: Returns the next selection; nothing is taken where it raises.
        """
        while not self.holds_batch:
            self._held.append(select())
        first, left = self.first_item, self._next_items()[0]
        self._num_taken, found = left, []
        for items in self._held:
            end = min(first + left, len(items))
            found.append(items.trajectories(first, end))
            first, left = 0, left - (end - first)
            if not left:
                break
        return [reduce(Records.then, of_table) for of_table in zip(*found, strict=True)]

    def consume(self) -> SelectedItems | None:
        """Consume the items that were taken; return the last selection of which none is left, if one ends."""
        self.first_item, self._num_taken, ended = self.first_item + self._num_taken, 0, None
        while self._held and self.first_item >= len(self._held[0]):
            ended = self._held.pop(0)
            self.first_item -= len(ended)
        return ended

    def _next_items(self) -> tuple[int, bool]:
        """Return how many items of those at hand are the next batch's, and whether it is complete."""
        if not self._held:
            return 0, False
        if self._tokens is None:
            return len(self._held[0]), True
        steps = np.concatenate([items.steps for items in self._held])[self.first_item :]
        ends = np.cumsum(steps[: self._num_items])
        count = int(np.searchsorted(ends, self._tokens, side="right"))
        if count == 0 and len(ends):
            return 1, True
        is_full = count == self._num_items or count < len(ends) or (count and int(ends[-1]) == self._tokens)
        return count, bool(is_full)


class RecordStream:
    """What rollout batches take from the selections of all tables; the same on every rank.

    Args:
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
