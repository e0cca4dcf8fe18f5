"""Tianshou: VectorReplayBuffer and PrioritizedVectorReplayBuffer."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tianshou.algorithm import Algorithm
from tianshou.data import (
    Batch,
    HERVectorReplayBuffer,
    PrioritizedVectorReplayBuffer,
    VectorReplayBuffer,
)

from speed import derived, work
from speed.work import Adding, Array, Batches, NotOfferedError, Rows

MOST_ITEMS = 200_000  # they are added by environment and step; more of them take minutes


def version() -> str:
    return version_of("tianshou")


def _add(buffer: Any, rows: Rows, terminated: Array, truncated: Array, envs: Array) -> None:
    buffer.add(
        Batch(
            obs=rows["observation"],
            act=rows["action"],
            rew=rows["reward"],
            terminated=terminated,
            truncated=truncated,
            obs_next=rows["next_observation"],
            info=Batch(),
        ),
        buffer_ids=envs,
    )


class TianshouBatches(Batches):
    def __init__(self, count: int, batch: int, prioritized: bool, fill: int | None = None) -> None:
        if (fill or count) > 1_000_000:
            raise NotOfferedError("takes minutes to fill")
        self.count = count = min(count, MOST_ITEMS)
        num_envs = 8
        if prioritized:
            self._buffer: Any = PrioritizedVectorReplayBuffer(count, num_envs, alpha=0.6, beta=0.4)
        else:
            self._buffer = VectorReplayBuffer(count, num_envs)
        self._batch, envs, never = batch, np.arange(num_envs), np.zeros(num_envs, bool)
        for first in range(0, count if fill is None else fill, num_envs):
            rows = work.steps(first, num_envs)
            _add(self._buffer, rows, rows["done"], never, envs)

    def sample(self) -> Any:
        return self._buffer.sample(self._batch)

    def update(self, found: Any, priorities: Array) -> None:
        self._buffer.update_weight(found[1], priorities)

    def rows(self, found: Any) -> Rows:
        batch = found[0]
        return {
            "observation": batch.obs,
            "next_observation": batch.obs_next,
            "action": batch.act,
            "reward": batch.rew,
            "done": batch.done,
        }

    def save(self, folder: Path) -> None:
        self._buffer.save_hdf5(str(folder / "buffer.hdf5"))

    def load(self, folder: Path) -> None:
        self._buffer = type(self._buffer).load_hdf5(str(folder / "buffer.hdf5"))


transitions = TianshouBatches


class TianshouAdding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        self._envs, self._buffer = np.arange(num_envs), VectorReplayBuffer(capacity, num_envs)

    def add(self, step: Rows) -> None:
        _add(self._buffer, step, step["terminated"], step["truncated"], self._envs)

    def sample(self) -> Any:
        return self._buffer.sample(256)

    def held(self) -> int:
        return len(self._buffer)


adding = TianshouAdding


class TianshouReturns(TianshouBatches):
    def __init__(self, count: int, batch: int) -> None:
        self._batch, self._value, num_envs = batch, 0.0, 10  # of whole trajectories
        count = min(count, MOST_ITEMS)
        self._buffer = VectorReplayBuffer(count, num_envs)
        for rows in derived.trajectory_steps(count, num_envs):
            _add(self._buffer, rows, rows["done"], np.zeros(num_envs, bool), np.arange(num_envs))

    def _bootstrap(self, buffer: Any, at: Array) -> torch.Tensor:
        """Return the values of the observations after the returns; a network's are read from them."""
        self._following = buffer[at].obs_next
        return torch.full((len(at), 1), self._value, dtype=torch.float64)

    def sample(self) -> Any:
        batch, index = self._buffer.sample(self._batch)
        return self._returns(batch, index), index

    def _returns(self, batch: Any, index: Array) -> Any:
        return Algorithm.compute_nstep_return(
            batch, self._buffer, index, self._bootstrap, derived.GAMMA, derived.N
        )

    def rows(self, found: Any) -> Rows:
        batch, index = found
        total = batch.returns.numpy().copy()
        self._value = 1.0
        discount = self._returns(Batch(batch, copy=True), index).returns.numpy() - total
        self._value = 0.0
        return {
            "observation": batch.obs,
            "return": total,
            "discount": discount,
            "next_observation": self._following,
        }


n_step = TianshouReturns


class TianshouGoals(TianshouBatches):
    def __init__(self, count: int, batch: int) -> None:
        num_envs = 8
        self._batch = batch
        self._buffer = HERVectorReplayBuffer(
            count, num_envs, compute_reward_fn=derived.reward, horizon=derived.HORIZON, future_k=5.0
        )
        for now, following, rest in derived.goal_steps(count, num_envs):
            states = {"observation": Batch(now), "next_observation": Batch(following)}
            never = np.zeros(num_envs, bool)
            _add(self._buffer, {**rest, **states}, rest["done"], never, np.arange(num_envs))

    def rows(self, found: Any) -> Rows:
        batch = found[0]
        return {
            "observation": batch.obs.observation,
            "next_observation": batch.obs_next.observation,
            "reward": batch.rew,
            "goal": batch.obs.desired_goal,
        }


hindsight = TianshouGoals
