"""Placement of shards: which part of each table, and of its data set, every node holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.config import GearConfig
from deepspeed_gear.data.dataset import Dataset
from deepspeed_gear.data.dataset_files import DatasetPart
from deepspeed_gear.distributed.control_plane import ControlPlane
from deepspeed_gear.distributed.topology import Topology
from deepspeed_gear.errors import ConfigError, DataError
from deepspeed_gear.store.row_allocator import look_up
from deepspeed_gear.store.table_spec import Shard

NOTHING = Shard(0, 1, 0, 0)
Parts = Mapping[int, Mapping[str, DatasetPart | None]]  # each node's part on disk of each table


@dataclass(frozen=True)
class ShardPlacement:
    """The shards of all tables, and the nodes that hold them."""

    order: tuple[int, ...]  # nodes that hold shards, in the order of the shards
    shards: dict[str, Shard]  # this node's part of each table that is not held as a whole
    spread: frozenset[str]  # tables whose batches are selected by all nodes together
    #: Of each spread table with a data set: first id of each shard, and the number of ids.
    bounds: dict[str, np.ndarray] = field(default_factory=dict, compare=False)
    #: Of each spread table with a capacity that a checkpoint has filled: ids, ascending, the shard
    #: of each, and an id below which there are no others.
    loaded: dict[str, tuple[np.ndarray, np.ndarray, int]] = field(
        default_factory=dict, compare=False
    )

    def shard_of(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Return the shard of each trajectory id of a spread table, -1 for none. [n] ->
        [n], int64.
        """
        if name in self.bounds:
            bounds = self.bounds[name]
            known = (ids >= 0) & (ids < bounds[-1])
            return np.where(known, np.searchsorted(bounds, ids, side="right") - 1, -1)
        shards = np.where(ids >= 0, ids % len(self.order), -1)
        if name in self.loaded:
            known, holders, after = self.loaded[name]
            old = ids < after
            shards[old] = look_up(known, ids[old], holders)
        return shards


def place_tables(
    control_plane: ControlPlane,
    topology: Topology,
    config: GearConfig,
    datasets: Mapping[str, Dataset],
) -> ShardPlacement:
    """Return the placement of all tables' shards. Collective; its errors are raised on
    every rank.
    """
    own = {name: data.part for name, data in datasets.items()} if topology.leads_node else None
    parts = control_plane.all_gather(own)
    by_node = {topology.nodes[rank]: part for rank, part in enumerate(parts) if part is not None}
    return control_plane.attempt(
        "the parts of the tables", lambda: _place(topology, config, datasets, by_node)
    )


def _place(
    topology: Topology, config: GearConfig, datasets: Mapping[str, Dataset], parts: Parts
) -> ShardPlacement:
    holders = topology.holders
    tables = config.resolved_tables
    names = [topology.describe(node) for node in holders]
    replicated = {
        n for n, table in tables.items() if table.data is not None and table.data.replicate
    }
    spread = frozenset(tables) - replicated if len(holders) > 1 else frozenset()
    by_table: dict[str, dict[int, Shard]] = {}
    for name in (name for name in tables if name in datasets):
        replicate = name in replicated
        of_nodes = [parts[node][name] for node in holders]
        dataset = datasets[name]
        if not replicate and dataset.num_trajectories_of_whole < len(holders):
            rule = f"must have a trajectory for each of {len(holders)} nodes"
            remedy = "use fewer nodes"
            held = dataset.num_trajectories_of_whole
            raise ConfigError(f"table {name}", rule, held, f"{remedy}, or replicate it")
        sizes = dataset.lengths * dataset.schema.row_bytes
        bounds = shards_of(sizes, 1) if replicate else non_empty(shards_of(sizes, len(holders)))
        shards = shard_of_node(
            of_nodes, bounds, name=f"table {name}", nodes=names, replicate=replicate
        )
        by_table[name] = dict(zip(holders, shards, strict=True))
    parted = {name for name in by_table if parts[holders[0]][name] is not None}
    order = _order(holders, by_table, parted)
    # A whole table is divided in the order of the others' parts.
    for name in by_table.keys() - parted:
        shards = [by_table[name][node] for node in holders]
        by_table[name] = dict(zip(order, shards, strict=True))
    for name in sorted(spread & set(by_table)):
        if tables[name].group is not None:
            rule = f"must be true for a data set of groups on {len(holders)} nodes"
            remedy = "its parts would divide groups, and a group lies on one node"
            raise ConfigError(f"gear.tables.{name}.data.replicate", rule, False, remedy)
    mine = dict.fromkeys(tables, NOTHING)
    if topology.node in holders:
        empty = Shard(order.index(topology.node), len(order))  # of a table with a capacity
        mine = {
            name: by_table[name][topology.node] if name in by_table else empty for name in spread
        }
    firsts: dict[str, np.ndarray] = {}
    for name in spread & set(by_table):
        ordered = sorted(by_table[name].values(), key=lambda shard: shard.index)
        firsts[name] = np.array([shard.first for shard in ordered] + [ordered[-1].end], np.int64)
    return ShardPlacement(order, mine, spread, firsts)


