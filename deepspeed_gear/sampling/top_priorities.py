"""Top-k: the items of highest priority, of one store or over several shards. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def merge_top(
    priorities: Sequence[np.ndarray], items: Sequence[np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of highest priority over all shards.

    Args:
        priorities: Of each shard's min(count, N_s) candidates. [n_s] each.
        items: Their items within the shard, -1 for none. [n_s] each, int64.
        count: How many to return.
    Returns:
        Shard and item of each, by falling priority, equal ones in stored order; fewer if there are fewer
        items. [n], int64, and [n], int64.
    """
    shards = np.repeat(np.arange(len(items)), [len(of_shard) for of_shard in items])
    every, values = np.concatenate(items), np.concatenate(priorities)
    order = np.lexsort((every, shards, -values.astype(np.float64)))
    order = order[every[order] >= 0][:count]
    return shards[order], every[order]


def oldest_of_equal(
    items: np.ndarray, values: np.ndarray, drawable: np.ndarray, ids_of: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Reorder items by falling priority so that of equal ones those of the lowest ids come first.

    In a table with a capacity a newer trajectory may lie before an older one.

    Args:
        items: At least one. [n], int64.
        values: Priorities of all items. [N], float32.
        drawable: Which of them have a mass. [N], bool.
        ids_of: Items -> ids of their trajectories. [m] -> [m], int64.
    Returns:
        [n], int64.
    """
    least = values[items[-1]]
    equal = np.nonzero((values == least) & drawable)[0]
    above = items[values[items] > least]
    ids, wanted = ids_of(equal), len(items) - len(above)
    equal = equal[ids <= np.partition(ids, wanted - 1)[wanted - 1]]
    found = np.concatenate([above, equal])
    return np.asarray(found[np.lexsort((found, ids_of(found), -values[found]))][: len(items)])


def merge_by_id(
    priorities: Sequence[np.ndarray], ids: Sequence[np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of highest priority over shards; equal ones by trajectory id, then by index.

    Args:
        priorities: Of each shard's candidates. [n_s] each.
        ids: Their trajectories. [n_s] each, int64.
        count: Most items to return.
    Returns:
        Shard and index among its candidates. [n] each, int64.
    """
    shards = np.repeat(np.arange(len(ids)), [len(of_shard) for of_shard in ids])
    index = np.concatenate([np.arange(len(of_shard)) for of_shard in ids])
    values, every = np.concatenate(priorities).astype(np.float64), np.concatenate(ids)
    order = np.lexsort((index, every, -values))[:count]
    return shards[order], index[order]
