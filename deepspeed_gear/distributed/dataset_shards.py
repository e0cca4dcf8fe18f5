"""Shards of a data set by node. Pure: every rank computes the same."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.dataset_part import DatasetPart
from deepspeed_gear.errors import DataError
from deepspeed_gear.store.table_spec import Shard

_SHARED = "or give every node the whole data set"


def non_empty(bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the nearest bounds with at least one trajectory in every part.

    Args:
        bounds: First trajectory of each part, and their number; at least as many trajectories as parts.
            [count + 1], int64.
    """
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
    """Return the shard that each node holds.

    Nodes with whole data sets hold contiguous shards in node order. Nodes with parts hold these: shards are
    ordered by part, for any order of the nodes.

    Args:
        dataset_parts: Part on the disk of each consuming node, in node order; None for the whole. [S].
        bounds: First trajectory of each shard, and their number, where all nodes have the whole. [S + 1],
            int64. Ignored for parts.
        name: Of the data set, for error texts.
        nodes: Names of the nodes, for error texts; their ordinals unless given.
        replicate: Every node holds the whole, as one logical shard.
    Returns:
        One shard per node, in node order; equal ones where they replicate.
    Raises:
        DataError: Some nodes have parts and others the whole, parts are not of one whole or are not all of
            them, or there are parts where every node must hold the whole.
    """
    if all(part is None for part in dataset_parts):
        return _shards_of_wholes(len(dataset_parts), bounds, replicate)
    rule = _broken_rule(dataset_parts, replicate)
    if rule:
        raise DataError(name, rule, None, _remedy(dataset_parts, nodes, replicate))
    parts = [part for part in dataset_parts if part is not None]
    return [Shard(part.index, part.count, part.first, part.end) for part in parts]


def _shards_of_wholes(num_nodes: int, bounds: NDArray[np.int64], replicate: bool) -> list[Shard]:
    if replicate:
        return [Shard(0, 1, 0, int(bounds[-1]))] * num_nodes
    assert len(bounds) == num_nodes + 1, (bounds, num_nodes)
    return [Shard(i, num_nodes, int(bounds[i]), int(bounds[i + 1])) for i in range(num_nodes)]


def _broken_rule(dataset_parts: Sequence[DatasetPart | None], replicate: bool) -> str:
    """Return the first rule that parts break, or nothing."""
    parts = [part for part in dataset_parts if part is not None]
    if replicate:
        return "must be whole on every node where it is replicated"
    if len(parts) < len(dataset_parts):
        return "must be the whole on every node, or a part on every node"
    if len({part.whole for part in parts}) > 1:
        return "must be of one whole on all nodes"
    counts = {part.count for part in parts}
    if counts != {len(parts)}:
        return f"must have as many parts as nodes that consume, {len(parts)}"
    if len({part.index for part in parts}) < len(parts):
        return "must be another part on every node"
    ordered = sorted(parts, key=lambda part: part.index)
    if any(a.end != b.first for a, b in itertools.pairwise(ordered)):
        return "must be parts of one split, without gaps or overlaps"
    return ""


def _remedy(dataset_parts: Sequence[DatasetPart | None], nodes: Sequence[str], replicate: bool) -> str:
    names = list(nodes) or [f"node {index}" for index in range(len(dataset_parts))]
    lines = [
        f"  {node}: {'the whole' if part is None else part}"
        for node, part in zip(names, dataset_parts, strict=True)
    ]
    split = f"`gear split DATASET OUT --nodes {len(names)}` and copy OUT/part-i to node i, {_SHARED}"
    advice = "give every node the whole data set, or set replicate to false" if replicate else split
    return "\n".join([advice, *lines])
