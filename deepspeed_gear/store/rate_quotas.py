"""Rate quotas: items that each node's writers may add, where nodes share a table with a rate limiter. Pure.

A node's writers may add until it has admitted as many items as its quota. The rate limit holds for all nodes
together as long as the quotas sum to no more than all nodes may ever have added. So a node may raise its
quota only by its part of the pool that no node holds, and the other nodes learn of it in the next exchange.
A node returns what it does not use in the next exchange, before it reports its quota.
"""

from __future__ import annotations

from collections.abc import Sequence


def kept(admitted: int, quota: int, gives_all: bool) -> int:
    """Return the quota that a node keeps when it begins an exchange.

    Its writers go on during the exchange, so it keeps half of what they have left. It keeps nothing where
    samplers wait (the exchange is short): then even the longest trajectory must be admitted on some node.

    Args:
        admitted: Items that were added or reserved.
        quota: How many its writers may add, including those.
        gives_all: Whether samplers wait.
    """
    return admitted if gives_all else max(admitted, admitted + (quota - admitted) // 2)


def divide(pool: int, wanted: Sequence[int], turn: int) -> list[int]:
    """Divide a pool of items that may be added among nodes.

    Equally among the nodes whose writers wait, or among all. If a part is too small for what one of them
    adds at once, one node receives the pool; each node is first in turn.

    Args:
        pool: Items.
        wanted: The most items that a waiting writer of each node adds at once; 0: none waits. [S].
        turn: Number of the exchange.
    Returns:
        Each node's part; their sum is the pool. [S].
    """
    count = len(wanted)
    order = [(turn + i) % count for i in range(count)]
    order = [node for node in order if wanted[node]] or order
    parts = [0] * count
    part, rest = divmod(pool, len(order))
    if any(wanted[node] > part for node in order):
        part, rest = 0, 0
        parts[order[0]] = pool
    for i, node in enumerate(order):
        parts[node] += part + (i < rest)
    return parts
