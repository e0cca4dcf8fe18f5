"""TorchRL: a RayReplayBuffer, an actor that the trainers share."""

from __future__ import annotations

from functools import partial
from typing import Any

import ray
from peers.interface import Buffer
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RayReplayBuffer,
    TensorDictReplayBuffer,
)

from speed import team
from speed.trainers.torchrl_rpc import RemoteBatches, fill

START = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}


class Shared(team.Shared):
    def __init__(self, processes: int, count: int) -> None:
        address = ray.init(num_cpus=processes + 2, **START).address_info["address"]
        self._buffers = [
            RayReplayBuffer(
                replay_buffer_cls=TensorDictReplayBuffer,
                storage=partial(LazyTensorStorage, capacity),
                sampler=partial(PrioritizedSampler, capacity, alpha=alpha, beta=0.4),
            )
            for capacity, alpha in ((team.ITEMS, 1.0), (count, 0.6))
        ]
        fill(self._buffers[True], self._buffers[False], count)
        self.given = address, ray.cloudpickle.dumps([one.client() for one in self._buffers])

    def close(self) -> None:
        for one in self._buffers:
            one.close()
        ray.shutdown()


class Trainer(team.Trainer):
    def __init__(self, rank: int, processes: int, given: Any) -> None:
        ray.init(given[0], log_to_driver=False, logging_level="error")
        self._rank = rank
        self._clients = ray.cloudpickle.loads(given[1])

    def open(self, is_timed: bool, trainers: int, batch: int) -> Buffer:
        client = self._clients[is_timed]
        made = RemoteBatches(lambda: client, batch)
        if self._rank == 0 and not is_timed:
            made.restore()
        return made

    def close(self) -> None:
        ray.shutdown()
