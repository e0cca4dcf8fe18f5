"""Exchange plan: which samples and rows each node needs, by pipeline stage and sequence rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.config.field_names import N_STEP_NAMES
from deepspeed_gear.config.field_resolution import LEARNS, MASK
from deepspeed_gear.config.resolved_field import read_fields
from deepspeed_gear.config.types import dotted
from deepspeed_gear.distributed.topology import RankCoordinates, Topology
from deepspeed_gear.errors import ConfigError
from deepspeed_gear.row_exchange.row_messages import RowReads, WindowRead
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.table_spec import RETURN_TO_GO

WHOLE = 1 << 40  # steps of a window that holds every trajectory
EXAMPLE = '"pipeline": {"inputs": ["observation"], "labels": ["action", "mask.action"]}'


@dataclass(frozen=True)
class ExchangePlan:
    """Maps each sample of a global batch to the nodes that need it, and to the rows
    that they read.
    """

    holders: tuple[int, ...]  # nodes that hold a shard, in the order of their shards
    index: int  # of this node among them; -1 if it holds none
    data_world: int
    #: Nodes (indices of holders) with a rank of each replica that reads; -1 after them.
    #: [data_world, most].
    readers: np.ndarray
    needs: tuple[RowReads, ...]  # the different sets of rows that are read of a sample
    #: Index into `needs` of each node for each replica's samples; -1: it reads nothing. [S,
    #: data_world], int16: of 1,024 nodes with 8 ranks each, 16 MiB.
    need_of: np.ndarray

    @property
    def num_nodes(self) -> int:
        return len(self.holders)

    @property
    def replica_nodes(self) -> np.ndarray:
        """Which nodes have a rank of each replica that reads. [S, data_world], bool."""
        return np.asarray(self.need_of >= 0)

    @property
    def final_row(self) -> int:
        """1 if a column that is read has T+1 rows."""
        return max((read.final_row for need in self.needs for read in need.reads), default=0)

    @cached_property
    def draws_goals(self) -> bool:
        return any(read.is_goal for need in self.needs for read in need.reads)

    @property
    def replicas_here(self) -> np.ndarray:
        """Return the replicas with a rank on this node that reads. [n], int64."""
        return np.nonzero(self.need_of[self.index] >= 0)[0]

    def wanted(self, count: int, offset: int) -> np.ndarray:
        """Return which samples of a selection this node needs, ascending. [n], int64. Replicas
        alternate by sample, of all tables: the first one has the index `offset` among them.
        """
        if len(self.replicas_here) == self.data_world:
            return np.arange(count)
        # With replicas 0 and 3 of 4 here, these are [0, 3, 4, 7, 8, ...] of a selection with the
        # offset 0, and [2, 3, 6, 7, ...] of one with the offset 1.
        firsts = (self.replicas_here - offset) % self.data_world
        grid = np.arange(0, count, self.data_world)[:, None] + np.sort(firsts)[None, :]
        samples = np.asarray(grid.reshape(-1))
        return samples[samples < count]

    def most_wanted(self, batch: int) -> int:
        """Return an upper bound on the samples of a selection that this node needs."""
        return -(-batch // self.data_world) * len(self.replicas_here)


def plan_exchange(
    topology: Topology,
    order: Sequence[int],
    config: GearConfig,
    fields: Sequence[ResolvedField],
    schema: Schema,
) -> ExchangePlan:
    """Return the exchange plan of a topology, for the nodes that hold shards in their order."""
    worlds = topology.place.data_world
    by_place: dict[tuple[int, int], list[ReadNeeds]] = {}
    for place, node in zip(topology.places, topology.nodes, strict=True):
        if place.reads:
            key = order.index(node), place.data_rank
            by_place.setdefault(key, []).append(needs_of(place, config, fields))
    known: dict[RowReads, int] = {}
    need_of = np.full((len(order), worlds), -1, np.int16)
    for (node, replica), needs in by_place.items():
        need_of[node, replica] = known.setdefault(row_needs(needs, config, schema), len(known))
    nodes_of = [np.nonzero(need_of[:, replica] >= 0)[0] for replica in range(worlds)]
    readers = np.full((worlds, max(map(len, nodes_of))), -1, np.int64)
    for replica, nodes in enumerate(nodes_of):
        readers[replica, : len(nodes)] = nodes
    index = order.index(topology.node) if topology.node in order else -1
    return ExchangePlan(tuple(order), index, worlds, readers, tuple(known), need_of)


def row_needs(needs: Sequence[ReadNeeds], config: GearConfig, schema: Schema) -> RowReads:
    """Return the rows that ranks of a replica on one node read: of packs whole trajectories."""
    if config.pack is not None:
        return _whole_trajectories(needs, schema)
    reads: dict[WindowRead, None] = {}
    single: dict[str, None] = {}
    goals: dict[WindowRead, None] = {}
    for need in needs:
        for field in (*read_fields(need.fields), *need.opaque):
            column = field.column
            if field.mask_only or (column is None and field.derived != "return_to_go"):
                continue
            if column is not None and column.rows == "1":
                single[column.name] = None
                continue
            name = RETURN_TO_GO if column is None else column.name
            final_row = int(column is not None and column.rows == "T+1")
            # From the anchor on: a part of the time axis reads its own steps, or all if it depends
            # on them.
            first = field.first
            length = field.length or 1
            edge = field.pad_kind == "edge"
            if field.part_length is not None and field.align == "in_place" and not edge:
                first += field.part_first
                length = field.part_length
            reads[WindowRead(name, first, first + length, field.follows, edge, final_row)] = None
            if field.hindsight is not None:
                name = field.hindsight.name
                final_row = int(field.hindsight.rows == "T+1")
                goals[WindowRead(name, 0, 1, final_row=final_row, is_goal=True)] = None
        if need.n_step and config.n_step is not None:
            for role in ("reward", "terminated", "truncated"):
                column = schema.role(role)
                if column is not None:
                    reads[WindowRead(column.name, 0, config.n_step.n)] = None
    return RowReads((*reads, *goals), tuple(single))


def _whole_trajectories(needs: Sequence[ReadNeeds], schema: Schema) -> RowReads:
    """Return all rows of the columns that packs read, those of tokens and of the loss mask among
    them.
    """
    roles = [schema.role("token"), schema.role("loss_mask")]
    rows_of = {column.name: column.rows for column in roles if column is not None}
    for field in (field for need in needs for field in (*need.fields, *need.opaque)):
        if field.column is not None:
            rows_of[field.column.name] = field.column.rows
        elif field.derived == "return_to_go":
            rows_of[RETURN_TO_GO] = "T"
    windows = [name for name, rows in rows_of.items() if rows != "1"]
    reads = [WindowRead(name, 0, WHOLE, final_row=int(rows_of[name] == "T+1")) for name in windows]
    return RowReads(tuple(reads), tuple(name for name, rows in rows_of.items() if rows == "1"))


@dataclass(frozen=True)
class ReadNeeds:
    """The fields that a rank needs of a batch, by its place in its replica."""

    fields: tuple[ResolvedField, ...]  # that it gathers, each with its part of the time axis
    n_step: bool
    # Of opaque columns, of which it reads its samples' values.
    opaque: tuple[ResolvedField, ...] = ()


def needs_of(
    place: RankCoordinates, config: GearConfig, fields: Sequence[ResolvedField]
) -> ReadNeeds:
    """Return the fields that a rank needs: a first pipeline stage the inputs, a last one the
    labels, inner ones none, and none opaque values; a sequence rank its part of every window.
    ConfigError: the ends are not named, or a window does not divide by the sequence ranks.
    """
    wanted: set[str] | None = None  # all
    if place.pipe_world > 1:
        if config.pipeline is None:
            raise ConfigError(
                "gear.pipeline", "must be given where the model is a pipeline", None, EXAMPLE
            )
        inputs = config.pipeline.inputs if place.is_first_stage else []
        wanted = {*inputs, *(config.pipeline.labels if place.is_last_stage else [])}
    opaque = tuple(field for field in fields if field.is_opaque and wanted is None)
    fields = [field for field in fields if not field.is_opaque]
    chosen = [field for field in fields if wanted is None or field.name in wanted]
    if wanted is not None:
        masks = {f.name: f for f in fields if {MASK + f.name, LEARNS + f.name} & wanted}
        others = [field for name, field in masks.items() if name not in wanted]
        chosen += [replace(field, mask_only=True, normalize=None, scale=1.0) for field in others]
    follows = any(field.offset == "n_step" for field in chosen)
    n_step = wanted is None or follows or bool(wanted.intersection(N_STEP_NAMES))
    parts = tuple(_part(field, place) for field in chosen)
    return ReadNeeds(parts, n_step and config.n_step is not None, opaque)


def _part(field: ResolvedField, place: RankCoordinates) -> ResolvedField:
    """Return a field with the part of its window that a sequence rank reads."""
    if field.length is None or place.sequence_world == 1:
        return field
    if field.length % place.sequence_world:
        rule = f"must be a multiple of the sequence ranks ({place.sequence_world})"
        at = f"{dotted('gear', 'fields', field.name)}.length"
        remedy = "change it, or the number of ranks"
        raise ConfigError(at, rule, field.length, remedy)
    length = field.length // place.sequence_world
    return replace(field, part_first=place.sequence_rank * length, part_length=length)
