"""Record stream: the selected trajectories of one rank's rollout batches, one batch after the other.

A batch whose size is in items is a selection. One whose size is in tokens has the items that fit, from the
rest of a selection and the next one: what is left begins the next batch, so nothing is lost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from deepspeed_gear.checkpoint import position
from deepspeed_gear.config.pack_options import RolloutConfig, room
from deepspeed_gear.errors import StoreError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.batch_loader import give_up
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.rollout_data import RolloutSession, item_numbers
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.records import Head


class Records(NamedTuple):
    """Trajectories of one table.

    Args:
        resolutions: Of at most as many steps as a pack has room for. [n, 8], int64, contiguous.
        weights: Their PER weights. [n], float32.
        origins: shard << 32 | slot of each; the slot, where each node holds all of the table. [n], int64.
    """

    resolutions: torch.Tensor
    weights: torch.Tensor
    origins: torch.Tensor


class SelectedItems:
    """The items of one selection. Those of several tables take turns, in proportion to their numbers.

    Args:
        key: Number of the selection.
        heads: Its head in each table.
        parts: Its trajectories in each table; those of one item are neighbours.
    """

    def __init__(self, key: int, heads: list[list[int]], parts: list[Records]) -> None:
        self.key, self.heads, self.parts = key, heads, parts
        items = [item_numbers(part.resolutions[:, Resolution.SAMPLE_NUMBER].numpy()) for part in parts]
        counts = [int(item[-1]) + 1 if len(item) else 0 for item in items]
        # For counts [2, 3] turns is [1/4, 3/4, 1/6, 3/6, 5/6], and place [1, 3, 0, 2, 4].
        turns = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for count in counts])
        place = np.empty(len(turns), np.int64)
        place[np.argsort(turns, kind="stable")] = np.arange(len(turns))
        tables = np.split(place, np.cumsum(counts)[:-1])
        #: Place in the order of the item of each trajectory, by table.
        self._places = [of_table[item] for of_table, item in zip(tables, items, strict=True)]
        #: Steps of each item, in the order.
        self.steps = np.zeros(len(turns), np.int64)
        for at, part in zip(self._places, parts, strict=True):
            np.add.at(self.steps, at, part.resolutions[:, Resolution.NUM_STEPS].numpy())

    def __len__(self) -> int:
        return len(self.steps)

    def trajectories(self, first: int, end: int) -> list[Records]:
        """Return the trajectories of a range of items, by table."""
        if end - first == len(self):
            return self.parts
        chosen = [torch.from_numpy((at >= first) & (at < end)) for at in self._places]
        return [
            Records(*(column[own] for column in part)) for own, part in zip(chosen, self.parts, strict=True)
        ]


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
        """Continue at a position to which the streams are already set; `number` of the next rollout batch."""
        self.where = at  # after the last selection of which no item is left
        self.next_key, self.number, self.first_item = position.batches(at), number, first_item
        self._held: list[SelectedItems] = []  # from the first one with an item that is not consumed
        self._num_taken = 0  # items of the batch that was taken last, until it is consumed

    @property
    def holds_batch(self) -> bool:
        """Whether the next rollout batch needs no further selection."""
        return self._next_items()[1]

    def take(self) -> list[Records]:
        """Return the trajectories of the next rollout batch, by table. Collective.

        An item of more steps than a batch may have is a batch of its own. After an error nothing is taken.
        """
        while not self.holds_batch:
            self._held.append(self._select())
        first, left = self.first_item, self._next_items()[0]
        self._num_taken, taken = left, []
        for items in self._held:
            end = min(first + left, len(items))
            taken.append(items.trajectories(first, end))
            first, left = 0, left - (end - first)
            if not left:
                break
        if len(taken) == 1:
            return taken[0]
        by_table = zip(*taken, strict=True)
        return [Records(*map(torch.cat, zip(*parts, strict=True))) for parts in by_table]

    def consume(self) -> None:
        """Consume the rollout batch that was taken: rows of which no batch has an item may be evicted."""
        self.number, self.first_item, ended = self.number + 1, self.first_item + self._num_taken, None
        self._num_taken = 0
        while self._held and self.first_item >= len(self._held[0]):
            ended = self._held.pop(0)
            self.first_item -= len(ended)
        if ended is not None:
            self.where = position.after(self._tables, ended.heads)
            for stream in self._streams:
                stream.release(ended.key)

    def _next_items(self) -> tuple[int, bool]:
        """Return how many items of those at hand are the next batch's, and whether it is complete."""
        if not self._held:
            return 0, False
        if self._size.tokens is None:
            return len(self._held[0]), True
        steps = np.concatenate([items.steps for items in self._held])[self.first_item :]
        most = self._size.size
        ends = np.cumsum(steps[:most])
        # Of 100 tokens, for steps [40, 50, 20] ends is [40, 90, 110]: 2 items, and the batch is full.
        count = int(np.searchsorted(ends, self._size.tokens, side="right"))
        if count == 0 and len(ends):
            return 1, True
        is_full = count == most or count < len(ends) or (count and int(ends[-1]) == self._size.tokens)
        return count, bool(is_full)

    def _select(self) -> SelectedItems:
        """Make or read the next selection of every table."""
        key = self.next_key

        def select() -> list[Selection]:
            for stream in self._streams:
                stream.request(key)
            return [stream.get(key) for stream in self._streams]

        try:
            selections = self._session.agree(select)
        except StoreError as error:
            give_up(self._streams, error)
            raise
        self.next_key += 1
        heads = [selection.head for selection in selections]
        self.epoch = heads[0][Head.EPOCH]
        parts = []
        for stream, selection, head in zip(self._streams, selections, heads, strict=True):
            records = selection.resolutions[: head[Head.COUNT]].clone()
            origins = records[:, Resolution.SLOT] if selection.origins is None else selection.origins
            records[:, Resolution.NUM_STEPS].clamp_(max=self._longest)  # the first ones are trained
            weights = stream.weights(head, records)
            parts.append(Records(records, weights, origins[: len(records)].clone()))
        return SelectedItems(key, heads, parts)
