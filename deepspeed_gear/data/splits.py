"""Assignment of trajectories to splits: a fixed keyed hash of the id.

The key does not depend on the training seed, so the training split, and the statistics over it, are the
same for every seed, rank and run.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
import torch

from deepspeed_gear.ops.records import RandomPurpose
from deepspeed_gear.ops.reference.select import philox

SPLIT_KEY = 0x6765617273706C69  # "gearspli"
TRAIN = 0


def split_of(ids: np.ndarray, split: Mapping[str, float]) -> np.ndarray:
    """Return the splits of ids, [n], int64 -> [n], uint8: 0 for training, i for the i-th sorted name."""
    if not split:
        return np.zeros(len(ids), np.uint8)
    numbers = torch.from_numpy(np.ascontiguousarray(ids, np.int64))
    high, _ = philox(SPLIT_KEY, numbers, 0, RandomPurpose.SPLIT)
    words = high.numpy().view(np.uint64)
    totals = accumulate(int(split[name] * 2**64) for name in sorted(split))
    thresholds = np.array([min(total, 2**64 - 1) for total in totals], np.uint64)
    index = np.searchsorted(thresholds, words, side="right")
    return np.where(index < len(split), index + 1, 0).astype(np.uint8)
