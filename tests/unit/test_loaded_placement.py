"""Which shard has a trajectory, and reports that name it."""

from __future__ import annotations

import numpy as np

from deepspeed_gear.ops.constants import REPORT_WORDS, U_GENERATION, U_SLOT
from deepspeed_gear.parallel import wire
from deepspeed_gear.replay.placement import Placement


def test_ids_that_a_checkpoint_has_put_elsewhere() -> None:
    """Those that it held lie where it put them, later ones where they are added, the others nowhere."""
    placement = Placement((0, 1, 2), {}, frozenset({"main"}))
    ids = np.array([-1, 0, 1, 4, 5, 8, 9, 10])
    assert placement.shard_of("main", ids).tolist() == [-1, 0, 1, 1, 2, 2, 0, 1]
    placement.loaded["main"] = np.array([1, 4, 8]), np.array([0, 0, 2]), 9
    assert placement.shard_of("main", ids).tolist() == [-1, -1, 0, 0, -1, 2, 0, 1]
    placement.loaded["main"] = np.empty(0, np.int64), np.empty(0, np.int64), 9
    assert placement.shard_of("main", ids).tolist() == [-1, -1, -1, -1, -1, -1, 0, 1]


def test_a_report_by_id_of_an_own_trajectory_keeps_its_id() -> None:
    reports = np.zeros((2, REPORT_WORDS), np.int64)
    reports[:, U_SLOT] = [2 << wire.SHARD_BITS | 7, 2 << wire.SHARD_BITS | wire.ANY_SLOT]
    reports[:, U_GENERATION] = [1, 40]
    local = wire.local_reports(reports)
    assert local[:, [U_SLOT, U_GENERATION]].tolist() == [[7, 1], [-1, 40]]
