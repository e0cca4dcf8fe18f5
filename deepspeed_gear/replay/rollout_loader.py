"""Rollout loader: the rollout batches of one rank, one after the other; and forward passes over a table, of
the trajectories that lack late columns, which are filled.

A batch whose size is in items is a selection. One whose size is in tokens has the items that fit, from the
rest of a selection and the next one: what is left begins the next batch, so nothing is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.gather import PackGatherer
from deepspeed_gear.batching.micro_batch import MicroBatch
from deepspeed_gear.checkpoint import position
from deepspeed_gear.checkpoint.position import LoaderPosition
from deepspeed_gear.config import ResolvedField
from deepspeed_gear.distributed.sequence_sum import sequence_sum
from deepspeed_gear.distributed.topology import RankCoordinates
from deepspeed_gear.errors import CheckpointError, ConfigError, StoreError
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.replay import rollout_data
from deepspeed_gear.replay.batch_loader import give_up
from deepspeed_gear.replay.builder import ReplayParts
from deepspeed_gear.replay.metrics import LossWarning, Metrics
from deepspeed_gear.replay.rollout import Rollout, TrainStep
from deepspeed_gear.replay.rollout_data import RolloutData
from deepspeed_gear.replay.table_part import Records, RolloutSession, TablePart, item_numbers
from deepspeed_gear.sampling.mass_rules import key_of
from deepspeed_gear.sampling.selection import Selection
from deepspeed_gear.store.late_columns import absent, fill_each
from deepspeed_gear.store.records import Head
from deepspeed_gear.store.table import Table


class SelectedItems:
    """The items of one selection, those of several tables in turn, in proportion to their numbers; its head;
    and its trajectories in each table, `parts`, those of one item side by side.
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