def _order(
    holders: list[int], by_table: Mapping[str, Mapping[int, Shard]], parted: set[str]
) -> tuple[int, ...]:
    """Return the nodes in the order of their shards: that of the tables that lie on
    them in parts.
    """
    known: dict[tuple[int, ...], str] = {}
    for name, shards in by_table.items():
        if name in parted:
            index = {node: shard.index for node, shard in shards.items()}
            known.setdefault(tuple(sorted(holders, key=index.__getitem__)), name)
    if len(known) > 1:
        rule = "must lie on the nodes in one order"
        remedy = "copy part i of every data set to the same node"
        orders = {name: list(order) for order, name in known.items()}
        raise DataError("the parts of the tables", rule, orders, remedy)
    return next(iter(known), tuple(holders))


def shards_of(sizes: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the first trajectory of each node's shard, and N: contiguous, balanced in bytes. [S +
    1].
    """
    # For sizes [5, 1, 1, 5] and 2 nodes the bounds are [0, 2, 4].
    before = np.concatenate([[0], np.cumsum(sizes)])
    wanted = before[-1] * np.arange(1, num_nodes) / num_nodes
    inner = np.clip(np.searchsorted(before, wanted), 0, len(sizes))
    return np.concatenate([[0], inner, [len(sizes)]]).astype(np.int64)


def non_empty(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the nearest bounds, [count + 1], with a trajectory (of at least as many) in every
    part.
    """
    # Bounds [0, 1, 1, 3] become [0, 1, 2, 3]: less its ordinal, no bound is below the one before.
    ordinals = np.arange(len(bounds))
    spare = np.maximum.accumulate(np.asarray(bounds, np.int64) - ordinals)
    return np.asarray(np.minimum(spare, bounds[-1] - ordinals[-1]) + ordinals)


def shard_of_node(
    dataset_parts: Sequence[DatasetPart | None],
    bounds: NDArray[np.int64],
    *,
    name: str = "the data set",
    nodes: Sequence[str] = (),
    replicate: bool = False,
) -> list[Shard]:
    """Return the shard that each node holds; raises DataError where parts and whole data sets do
    not fit.

    Nodes with whole data sets hold contiguous shards in node order, with bounds [S + 1]. Nodes with
    parts hold these, ordered by part. If they `replicate`, each holds the whole, as one logical
    shard.
    """
    parts = [part for part in dataset_parts if part is not None]
    num_nodes = len(dataset_parts)
    if not parts and replicate:
        return [Shard(0, 1, 0, int(bounds[-1]))] * num_nodes
    if not parts:
        assert len(bounds) == num_nodes + 1, (bounds, num_nodes)
        pairs = enumerate(itertools.pairwise(bounds.tolist()))
        return [Shard(i, num_nodes, first, end) for i, (first, end) in pairs]
    rule = _broken_rule(parts, num_nodes, replicate)
    if rule:
        names = list(nodes) or [f"node {index}" for index in range(num_nodes)]
        held = zip(names, dataset_parts, strict=True)
        lines = [f"  {node}: {'the whole' if part is None else part}" for node, part in held]
        remedy = "give every node the whole data set, or set replicate to false"
        if not replicate:
            remedy = f"`gear split DATASET OUT --nodes {num_nodes}` and copy OUT/part-i to node i"
            remedy += ", or give every node the whole data set"
        raise DataError(name, rule, None, "\n".join([remedy, *lines]))
    return [Shard(part.index, part.count, part.first, part.end) for part in parts]


def _broken_rule(parts: Sequence[DatasetPart], num_nodes: int, replicate: bool) -> str:
    """Return the first rule that the parts of nodes break, or nothing."""
    if replicate:
        return "must be whole on every node where it is replicated"
    if len(parts) < num_nodes:
        return "must be the whole on every node, or a part on every node"
    if len({part.whole for part in parts}) > 1:
        return "must be of one whole on all nodes"
    if {part.count for part in parts} != {len(parts)}:
        return f"must have as many parts as nodes that consume, {len(parts)}"
    if len({part.index for part in parts}) < len(parts):
        return "must be another part on every node"
    ordered = sorted(parts, key=lambda part: part.index)
    if any(a.end != b.first for a, b in itertools.pairwise(ordered)):
        return "must be parts of one split, without gaps or overlaps"
    return ""
