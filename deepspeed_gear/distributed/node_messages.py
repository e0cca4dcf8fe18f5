"""Encodings of messages between nodes, in words of 8 bytes: sizes of records, and the best of all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MOST = (1 << 62) - 1  # no mass is greater
PACKED_REPORT_WORDS = 3


def resolution_words(has_steps: bool) -> int:
    """Return the number of words of a packed resolution."""
    return 5 if has_steps else 4


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
