"""The items of highest priority over several shards. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def merge_top(
    priorities: Sequence[np.ndarray], items: Sequence[np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the items of highest priority over all shards.

    Args:
        priorities: Of each shard's min(count, N_s) candidates. [n_s] each.
        items: Their items within the shard, -1 for none. [n_s] each, int64.
        count: How many are wanted.
    Returns:
        Shard and item of each, by falling priority, equal ones in stored order; fewer if there are not so
        many. [n], int64, and [n], int64.
    """
    shards = np.repeat(np.arange(len(items)), [len(of_shard) for of_shard in items])
    every, values = np.concatenate(items), np.concatenate(priorities)
    order = np.lexsort((every, shards, -values.astype(np.float64)))
    order = order[every[order] >= 0][:count]
    return shards[order], every[order]