class RolloutLoader:
    """Loads this rank's rollout batches. Called by one thread."""

    def __init__(
        self,
        parts: ReplayParts,
        metrics: Metrics,
        engine_dtype: torch.dtype,
        device: torch.device,
        divisor: Callable[[], float],
    ) -> None:
        plan = parts.plan
        config = plan.config
        assert config.pack is not None
        assert config.rollout_size is not None
        self._spread, self.topology = parts.exchange.trajectories, plan.topology
        self._metrics, self._size = metrics, config.rollout_size
        self._tables, self._streams = config.sampled_tables, parts.train
        self._is_rollout = config.batch is None
        first = self._tables[0]
        group = config.resolved_tables[first].group
        self.settings = rollout_data.PackSettings(
            pack=config.pack,
            loss=config.loss,
            size=self._size,
            keys=(config.seed, key_of(first, "minibatches")),
            place=plan.topology.place,
            device=device,
            schema=plan.schemas[first],
            fields=tuple(plan.needs.fields),
            opaque=tuple(plan.needs.opaque),
            member=None if group is None else group.member,
            reduce=sequence_sum(plan.topology, device, config.timeout_s, plan.group, plan.exchange),
        )
        statistics = plan.statistics(plan.needs.fields)
        self._gatherer = partial(PackGatherer, statistics=statistics, engine_dtype=engine_dtype)
        gathered = self.settings.gathered()
        self._gatherers = [self._gatherer(gathered, stream.table) for stream in self._streams]
        self._of_forward: dict[str, PackGatherer] = {}  # by table
        self.session = RolloutSession(plan.exchange, parts.barrier, bool(self._spread), divisor)
        if plan.exchange.rank == 0:
            mask = self.settings.schema.role("loss_mask")
            warning = LossWarning(None if mask is None else mask.name, self.settings.predicts)
            self.session.observers.append(warning.count)
        self._epoch = 0  # of the latest selection
        self._current: Rollout | None = None
        self.seek(LoaderPosition(position.start(self._tables)))

    def seek(self, to: LoaderPosition) -> None:
        """Continue at a position to which the streams are already set."""
        self.abandon()
        self._at = to.at  # after the last selection of which no item is left
        #: The number of the next selection.
        self.next_key = position.batches(to.at)
        known = to.rollout or {"number": self.next_key, "first_item": 0}
        # The number of the next rollout batch, and its first item in the first one of `_held`.
        self._number: int = known["number"]
        self._first_item: int = known["first_item"]
        self._held: list[SelectedItems] = []  # from the first one with an item that is not consumed
        self._num_taken = 0  # items of the batch that was taken last, until it is consumed
        self._resumed, self._current = to, None  # what the next rollout batch goes on with

    def forward_gatherer(self, settings: rollout_data.PackSettings, table: Table) -> PackGatherer:
        """Return the gatherer of the passes over a table, which have one `settings`: with the loss mask."""
        found = self._of_forward.get(table.spec.name)
        if found is None:
            fields, mask = settings.gathered(), settings.schema.role("loss_mask")
            if mask is not None and mask.dtype == "bool":
                follows = int(settings.predicts)
                fields.append(ResolvedField(rollout_data.MASK, mask, offset=follows, dtype="bool"))
            found = self._of_forward[table.spec.name] = self._gatherer(fields, table)
        return found

    def next(self) -> Rollout:
        """Select and return the next rollout batch; the one before it is consumed. Collective."""
        if self._current is not None:
            self._current.close()
        begin, resumed = time.perf_counter(), self._resumed
        parts, leads = [], self.topology.leads_node
        for gatherer, stream, records in zip(self._gatherers, self._streams, self._take(), strict=True):
            table, spread = stream.table, self._spread.get(stream.table.spec.name)
            copies = leads and (spread is not None or self.topology.node == 0)  # each node holds all of it
            parts.append(TablePart(gatherer, table, records, self.session, spread, copies))
        ops, number = self._streams[0].table.ops, self._number
        data = RolloutData(parts, self.settings, ops, self.session, number, self._metrics)
        known = resumed.rollout or {}
        num_tokens = known.get("num_tokens")

        def check_tokens() -> None:
            if data.num_tokens != num_tokens:
                rule = f"must have the {num_tokens} steps with which it was saved"
                remedy = "load it with its run's gear.pack: where it truncates, tokens decides the lengths"
                raise CheckpointError(f"rollout batch {number}", rule, data.num_tokens, remedy)

        if num_tokens is not None:
            self.session.agree(check_tokens)
        made = Rollout(data, self._consume, known.get("steps_done", 0))
        data.columns.update(resumed.columns)
        self._resumed, self._current = LoaderPosition(resumed.at), made
        self._metrics.used(self._epoch, time.perf_counter() - begin)
        return made

    def step(self) -> TrainStep:
        """Return the one step of the next batch, whose size is `gear.batch`."""
        if self._is_rollout:
            remedy = 'give "batch" instead of "rollout", or iterate over rollout()'
            raise ConfigError("gear.batch", "must be given for steps without a rollout batch", None, remedy)
        return self.next().step(0)

    def _take(self) -> list[Records]:
        """Return the next batch's trajectories by table; a too long item is a batch. Errors take none."""
        while not self._next_items()[1]:
            self._held.append(self._select())
        first, left = self._first_item, self._next_items()[0]
        self._num_taken, taken = left, []
        for items in self._held:
            end = min(first + left, len(items))
            taken.append(items.trajectories(first, end))
            first, left = 0, left - (end - first)
            if not left:
                break
        by_table = zip(*taken, strict=True)
        return [Records(*map(torch.cat, zip(*parts, strict=True))) for parts in by_table]

    def _consume(self) -> None:
        """Consume the rollout batch that was taken: rows of which no batch has an item may be evicted."""
        self._number, self._first_item, ended = self._number + 1, self._first_item + self._num_taken, None
        self._num_taken = 0
        while self._held and self._first_item >= len(self._held[0]):
            ended = self._held.pop(0)
            self._first_item -= len(ended)
        if ended is not None:
            self._at = position.after(self._tables, ended.heads)
            for stream in self._streams:
                stream.release(ended.key)

    def _next_items(self) -> tuple[int, bool]:
        """Return how many items of those at hand are the next batch's, and whether it is complete."""
        if not self._held:
            return 0, False
        if self._size.tokens is None:
            return len(self._held[0]), True
        steps = np.concatenate([items.steps for items in self._held])[self._first_item :]
        most = self._size.size
        ends = np.cumsum(steps[:most])
        # Of 100 tokens, for steps [40, 50, 20] ends is [40, 90, 110]: 2 items, and the batch is full.
        count = int(np.searchsorted(ends, self._size.tokens, side="right"))
        if count == 0 and len(ends):
            return 1, True
        is_full = count == most or count < len(ends) or (count and int(ends[-1]) == self._size.tokens)
        return count, bool(is_full)

    def _select(self) -> SelectedItems:
        key, longest = self.next_key, self.settings.pack.room

        def select() -> list[Selection]:
            for stream in self._streams:
                stream.request(key)
            return [stream.get(key) for stream in self._streams]

        try:
            selections = self.session.agree(select)
        except StoreError as error:
            give_up(self._streams, error)
            raise
        for stream in self._streams:  # every rank has ended the batch before
            if stream.table.ledger is not None:
                with stream.table.lock:
                    stream.table.ledger.note_trained(key)
        self.next_key += 1
        heads = [selection.head for selection in selections]
        self._epoch = heads[0][Head.EPOCH]
        parts = []
        for stream, selection, head in zip(self._streams, selections, heads, strict=True):
            records = selection.records[: head[Head.COUNT]].clone()
            origins = records[:, Resolution.SLOT] if selection.origins is None else selection.origins
            is_cut = records[:, Resolution.NUM_STEPS] > longest
            records[:, Resolution.NUM_STEPS].clamp_(max=longest)  # the first ones are trained
            weights = stream.weights(head, records)
            parts.append(Records(records, weights, origins[: len(records)].clone(), is_cut))
        return SelectedItems(key, heads, parts)

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
        """The position, with the rollout batch after it; between two that are a selection each without."""
        current = self._under_way
        if current is None and self._size.tokens is None:
            return LoaderPosition(self._at)
        rollout = {
            "number": self._number,
            "first_item": self._first_item,
            "steps_done": 0 if current is None else current.steps_done,
            "num_tokens": None if current is None else current.num_tokens,
            "size": self._size.model_dump(),
        }
        return LoaderPosition(self._at, rollout, {} if current is None else current.columns)

    def check(self, rollout: Mapping[str, Any] | None) -> None:
        """Raise CheckpointError unless a rollout batch that is being trained has the size of this config."""
        if rollout is not None and rollout["size"] != self._size.model_dump():
            rule = f"must have the size of this config ({self._size.model_dump()})"
            remedy = "load with the size that it was saved with, or take a checkpoint between rollout batches"
            raise CheckpointError("the rollout batch of the gear state", rule, rollout["size"], remedy)

    def abandon(self) -> None:
        """End the rollout batch that is being trained without consuming it."""
        if self._current is not None:
            self._current.abandon()


