"""Forward passes over a table: micro batches of trajectories that lack late columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from deepspeed_gear.batching.micro_batch import ForwardPass, MicroBatch
from deepspeed_gear.batching.pack_rows import PackShape, TableTrajectories
from deepspeed_gear.batching.packing_plan import PlannedPacks, check_tokens
from deepspeed_gear.data.ragged import Ragged, as_ragged
from deepspeed_gear.distributed.sequence_sum import SequenceSum
from deepspeed_gear.distributed.topology import RankCoordinates, Topology
from deepspeed_gear.errors import ConfigError, ShapeError
from deepspeed_gear.ops.records import Resolution, Slot, SlotState
from deepspeed_gear.replay.packed.packs import Packs
from deepspeed_gear.replay.packed.rollout_columns import RolloutColumns
from deepspeed_gear.replay.packed.rollout_context import MASK, PackSettings, RolloutContext
from deepspeed_gear.replay.packed.rollout_loader import RolloutLoader
from deepspeed_gear.replay.packed.table_rows import TableRows
from deepspeed_gear.schema import Column
from deepspeed_gear.store.late_columns import absent, fill_each
from deepspeed_gear.store.table import Table


class StoredColumns(RolloutColumns):
    """Columns of trajectories that no selection pins: read under the lock of their table."""

    def __init__(self, rows: TableRows, context: RolloutContext) -> None:
        super().__init__([rows], context, has_neighbours=False)
        self._rows = rows

    @contextmanager
    def reading(self, at: Any) -> Iterator[np.ndarray]:
        with self._rows.table.lock:
            yield self._locate(at)

    def _locate(self, at: Any) -> np.ndarray:
        """Find the rows of trajectories, and of prompts that others hold for them. Needs the lock.

        Evicted trajectories get row 0.

        Returns:
            Mask of the trajectories that have rows. [n], bool.
        """
        table = self._rows.table
        shared = self._rows.shared
        resolutions = self._rows.rows.numpy()[at]  # a range, so it is a view
        slots = table.slots.take(resolutions[:, Resolution.SLOT], axis=0)
        has_rows = slots[:, Slot.STATE] == SlotState.COMMITTED  # then it has all of its group
        has_rows &= slots[:, Slot.ID] == resolutions[:, Resolution.ID]
        np.multiply(slots[:, Slot.FIRST_ROW], has_rows, out=resolutions[:, Resolution.FIRST_ROW])
        if shared is not None:
            holders = resolutions[:, Resolution.MASS]  # as `absent` has them
            shared.first_row[at] = table.slots[holders, Slot.FIRST_ROW] * has_rows
        return np.asarray(has_rows)


class LateColumns(ForwardPass):
    """Late columns of a table that a forward pass fills; values are stored at once.

    Args:
        names: The columns.
        table: The table.
        settings: Settings of the replay's packs; a column of a field has the field's offset.
        stored: Resolutions of the packs' trajectories. [n, 8], int64.
    """

    def __init__(
        self, names: Sequence[str], table: Table, settings: PackSettings, stored: np.ndarray
    ) -> None:
        super().__init__(names)
        self._table = table
        self._settings = settings
        self._stored = stored
        every = (*settings.fields, *settings.ragged)
        self._offsets = {f.column.name: int(f.offset) for f in every if f.column is not None}

    def write(self, name: str, micro: MicroBatch, values: Any) -> None:
        column = self._table.schema[name]
        if column.is_ragged:
            self._write_ragged(column, micro, values)
            return
        shape = micro.pack_shape
        settings = self._settings
        by_step = column.rows == "T"
        rows = shape.end - shape.first if by_step else micro.num_trajectories
        micro.check_shape(name, values, rows, column.shape)
        given = values.detach().reshape(-1, *column.shape)
        if by_step and settings.ranks is not None:  # other ranks have other places
            whole = given.new_zeros((shape.rows, *column.shape))
            whole[shape.first : shape.end] = given
            given = settings.ranks.sum(whole)
        if not settings.place.reports:
            return
        given = given.cpu()
        own: Any = given if given.dtype == torch.bfloat16 else given.numpy()
        offset = 0
        if by_step:  # place i has the value of step i + offset
            own = own[: shape.num_tokens]
            offset = self._offsets.get(name, int(settings.predicts))
        fill_each(
            self._table, column, self._stored[micro.sources.at], own, self._table.lineage, offset
        )

    def _write_ragged(self, column: Column, micro: MicroBatch, values: Any) -> None:
        """Store a ragged column: a Ragged, or what becomes one, of this rank's places."""
        settings = self._settings
        shape = micro.pack_shape
        places = shape.end - shape.first
        given = as_ragged(values, f"table {self._table.spec.name}: column {column.name}")
        if len(given) != places:
            rule = f"must have values for each of the {places} places"
            remedy = "a place without values has none: two equal offsets, or an empty list"
            raise ShapeError(f"column {column.name!r}", rule, len(given), remedy)
        if settings.ranks is not None:  # other ranks have other places
            given = _of_all_slices(given, shape, settings.ranks)
        if not settings.place.reports:
            return
        offset = self._offsets.get(column.name, int(settings.predicts))
        # Place i has the values of step i + offset, so the first steps of a trajectory have none.
        owner = np.repeat(np.arange(len(shape.lengths)), shape.lengths)
        first = np.cumsum(shape.lengths) - shape.lengths
        step = np.arange(len(owner)) - first[owner]
        place = np.where(step >= offset, shape.starts[owner] + step - offset, -1)
        stored = given.to("cpu").take(torch.from_numpy(place))
        bounds = [*first.tolist(), len(owner)]
        parts = [stored.part(*pair) for pair in pairwise(bounds)]
        resolutions = self._stored[micro.sources.at]
        fill_each(self._table, column, resolutions, parts, self._table.lineage)


