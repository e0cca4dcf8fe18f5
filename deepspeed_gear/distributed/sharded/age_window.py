"""The edge of a window of the newest items, over all nodes."""

from __future__ import annotations

from typing import Final

import numpy as np

from deepspeed_gear.distributed.node_channel import NodeChannel
from deepspeed_gear.sampling.mass_rules import NO_ID, AgeWindow, WindowEdge, newest_of

_PARTS = 64  # parts into which each exchange divides the remaining range of ids


class EdgeKind:
    """Type of a node's largest value."""

    NONE: Final = 0
    INTEGER: Final = 1
    FLOAT: Final = 2


def edge_over_nodes(
    channel: NodeChannel, window: AgeWindow, ids: np.ndarray, counts: np.ndarray, values: np.ndarray | None
) -> WindowEdge:
    """Return the window's edge. Collective over the nodes.

    Args:
        channel: Between the nodes.
        window: Which items are new.
        ids: Of this node's trajectories. [n], int64.
        counts: Items of each. [n], int64.
        values: Of the window's column. [n].
    Cost: about 4 exchanges of 64 words for 10^7 trajectories, however many nodes.
    """
    there = counts > 0
    newest = _newest(channel, None if values is None else values[there])
    oldest = NO_ID if window.newest is None else _oldest(channel, window.newest, ids, counts)
    return WindowEdge(oldest, newest)


def _newest(channel: NodeChannel, values: np.ndarray | None) -> int | float | None:
    if values is None:
        return None
    own = np.zeros(2, np.int64)
    if len(values):
        value = newest_of(values)
        own[0] = EdgeKind.INTEGER if isinstance(value, int) else EdgeKind.FLOAT
        own[1:] = value if isinstance(value, int) else np.array([value], np.float64).view(np.int64)
    found = channel.gather(own)
    known = [
        int(bits) if kind == EdgeKind.INTEGER else float(np.array([bits]).view(np.float64)[0])
        for kind, bits in found.tolist()
        if kind != EdgeKind.NONE
    ]
    return newest_of(np.array(known)) if known else None


def _oldest(channel: NodeChannel, wanted: int, ids: np.ndarray, counts: np.ndarray) -> int:
    """Return the smallest t such that fewer than `wanted` items have larger ids than t."""
    order = np.argsort(ids)
    ordered = ids[order]
    newer = np.concatenate([[0], np.cumsum(counts[order])])  # of those before each place
    low, high = NO_ID, int(channel.gather(np.array([ids.max(initial=NO_ID)])).max())
    while low < high:  # the answer is in [low, high]: after the largest id there is nothing
        step = -(-(high - low) // _PARTS)
        points = np.minimum(low + step * np.arange(_PARTS), high)
        after = newer[-1] - newer[np.searchsorted(ordered, points, side="right")]
        few = channel.gather(after).sum(0) < wanted
        first = int(np.argmax(few)) if few.any() else _PARTS
        if first == 0:
            return low
        high = int(points[first]) if first < _PARTS else high
        low = int(points[first - 1]) + 1
    return low