class StoredTrajectories(RolloutData):
    """Trajectories that no selection pins: their rows are looked up under the lock for each pack."""

    @cached_property
    def item(self) -> np.ndarray:
        """As of a rollout batch; those of an item, of equal sample numbers, may not be neighbours."""
        numbers = self.records[:, Resolution.SAMPLE_NUMBER].numpy()
        return np.unique(numbers, return_inverse=True)[1].reshape(-1)

    @cached_property
    def mask(self) -> np.ndarray:
        """As of a rollout batch, False where they were evicted; packs with the loss mask do not read it."""
        part = self.parts[0]
        with part.table.lock:
            has_rows = placed(part, part.records.resolutions.numpy(), slice(None))
            return np.asarray(super().mask & has_rows.repeat(self.lengths))

    def pack(self, packs: rollout_data.PackSequence, number: int, fill: Any = None) -> MicroBatch:
        part = self.parts[0]
        with part.table.lock:
            at = packs.at[number]
            self.has_rows = placed(part, part.rows.numpy()[at], at)  # a range, so they are not copied
            return super().pack(packs, number, fill)


def placed(part: TablePart, records: np.ndarray, at: Any) -> np.ndarray:
    """Set the rows of trajectories now in records, [n, 8], and of the prompts that others hold for them; row
    0 of evicted ones. They are those `at` these places of the part. Returns which have any. Needs the lock.
    """
    slots = part.table.slots.take(records[:, Resolution.SLOT], axis=0)
    has_rows = slots[:, Slot.STATE] == SlotState.COMMITTED  # then it has all of its group
    has_rows &= slots[:, Slot.ID] == records[:, Resolution.ID]
    np.multiply(slots[:, Slot.FIRST_ROW], has_rows, out=records[:, Resolution.FIRST_ROW])
    if part.shared is not None:
        holders = records[:, Resolution.MASS]  # as `absent` has them
        part.shared.first_row[at] = part.table.slots[holders, Slot.FIRST_ROW] * has_rows
    return np.asarray(has_rows)


def fill_place(table: Table, of: RolloutLoader) -> RankCoordinates:
    """Return this rank's place among the replicas that fill what its store holds: those of its node.

    Raises:
        ConfigError: The table lies on several nodes, and so do the ranks of a replica.
    """
    topology, shard, nodes = of.topology, table.spec.shard, dict[int, int]()  # of each replica
    if shard is None or shard.count == 1:
        return of.settings.place
    for place, node in zip(topology.places, topology.nodes, strict=True):
        first = nodes.setdefault(place.data_rank, node)
        if first != node:
            rule = "must have the ranks of each replica on one node for forward()"
            remedy = "place tensor and sequence ranks on one node, or fill() it by trajectory"
            given = f"replica {place.data_rank} on the nodes {first} and {node}"
            raise ConfigError(f"table {table.spec.name}", rule, given, remedy)
    replicas = sorted(replica for replica, node in nodes.items() if node == topology.node)
    index = replicas.index(topology.place.data_rank)
    return replace(topology.place, data_rank=index, data_world=len(replicas))


