"""This project: a Replay for the ranks of a gloo group, which share one store."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch.distributed as dist
from peers.gear import PRIORITIZED, GearBatches, add_transitions, transition_options
from peers.interface import Buffer

from speed import team


class Shared(team.Shared):
    def __init__(self, processes: int, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.given = self._folder.name, count

    def close(self) -> None:
        self._folder.cleanup()


class Trainer(team.Trainer):
    def __init__(self, rank: int, processes: int, given: Any) -> None:
        self._rank = rank
        (self._folder, self._count) = given

    def open(self, is_timed: bool, trainers: int, batch: int) -> Buffer:
        if not dist.is_initialized() or dist.get_world_size() != trainers:
            self.close()
            self._opened: list[Buffer] = []
            where = f"file://{self._folder}/{trainers}"
            dist.init_process_group("gloo", where, rank=self._rank, world_size=trainers)
        if is_timed:
            made = GearBatches(
                count=self._count, micro_batch_size=batch, **transition_options(True)
            )
            if self._rank == 0:
                add_transitions(made.replay, self._count)
        else:
            sampler = {**PRIORITIZED, "unit": "trajectory", "alpha": 1.0}
            made = GearBatches(
                {"number": {"dtype": "int64"}},
                team.ITEMS,
                1,
                sampler=sampler,
                micro_batch_size=batch,
            )
            if self._rank == 0:
                for number in range(team.ITEMS):
                    made.replay.add({"number": np.array([number])})
                made.replay.set_priorities(range(team.ITEMS), team.SHARES)
        dist.barrier()
        self._opened.append(made)
        return made

    def close(self) -> None:
        if dist.is_initialized():
            for made in self._opened:
                made.close()
            dist.destroy_process_group()
