"""How far the writers of each node may go where several nodes hold a table with a rate. Pure.

A node's writers may add until it has admitted as many items as its quota. A rate holds for all nodes
together as long as the sum of the reaches is no more than what all may ever have added. So a node may raise
its quota only by its part of what no node has; the others know nothing of it before the next exchange. What
it does not use it gives back in the next exchange, before it says what it has.
"""

from __future__ import annotations

from collections.abc import Sequence


def kept(admitted: int, quota: int, gives_all: bool) -> int:
    """Return the quota that a node keeps when it begins an exchange.

    Its writers go on meanwhile, so it keeps half of what they have left; nothing where samplers wait, and the
    exchange is short: then even the longest trajectory must get through somewhere.

    Args:
        admitted: Items that were added or for which room is reserved.
        quota: How many its writers may add, those included.
        gives_all: Whether samplers wait.
    """
    return admitted if gives_all else max(admitted, admitted + (quota - admitted) // 2)


def divide(pool: int, wanted: Sequence[int], turn: int) -> list[int]:
    """Divide what may be added among nodes.

    Equally among those that want something, or among all. If a part is too short for what one of them wants
    at once, one gets everything; each is the first in turn.

    Args:
        pool: Items.
        wanted: The most that a writer of each node has wanted to add at once; 0: none has. [S].
        turn: Number of the exchange.
    Returns:
        Of each node; their sum is the pool. [S].
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
