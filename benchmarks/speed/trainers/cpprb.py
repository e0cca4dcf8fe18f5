"""cpprb: MPPrioritizedReplayBuffer, in shared memory; its documentation has one process that
samples.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import cpprb
import numpy as np
from peers.cpprb import CpprbSteps, columns_of
from peers.interface import Buffer, Steps, System

from speed import team, work


class Shared(team.Shared):
    def __init__(self, processes: int, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        timed = cpprb.MPPrioritizedReplayBuffer(
            count, columns_of(work.steps(0, 1)), alpha=0.6, ctx=context
        )
        for first in range(0, count, System.fills):
            timed.add(**work.steps(first, System.fills))
        number = {"number": {"dtype": np.int64}}
        known = cpprb.MPPrioritizedReplayBuffer(team.ITEMS, number, alpha=1.0, ctx=context)
        known.add(number=np.arange(team.ITEMS), priorities=team.SHARES)
        self.given = known, timed


class Trainer(team.Trainer):
    def __init__(self, rank: int, processes: int, given: Any) -> None:
        self._rank = rank
        self._buffers = given

    def open(self, is_timed: bool, trainers: int, batch: int) -> Buffer:
        buffer = self._buffers[is_timed]
        if (
            self._rank == 0 and not is_timed
        ):  # ignored for items that no one has sampled since they were added
            buffer.update_priorities(np.arange(team.ITEMS), team.SHARES)
        return CpprbSteps(Steps(0, batch=batch, prioritized=True, beta=0.4, seed=None), buffer)
