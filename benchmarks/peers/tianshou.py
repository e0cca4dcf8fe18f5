"""Tianshou: VectorReplayBuffer, PrioritizedVectorReplayBuffer and HERVectorReplayBuffer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed import derived
from tianshou.algorithm import Algorithm
from tianshou.data import (
    Batch,
    HERVectorReplayBuffer,
    PrioritizedVectorReplayBuffer,
    VectorReplayBuffer,
)

from peers.interface import Array, Buffer, NotOfferedError, Rows, Steps, System


def _add(buffer: Any, rows: Rows) -> None:
    count = len(rows["done"])
    batch = Batch(
        obs=rows["observation"],
        act=rows["action"],
        rew=rows["reward"],
        terminated=rows["done"],
        truncated=rows.get("truncated", np.zeros(count, bool)),
        obs_next=rows["next_observation"],
        info=Batch(),
    )
    buffer.add(batch, buffer_ids=np.arange(count))


class TianshouSteps(Buffer):
    def __init__(self, need: Steps) -> None:
        if need.prioritized and need.normalize == "table":
            raise NotOfferedError
        kind: Any = PrioritizedVectorReplayBuffer if need.prioritized else VectorReplayBuffer
        options = {"alpha": need.alpha, "beta": need.beta} if need.prioritized else {}
        self._need = need
        self._value = 0.0
        self._buffer = kind(need.capacity, need.num_envs, **options)
        np.random.seed(need.seed)

    def add(self, rows: Rows) -> None:
        _add(self._buffer, rows)

    def sample(self) -> Any:
        batch, index = self._buffer.sample(self._need.batch)
        return (batch if self._need.n_step == 1 else self._returns(batch, index)), index

    def _returns(self, batch: Any, index: Array) -> Any:
        need = self._need
        return Algorithm.compute_nstep_return(
            batch, self._buffer, index, self._bootstrap, need.gamma, need.n_step
        )

    def _bootstrap(self, buffer: Any, at: Array) -> torch.Tensor:
        """Return the values of the observations after the returns; a network's are read
        from them.
        """
        self._following = buffer[at].obs_next
        return torch.full((len(at), 1), self._value, dtype=torch.float64)

    def update(self, found: Any, priorities: Array) -> None:
        self._buffer.update_weight(found[1], priorities)

    def rows(self, found: Any) -> Rows:
        batch, index = found
        rows = {
            "observation": batch.obs,
            "next_observation": batch.obs_next,
            "action": batch.act,
            "reward": batch.rew,
            "done": batch.terminated,
        }
        if self._need.prioritized:
            rows["weight"] = batch.weight
        if self._need.n_step > 1:
            total = batch.returns.numpy().copy()
            self._value = 1.0
            discount = self._returns(Batch(batch, copy=True), index).returns.numpy() - total
            self._value = 0.0
            rows |= {"return": total, "discount": discount, "next_observation": self._following}
        return rows

    def __len__(self) -> int:
        return len(self._buffer)

    def save(self, folder: Path) -> None:
        self._buffer.save_hdf5(str(folder / "buffer.hdf5"))

    def load(self, folder: Path) -> None:
        self._buffer = type(self._buffer).load_hdf5(str(folder / "buffer.hdf5"))


class TianshouGoals(Buffer):
    def __init__(self, episodes: Iterable[Rows], count: int, batch: int) -> None:
        parts = list(episodes)
        num_envs = min(8, max(1, len(parts) // 10))
        horizon = len(parts[0]["done"])
        self._batch = batch
        self._buffer = HERVectorReplayBuffer(
            count, num_envs, compute_reward_fn=derived.reward, horizon=horizon, future_k=5.0
        )
        for now, following, rest in derived.goal_steps(parts, num_envs):
            _add(
                self._buffer,
                {**rest, "observation": Batch(now), "next_observation": Batch(following)},
            )

    def sample(self) -> Any:
        return self._buffer.sample(self._batch)

    def rows(self, found: Any) -> Rows:
        batch = found[0]
        return {
            "observation": batch.obs.observation,
            "next_observation": batch.obs_next.observation,
            "reward": batch.rew,
            "goal": batch.obs.desired_goal,
        }


class Tianshou(System):
    fills = 8
    most_items = 200_000
    kinds = frozenset(("transitions", "n_step", "hindsight", "adding", "calls"))
    steps = TianshouSteps
    goals = TianshouGoals


SYSTEM = Tianshou("tianshou")
