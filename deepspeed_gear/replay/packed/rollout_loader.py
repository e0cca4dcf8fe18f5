"""Rollout loader: selects, holds and consumes the rollout batches of a rank, one after the other.

A batch whose size is in items is a selection. One whose size is in tokens has the items that fit,
from the rest of a selection and the next one: what is left begins the next batch, so nothing is
lost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.loss_weights import GradientDivisor
from deepspeed_gear.batching.pack_rows import PackGatherer, TableTrajectories, item_numbers
from deepspeed_gear.checkpoint import position
from deepspeed_gear.checkpoint.position import LoaderPosition
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.errors import CheckpointError, ConfigError, StoreError
from deepspeed_gear.ops.records import Resolution
from deepspeed_gear.replay.batch_loader import give_up
from deepspeed_gear.replay.log_warnings import EqualRewardsWarning, LossWarning
from deepspeed_gear.replay.metrics import Metrics
from deepspeed_gear.replay.packed.rollout import Rollout, TrainStep
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns
from deepspeed_gear.replay.packed.rollout_context import MASK, PackSettings, RolloutContext
from deepspeed_gear.replay.packed.table_rows import TableRows
from deepspeed_gear.replay.replay_parts import ReplayParts
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.records import Head
from deepspeed_gear.store.table import Table


class SelectedItems:
    """Items of one selection, in the order in which batches take them.

    Those of several tables alternate in proportion: of 2 and 3 items the order is b a b a b.

    Args:
        number: Number of the selection.
        heads: Head of the selection in each table.
        parts: Its trajectories in each table, those of one item side by side.
    """

    def __init__(self, number: int, heads: list[list[int]], parts: list[TableTrajectories]) -> None:
        self.number = number
        self.heads = heads
        self.parts = parts
        items = [
            item_numbers(part.resolutions[:, Resolution.SAMPLE_NUMBER].numpy()) for part in parts
        ]
        counts = [int(item[-1]) + 1 if len(item) else 0 for item in items]
        # For counts [2, 3], turns is [1/4, 3/4, 1/6, 3/6, 5/6] and place [1, 3, 0, 2, 4].
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

    def trajectories(self, first: int, end: int) -> list[TableTrajectories]:
        """Return the trajectories of the items [first, end), by table."""
        if end - first == len(self):
            return self.parts
        chosen = [torch.from_numpy((at >= first) & (at < end)) for at in self._places]
        return [
            TableTrajectories(*(column[own] for column in part))
            for own, part in zip(chosen, self.parts, strict=True)
        ]


class RolloutLoader:
    """Loader of this rank's rollout batches. Called by one thread.

    A batch is taken from the held selections. Its items are consumed when it ends, and a selection
    is released when all its items are consumed. So a checkpoint has the position of the first item
    that is not consumed: a resumed run selects the batch under way again, and continues with its
    next step.
    """

    def __init__(
        self,
        parts: ReplayParts,
        metrics: Metrics,
        engine_dtype: torch.dtype,
        device: torch.device,
        divisor: GradientDivisor,
    ) -> None:
        plan = parts.plan
        self.topology = plan.topology
        self._spread = parts.links.trajectories
        self._is_rollout = plan.config.batch is None
        self._tables = plan.config.sampled_tables
        self._streams = parts.train
        settings = PackSettings.of(plan, device)
        self._size = settings.size
        warning = None
        rewards_warning = None
        if plan.control_plane.rank == 0:
            rewards_warning = EqualRewardsWarning()
            mask = settings.schema.role("loss_mask")
            warning = LossWarning(None if mask is None else mask.name, settings.predicts)
        self.context = RolloutContext(
            settings=settings,
            control_plane=plan.control_plane,
            barrier=parts.barrier,
            is_spread=bool(self._spread),
            divisor=divisor,
            metrics=metrics,
            loss_warning=warning,
            rewards_warning=rewards_warning,
        )
        statistics = plan.statistics(plan.needs.fields)
        self._gatherer = partial(PackGatherer, statistics=statistics, engine_dtype=engine_dtype)
        gathered = settings.gathered()
        self._gatherers = [self._gatherer(gathered, stream.table) for stream in self._streams]
        self._of_forward: dict[str, PackGatherer] = {}  # by table
        self._epoch = 0  # of the latest selection
        self._current: Rollout | None = None
        self.seek(LoaderPosition.start(self._tables))

    def seek(self, to: LoaderPosition) -> None:
        """Continue at a position to which the streams are already set."""
        self.abandon()
        self._start = to.at
        # Heads of the last selection whose items are all consumed; None: `_start` is the position.
        self._ended: list[list[int]] | None = None
        #: The number of the next selection.
        self.next_number = to.num_batches
        known = to.rollout or {"number": self.next_number, "first_item": 0}
        # The number of the next rollout batch, and its first item in the first one of `_held`.
        self._number: int = known["number"]
        self._first_item: int = known["first_item"]
        self._held: list[SelectedItems] = []  # from the first one with an item that is not consumed
        self._num_taken = 0  # items of the batch that was taken last, until it is consumed
        self._resumed = to  # the next rollout batch continues with its columns and steps
        self._current = None

    def forward_gatherer(self, settings: PackSettings, table: Table) -> PackGatherer:
        """Return the gatherer of forward passes over a table, which also gathers the loss mask.

        All calls for a table have the same `settings`.
        """
        name = table.spec.name
        if name not in self._of_forward:
            fields = settings.gathered()
            mask = settings.schema.role("loss_mask")
            if mask is not None and mask.dtype == "bool":
                follows = int(settings.predicts)
                fields.append(ResolvedField(MASK, mask, offset=follows, dtype="bool"))
            self._of_forward[name] = self._gatherer(fields, table)
        return self._of_forward[name]

    def next(self) -> Rollout:
        """Select and return the next rollout batch; the one before it is consumed. Collective.

        After an error no item is taken: the next call tries again.
        """
        if self._current is not None:
            self._current.close()
        begin = time.monotonic()
        while not self._next_items()[1]:
            self._held.append(self._select())
        columns = RolloutColumns(self._take(), self.context)
        resumed = self._resumed
        known = resumed.rollout or {}
        saved_tokens = known.get("num_tokens")

        def check_tokens() -> None:
            if columns.trajectories.num_tokens != saved_tokens:
                rule = f"must have the {saved_tokens} steps with which it was saved"
                remedy = (
                    "load it with its run's gear.pack: where it truncates, tokens decides "
                    "the lengths"
                )
                name = f"rollout batch {self._number}"
                raise CheckpointError(name, rule, columns.trajectories.num_tokens, remedy)

        if saved_tokens is not None:
            self.context.agree(check_tokens)
        columns.restore(resumed.columns)
        made = Rollout(self._number, columns, self._consume, known.get("steps_done", 0))
        self._resumed = LoaderPosition(resumed.at)
        self._current = made
        now = time.monotonic()
        self.context.metrics.used(self._epoch, now - begin, now)
        return made

    def step(self) -> TrainStep:
        """Return the one step of the next batch, whose size is `gear.batch`."""
        if self._is_rollout:
            remedy = 'give "batch" instead of "rollout", or iterate over rollout()'
            raise ConfigError(
                "gear.batch", "must be given for steps without a rollout batch", None, remedy
            )
        return self.next().step(0)

    def _next_items(self) -> tuple[int, bool]:
        """Return how many held items are the next batch's, and whether the batch is complete.

        An item longer than the size of a batch is a batch of its own.
        """
        if not self._held:
            return 0, False
        if self._size.tokens is None:
            return len(self._held[0]), True
        steps = np.concatenate([items.steps for items in self._held])[self._first_item :]
        most = self._size.size
        ends = np.cumsum(steps[:most])
        # For 100 tokens and steps [40, 50, 20], ends is [40, 90, 110]: 2 items, and the batch is
        # full.
        count = int(np.searchsorted(ends, self._size.tokens, side="right"))
        if count == 0 and len(ends):
            return 1, True
        taken = int(ends[count - 1]) if count else 0
        return count, count == most or count < len(ends) or taken == self._size.tokens

    def _select(self) -> SelectedItems:
        """Select the items of the next number in every table. Collective."""
        number = self.next_number
        longest = self.context.settings.pack.room

        def select() -> list[Selection]:
            for stream in self._streams:
                stream.request(number)
            return [stream.get(number) for stream in self._streams]

        try:
            selections = self.context.agree(select)
        except StoreError as error:
            give_up(self._streams, error)
            raise
        for stream in self._streams:  # every rank has ended the batch before
            if stream.table.ledger is not None:
                with stream.table.lock:
                    stream.table.ledger.note_trained(number)
        self.next_number += 1
        heads = [selection.head for selection in selections]
        self._epoch = heads[0][Head.EPOCH]
        parts = []
        for stream, selection in zip(self._streams, selections, strict=True):
            # Copies, whose lengths are cut.
            own = stream.part_of(selection, slice(selection.head[Head.COUNT]), of_mixture=True)
            assert own.weights is not None
            steps = own.resolutions[:, Resolution.NUM_STEPS]
            is_cut = steps > longest
            steps.clamp_(max=longest)  # the first ones are trained
            slots = own.resolutions[:, Resolution.SLOT]
            origins = slots.clone() if own.origins is None else own.origins
            parts.append(TableTrajectories(own.resolutions, own.weights, origins, is_cut))
        return SelectedItems(number, heads, parts)

    def _take(self) -> list[TableRows]:
        """Take the next batch's items from the held selections; return their rows in each table."""
        self._num_taken = left = self._next_items()[0]
        first = self._first_item  # in the selection that is next
        taken = []
        for items in self._held:
            end = min(first + left, len(items))
            taken.append(items.trajectories(first, end))
            left -= end - first
            first = 0
            if not left:
                break
        tables = []
        for number, (stream, gatherer) in enumerate(
            zip(self._streams, self._gatherers, strict=True)
        ):
            parts = [trajectories[number] for trajectories in taken]
            joined = TableTrajectories(*map(torch.cat, zip(*parts, strict=True)))
            spread = self._spread.get(stream.table.spec.name)
            # One rank of a node contributes the node's rows. Without a spread each node holds the
            # whole table: then that of the first node contributes all.
            contributes = self.topology.leads_node and bool(spread or self.topology.node == 0)
            tables.append(
                TableRows(gatherer, stream.table, joined, self.context, spread, contributes)
            )
        return tables

    def _consume(self) -> None:
        """Consume the rollout batch that was taken: rows before the next one may be evicted."""
        self._number += 1
        self._first_item += self._num_taken
        self._num_taken = 0
        ended = None  # to release a selection releases those before it
        while self._held and self._first_item >= len(self._held[0]):
            ended = self._held.pop(0)
            self._first_item -= len(ended)
        if ended is not None:
            self._ended = ended.heads
            for stream in self._streams:
                stream.release(ended.number)

    @property
    def _under_way(self) -> Rollout | None:
        current = self._current
        return current if current is not None and current.number == self._number else None

    @property
    def holds_batch(self) -> bool:
        """Whether the next rollout batch needs no further selection; the same on every rank."""
        return self._under_way is None and self._next_items()[1]

    @property
    def position(self) -> LoaderPosition:
        """Position of the first item that is not consumed, with the rollout batch that it is in.

        There is no such rollout batch between two that are a selection each.
        """
        current = self._under_way
        at = self._start
        if self._ended is not None:
            at = position.after(self._tables, self._ended)
        if current is None and self._size.tokens is None:
            return LoaderPosition(at)
        rollout = {
            "number": self._number,
            "first_item": self._first_item,
            "steps_done": 0 if current is None else current.steps_done,
            "num_tokens": None if current is None else current.num_tokens,
            "size": self._size.model_dump(),
        }
        saved = {} if current is None else current.batch_columns.saved()
        return LoaderPosition(at, rollout, saved)

    def check(self, rollout: Mapping[str, Any] | None) -> None:
        """Raise a CheckpointError if a saved rollout batch under way has another size."""
        if rollout is not None and rollout["size"] != self._size.model_dump():
            rule = f"must have the size of this config ({self._size.model_dump()})"
            remedy = (
                "load with the size that it was saved with, or take a checkpoint between "
                "rollout batches"
            )
            raise CheckpointError(
                "the rollout batch of the gear state", rule, rollout["size"], remedy
            )

    def abandon(self) -> None:
        """End the rollout batch that is being trained without consuming it."""
        if self._current is not None:
            self._current.abandon()