def _of_all_slices(given: Ragged, shape: PackShape, ranks: SequenceSum) -> Ragged:
    """Return the values at all places of a pack, of which each sequence rank has a slice."""
    counts = given.counts.new_zeros(shape.rows)
    counts[shape.first : shape.end] = given.counts
    counts = ranks.sum(counts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    values = given.values.new_zeros(int(offsets[-1]))
    begin = int(offsets[shape.first])
    values[begin : begin + len(given.values)] = given.values
    return Ragged(ranks.sum(values), offsets)


def check_late(table: Table, names: Sequence[str]) -> None:
    """Raise a ConfigError unless columns are late, with numbers per step or trajectory."""
    columns = table.schema.late_columns
    late = [c.name for c in columns if not (c.is_opaque or c.rows == "T+1")]
    for name in names:
        if name not in late:
            rule = "must be late, with numbers per step or trajectory"
            has = f"there are: {', '.join(late) or 'none'}"
            raise ConfigError(f"table {table.spec.name}: column {name!r}", rule, None, has)


def fill_place(table: Table, place: RankCoordinates, topology: Topology) -> RankCoordinates:
    """Return a rank's place among the replicas of its node, which fill the node's own rows.

    Raises:
        ConfigError: The table is on several nodes, and so are the ranks of a replica.
    """
    shard = table.spec.shard
    if shard is None or shard.count == 1:
        return place
    nodes: dict[int, int] = {}  # of each replica
    for other, node in zip(topology.places, topology.nodes, strict=True):
        first = nodes.setdefault(other.data_rank, node)
        if first != node:
            rule = "must have the ranks of each replica on one node for forward()"
            remedy = "place tensor and sequence ranks on one node, or fill() it by trajectory"
            given = f"replica {other.data_rank} on the nodes {first} and {node}"
            raise ConfigError(f"table {table.spec.name}", rule, given, remedy)
    replicas = sorted(replica for replica, node in nodes.items() if node == topology.node)
    index = replicas.index(place.data_rank)
    return replace(place, data_rank=index, data_world=len(replicas))


def forward(
    table: Table, names: Sequence[str], tokens: int | None, loader: RolloutLoader
) -> Iterator[MicroBatch]:
    """Iterate over micro batches of trajectories that lack a column; see `Replay.forward`."""
    settings = loader.context.settings
    topology = loader.topology
    # Its collectives are those of all ranks, whether they train together or not.
    context = replace(loader.context, barrier=None, is_spread=True)

    def listed() -> np.ndarray | None:
        check_late(table, names)
        fill_place(table, settings.place, topology)
        if not topology.leads_node:
            return None
        with table.lock:
            return absent(table, *names)

    # By rank; None except for the leader of each node.
    lists = context.control_plane.all_results("a rollout batch", listed)
    context.check_same("forward: table, columns and tokens", (table.spec.name, names, tokens))
    of_nodes = np.concatenate([one for one in lists if one is not None])
    of_all_nodes = of_nodes[:, Resolution.NUM_STEPS]
    resolutions = np.asarray(lists[topology.peers[0]])
    place = fill_place(table, settings.place, topology)
    # For a plan of 8 ranks and 4 replicas, 3 of them here, the plan is of 6.
    replicas = settings.place.data_world
    width = (settings.pack.plan_width or replicas) // replicas * place.data_world
    pack = settings.pack.model_copy(
        update={"plan_width": width, "tokens": tokens or settings.pack.tokens}
    )

    @cache
    def planned() -> PlannedPacks:
        check_tokens(settings.pack, of_all_nodes, tokens)
        return PlannedPacks(resolutions[:, Resolution.NUM_STEPS], pack, place.data_world, table.ops)

    # Every node makes as many forward passes as the one with the most packs.
    longest = context.control_plane.all_results(
        "a rollout batch", lambda: planned().rows.max(axis=1).tolist()
    )

    fields, opaque, ragged = (
        tuple(field for field in every if not (field.column and field.column.late))
        for every in (settings.fields, settings.opaque, settings.ragged)
    )
    early = replace(
        settings, fields=fields, opaque=opaque, ragged=ragged, place=place, table_losses=()
    )

    def made() -> tuple[Packs, LateColumns]:
        planned().extend(longest, settings.pack)
        sorted_resolutions = resolutions[planned().sort()]
        columns = _stored_columns(
            table, sorted_resolutions, replace(context, settings=early), loader
        )
        packs = Packs(columns, np.arange(len(resolutions)), tokens, planned())
        return packs, LateColumns(names, table, settings, columns.tables[0].rows.numpy())

    packs, late = context.agree(made)
    yield from packs.forward(late)


def _stored_columns(
    table: Table, resolutions: np.ndarray, context: RolloutContext, loader: RolloutLoader
) -> RolloutColumns:
    """Return the columns of trajectories that no selection pins.

    Args:
        table: The table.
        resolutions: Resolutions of the trajectories. [n, 8], int64.
        context: Context of the pass.
        loader: The replay's loader, which has the gatherer.
    """
    count = len(resolutions)
    known = TableTrajectories(
        resolutions=torch.from_numpy(resolutions),
        weights=torch.ones(count),
        origins=torch.from_numpy(resolutions[:, Resolution.SLOT].copy()),
        is_cut=torch.zeros(count, dtype=torch.bool),
    )
    rows = TableRows(loader.forward_gatherer(context.settings, table), table, known, context)
    with table.lock:
        for role in ("token", "loss_mask"):
            column = context.settings.schema.role(role)
            if column is not None:
                rows.check_filled(column.name)
    columns = StoredColumns(rows, context)
    if all(field.name != MASK for field in rows.gatherer.fields):
        _ = columns.mask  # else a pack would read it after others have been evicted
    return columns
