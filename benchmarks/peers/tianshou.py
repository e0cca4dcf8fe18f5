"""Tianshou: VectorReplayBuffer and PrioritizedVectorReplayBuffer."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tianshou.algorithm import Algorithm
from tianshou.data import Batch, PrioritizedVectorReplayBuffer, VectorReplayBuffer

from peers.interface import Array, Moment, NotOfferedError, Sampled, StepBuffer, Steps, System


class TianshouSteps(StepBuffer):
    def __init__(self, need: Steps) -> None:
        if need.prioritized and need.normalize == "table":
            raise NotOfferedError
        self._need = need
        self._class: Any = PrioritizedVectorReplayBuffer if need.prioritized else VectorReplayBuffer
        options = {"alpha": need.alpha, "beta": need.beta} if need.prioritized else {}
        self._buffer = self._class(need.capacity, need.num_envs, **options)
        np.random.seed(need.seed)

    def add(self, moment: Moment) -> None:
        count = len(moment.obs)
        batch = Batch(
            obs=moment.obs[:, None],
            act=np.zeros(count, np.int64),
            rew=moment.reward,
            terminated=moment.terminated,
            truncated=moment.truncated,
            obs_next=moment.next_obs[:, None],
            info=np.array([{}] * count),
        )
        self._buffer.add(batch, buffer_ids=np.arange(count))

    def sample(self) -> Sampled:
        need, buffer = self._need, self._buffer
        batch, index = buffer.sample(need.batch)
        weight = batch.weight if need.prioritized else np.ones(len(index))
        seen: list[Array] = []

        def value(number: float) -> Array:
            def values(_: Any, at: Array) -> torch.Tensor:
                seen[:] = [at]
                return torch.full((len(at), 1), number)

            found = Algorithm.compute_nstep_return(
                Batch(batch, copy=True), buffer, index, values, need.gamma, need.n_step
            )
            return found.returns.numpy()[:, 0]

        reward = value(0.0)
        discount = value(1.0) - reward
        return Sampled(batch.obs[:, 0], buffer[seen[0]].obs_next[:, 0], reward, discount, weight, index)

    def update(self, sampled: Sampled, priorities: Array) -> None:
        self._buffer.update_weight(sampled.handle, priorities)

    def __len__(self) -> int:
        return len(self._buffer)

    def save(self, folder: Path) -> None:
        self._buffer.save_hdf5(str(folder / "buffer.hdf5"))

    def load(self, folder: Path) -> None:
        self._buffer = self._class.load_hdf5(str(folder / "buffer.hdf5"))


class Tianshou(System):
    name = "Tianshou"

    def version(self) -> str:
        return version("tianshou")

    def steps(self, need: Steps) -> StepBuffer:
        return TianshouSteps(need)


SYSTEM = Tianshou()
