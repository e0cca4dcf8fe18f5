"""Which shard has a trajectory, and reports that name it."""

from __future__ import annotations

import numpy as np

from deepspeed_gear.distributed.shard_placement import ShardPlacement


def test_ids_that_a_checkpoint_has_put_elsewhere() -> None:
    """Those that it held lie where it put them, later ones where they are added, the others nowhere."""
    placement = ShardPlacement((0, 1, 2), {}, frozenset({"main"}))
    ids = np.array([-1, 0, 1, 4, 5, 8, 9, 10])
    assert placement.shard_of("main", ids).tolist() == [-1, 0, 1, 1, 2, 2, 0, 1]
    placement.loaded["main"] = np.array([1, 4, 8]), np.array([0, 0, 2]), 9
    assert placement.shard_of("main", ids).tolist() == [-1, -1, 0, 0, -1, 2, 0, 1]
    placement.loaded["main"] = np.empty(0, np.int64), np.empty(0, np.int64), 9
    assert placement.shard_of("main", ids).tolist() == [-1, -1, -1, -1, -1, -1, 0, 1]
