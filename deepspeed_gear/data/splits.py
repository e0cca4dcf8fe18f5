"""Assignment of trajectories to splits by a keyed hash of the id, and the check of a split.

The key does not depend on the training seed, so the training split, and the statistics over it, are
the same for every seed, rank and run.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np

from deepspeed_gear.errors import ConfigError
from deepspeed_gear.ops.philox import philox
from deepspeed_gear.ops.records import RandomPurpose

SPLIT_KEY = 0x6765617273706C69  # "gearspli"
TRAIN = 0
_PURPOSE = np.array([[RandomPurpose.SPLIT]], np.uint64)


def split_of(ids: np.ndarray, split: Mapping[str, float]) -> np.ndarray:
    """Return the split of each trajectory id: 0 for training, i for the i-th name in sorted order.

    Args:
        ids: [n], int64.
    Returns:
        [n], uint8.
    """
    if not split:
        return np.zeros(len(ids), np.uint8)
    # A uniform 64-bit word for each id. With shares 0.1 and 0.2, words below 0.1 * 2^64 are in the
    # first part, those below 0.3 * 2^64 in the second, and the others are for training.
    high, low, *_ = philox(SPLIT_KEY, np.asarray(ids, np.int64).view(np.uint64), 0, _PURPOSE)
    words = (high << np.uint64(32) | low)[0]
    totals = accumulate(int(split[name] * 2**64) for name in sorted(split))
    thresholds = np.array([min(total, 2**64 - 1) for total in totals], np.uint64)
    index = np.searchsorted(thresholds, words, side="right")
    return np.where(index < len(split), index + 1, 0).astype(np.uint8)


def are_for_training(first: int, end: int, split: Mapping[str, float]) -> np.ndarray:
    """Return which of the trajectory ids [first, end) are for training. [end - first], bool."""
    return np.asarray(split_of(np.arange(first, end, dtype=np.int64), split) == TRAIN)


def check_split(split: Mapping[str, float]) -> dict[str, float]:
    """Return a split sorted by name; ConfigError if it is malformed."""
    for name, share in split.items():
        if not name or name == "train" or not 0 < share < 1:
            raise ConfigError(
                f"split.{name}",
                "must name a held-out part (not train) and its share in (0, 1)",
                share,
                'for example {"eval": 0.05}',
            )
    if sum(split.values()) >= 1:
        raise ConfigError(
            "split", "must leave a share for training", dict(split), "use smaller shares"
        )
    return {name: float(split[name]) for name in sorted(split)}
