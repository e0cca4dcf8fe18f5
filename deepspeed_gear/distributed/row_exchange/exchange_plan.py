"""The exchange plan: which node needs which samples of a global batch, and which rows of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepspeed_gear.config import GearConfig, ResolvedField
from deepspeed_gear.distributed.read_needs import ReadNeeds, needs_of
from deepspeed_gear.distributed.row_exchange.row_reads import RowReads, WindowRead
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.schema import Schema
from deepspeed_gear.store.table_spec import RETURN_TO_GO

WHOLE = 1 << 40  # steps of a window that holds every trajectory


@dataclass(frozen=True)
class ExchangePlan:
    """Maps each sample of a global batch to the nodes that need it, and to the rows that they read.

    Args:
        holders: Nodes that hold a shard, in the order of their shards.
        index: Of this node among them; -1 if it holds none.
        readers: Nodes (indices of holders) with a rank of each replica that reads; -1 after the last.
            [data_world, most].
        needs: The different sets of rows that are read of a sample, by index.
        need_of: Index into `needs` of each node for each replica's samples; -1: it reads nothing.
            [S, data_world], int16: of 1,024 nodes with 8 ranks each, 16 MiB.
    """

    holders: tuple[int, ...]
    index: int
    data_world: int
    readers: np.ndarray
    needs: tuple[RowReads, ...]
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

    @property
    def replicas_here(self) -> np.ndarray:
        """Return the replicas with a rank on this node that reads. [n], int64."""
        return np.nonzero(self.need_of[self.index] >= 0)[0]

    def wanted(self, count: int, offset: int) -> np.ndarray:
        """Return which samples of a selection this node needs, ascending. [n], int64.

        Args:
            count: Samples of the selection.
            offset: Of its first sample among those of all tables: replicas alternate by sample.
        """
        if len(self.replicas_here) == self.data_world:
            return np.arange(count)
        firsts = (self.replicas_here - offset) % self.data_world
        grid = np.arange(0, count, self.data_world)[:, None] + np.sort(firsts)[None, :]
        samples = np.asarray(grid.reshape(-1))
        return samples[samples < count]

    def most_wanted(self, batch: int) -> int:
        """Return an upper bound on the samples of a selection that this node needs."""
        return -(-batch // self.data_world) * len(self.replicas_here)


def routes_of(
    topology: Topology,
    order: Sequence[int],
    config: GearConfig,
    fields: Sequence[ResolvedField],
    schema: Schema,
) -> ExchangePlan:
    """Return the exchange plan of a topology.

    Args:
        topology: Places and nodes of all ranks.
        order: Nodes that hold a shard, in the order of their shards.
        fields: Of a whole batch.
    """
    worlds = topology.place.data_world
    found: dict[tuple[int, int], list[ReadNeeds]] = {}
    for place, node in zip(topology.places, topology.nodes, strict=True):
        if place.reads:
            key = order.index(node), place.data_rank
            found.setdefault(key, []).append(needs_of(place, config, fields))
    known: dict[RowReads, int] = {}
    need_of = np.full((len(order), worlds), -1, np.int16)
    for (node, replica), needs in found.items():
        rows = row_needs(needs, config, schema)
        need_of[node, replica] = known.setdefault(rows, len(known))
    nodes_of = [np.nonzero(need_of[:, replica] >= 0)[0] for replica in range(worlds)]
    most = max(len(nodes) for nodes in nodes_of)
    readers = np.full((worlds, most), -1, np.int64)
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
    goals: dict[tuple[str, int], None] = {}
    for need in needs:
        for field in (*need.fields, *need.opaque):
            _add_field(field, reads, single, goals)
        if need.n_step and config.n_step is not None:
            for role in ("reward", "terminated", "truncated"):
                column = schema.role(role)
                if column is not None:
                    reads[WindowRead(column.name, 0, config.n_step.n)] = None
    return RowReads(tuple(reads), tuple(single), tuple(goals))


def _whole_trajectories(needs: Sequence[ReadNeeds], schema: Schema) -> RowReads:
    """Return all rows of the columns that packs read, those of tokens and of the loss mask among them."""
    roles = [schema.role("token"), schema.role("loss_mask")]
    found = {column.name: column.rows for column in roles if column is not None}
    for field in (field for need in needs for field in (*need.fields, *need.opaque)):
        if field.column is not None:
            found[field.column.name] = field.column.rows
        elif field.derived == "return_to_go":
            found[RETURN_TO_GO] = "T"
    reads = [
        WindowRead(name, 0, WHOLE, final_row=int(rows == "T+1"))
        for name, rows in found.items()
        if rows != "1"
    ]
    return RowReads(tuple(reads), tuple(name for name, rows in found.items() if rows == "1"))


def _add_field(
    field: ResolvedField,
    reads: dict[WindowRead, None],
    single: dict[str, None],
    goals: dict[tuple[str, int], None],
) -> None:
    if field.mask_only or (field.column is None and field.derived != "return_to_go"):
        return
    if field.column is not None and field.column.rows == "1":
        single[field.column.name] = None
        return
    name = RETURN_TO_GO if field.column is None else field.column.name
    final_row = int(field.column is not None and field.column.rows == "T+1")
    first, end = _window(field)
    reads[WindowRead(name, first, end, field.follows, field.pad_kind == "edge", final_row)] = None
    if field.hindsight is not None:
        goals[field.hindsight.name, int(field.hindsight.rows == "T+1")] = None


def _window(field: ResolvedField) -> tuple[int, int]:
    """Return the steps that a field's part of its window may read, from the anchor on."""
    offset = field.first
    length = field.length or 1
    if field.part_length is None or field.align != "in_place" or field.pad_kind == "edge":
        return offset, offset + length
    return offset + field.part_first, offset + field.part_first + field.part_length