def forward(
    table: Table, names: Sequence[str], tokens: int | None, of: RolloutLoader
) -> Iterator[MicroBatch]:
    """Yield this rank's micro batches of trajectories that lack one of the columns; as `Replay.forward`."""
    to, topology = of.settings, of.topology
    scalars = [c for c in table.schema.late_columns if not (c.shape or c.is_opaque or c.rows == "T+1")]
    late, lineage = {column.name: column.rows for column in scalars}, table.lineage

    def listed() -> np.ndarray | None:
        for name in [name for name in names if name not in late]:
            rule, has = "must be late, with one number per step or trajectory", ", ".join(late) or "none"
            raise ConfigError(f"table {table.spec.name}: column {name!r}", rule, None, f"there are: {has}")
        fill_place(table, of)
        if not topology.leads_node:
            return None
        with table.lock:
            return absent(table, *names)

    # Its collectives are those of all ranks, whether they train together or not.
    session = replace(of.session, barrier=None, is_spread=True)
    lists = session.exchange.collect("a rollout batch", listed)  # of the leader of each node
    session.agree_on("forward: table, columns and tokens", (table.spec.name, names, tokens))
    every = np.concatenate([one for one in lists if one is not None])[:, Resolution.NUM_STEPS]
    records = np.asarray(lists[topology.peers[0]])
    place = fill_place(table, of)
    # For a plan of 8 ranks and 4 replicas, 3 of them here, the plan is of 6.
    width = (to.pack.plan_width or to.place.data_world) // to.place.data_world * place.data_world
    pack = to.pack.model_copy(update={"plan_width": width, "tokens": tokens or to.pack.tokens})
    offsets = {field.column.name: int(field.offset) for field in to.fields if field.column is not None}
    early = [[f for f in all_of if not (f.column and f.column.late)] for all_of in (to.fields, to.opaque)]
    settings = replace(to, fields=tuple(early[0]), opaque=tuple(early[1]), place=place)

    @cache
    def planned() -> rollout_data.PlannedPacks:
        rollout_data.check_tokens(to.pack, every, tokens)
        return rollout_data.PlannedPacks(records[:, Resolution.NUM_STEPS], pack, place.data_world, table.ops)

    longest = session.exchange.collect("a rollout batch", lambda: planned().rows.max(axis=1).tolist())

    def made() -> rollout_data.PackSequence:
        planned().extend(longest, to.pack)
        own, size = records[planned().sort()], len(records)
        given = own, np.ones(size, np.float32), own[:, Resolution.SLOT].copy(), np.zeros(size, bool)
        known = Records(*map(torch.from_numpy, given))
        part = TablePart(of.forward_gatherer(settings, table), table, known, session)
        with table.lock:
            for column in filter(None, map(settings.schema.role, ("token", "loss_mask"))):
                part.check_filled(column.name)
        found = StoredTrajectories([part], settings, table.ops, session)
        if all(field.name != rollout_data.MASK for field in part.gatherer.fields):
            assert len(found.mask) == found.num_tokens  # it is read before packs hold the lock
        return rollout_data.PackSequence(found, np.arange(size), tokens, planned())

    packs = session.agree(made)
    stored, predicts = packs.data.parts[0].rows.numpy(), int(to.predicts)

    def write(name: str, micro: MicroBatch, values: torch.Tensor) -> None:
        shape, by_step, offset = micro.pack_shape, late[name] == "T", offsets.get(name, predicts)
        micro.check_shape(name, values, shape.end - shape.first if by_step else micro.num_trajectories)
        given = values.detach()
        if by_step and to.reduce is not None:  # other ranks have other places
            whole = given.new_zeros(shape.rows)
            whole[shape.first : shape.end] = given.reshape(-1)
            given = to.reduce(whole)
        if to.place.reports:  # place i has the value of step i + offset
            own: Any = (given.cpu() if given.dtype == torch.bfloat16 else given.cpu().numpy()).reshape(-1)
            own, offset = (own[: shape.num_tokens], offset) if by_step else (own, 0)
            fill_each(table, table.schema[name], stored[micro.sources.at], own, lineage, offset)

    yield from packs.data.forward(packs, names, write)
