"""cpprb: MPPrioritizedReplayBuffer, in shared memory; its documentation has one process that samples."""

from __future__ import annotations

import multiprocessing
from typing import Any

import cpprb
import numpy as np

from speed import team, work
from speed.systems.cpprb import CHUNK, CpprbBatches, columns_of
from speed.work import Batches


class Shared(team.Shared):
    def __init__(self, processes: int, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        timed = cpprb.MPPrioritizedReplayBuffer(count, columns_of(work.steps(0, 1)), alpha=0.6, ctx=context)
        for first in range(0, count, CHUNK):
            timed.add(**work.steps(first, CHUNK))
        number = {"number": {"dtype": np.int64}}
        known = cpprb.MPPrioritizedReplayBuffer(team.ITEMS, number, alpha=1.0, ctx=context)
        known.add(number=np.arange(team.ITEMS), priorities=team.SHARES)
        self.given = known, timed


share = Shared


class Trainer(team.Trainer):
    def __init__(self, rank: int, processes: int, given: Any) -> None:
        self._rank, self._buffers = rank, given

    def open(self, is_timed: bool, trainers: int, batch: int) -> Batches:
        buffer = self._buffers[is_timed]
        if (
            self._rank == 0 and not is_timed
        ):  # ignored for items that no one has sampled since they were added
            buffer.update_priorities(np.arange(team.ITEMS), team.SHARES)
        return CpprbBatches(buffer, batch, prioritized=True)
