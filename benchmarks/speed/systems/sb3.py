"""Stable-Baselines3: ReplayBuffer, whose copy is CleanRL's."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from speed import work
from speed.work import Adding, Batches, NotOfferedError, Rows

OBSERVATION, ACTION = spaces.Box(-np.inf, np.inf, (work.OBSERVATION,)), spaces.Box(-1, 1, (work.ACTION,))


def version() -> str:
    return version_of("stable_baselines3")


class Sb3Batches(Batches):
    def __init__(self, count: int, batch: int, fill: int | None) -> None:
        num_envs = work.EPISODE  # filled from as many environments, as adding one by one takes minutes
        self._batch, self._buffer = batch, ReplayBuffer(count, OBSERVATION, ACTION, n_envs=num_envs)
        infos = [{"TimeLimit.truncated": False}] * num_envs
        for first in range(0, fill or count, num_envs):
            rows = work.steps(first, num_envs)
            self._buffer.add(
                rows["observation"],
                rows["next_observation"],
                rows["action"],
                rows["reward"],
                rows["done"],
                infos,
            )

    def sample(self) -> Any:
        return self._buffer.sample(self._batch)

    def rows(self, found: Any) -> Rows:
        return {
            "observation": found.observations.numpy(),
            "next_observation": found.next_observations.numpy(),
            "action": found.actions.numpy(),
            "reward": found.rewards.numpy(),
            "done": found.dones.numpy(),
        }

    def save(self, folder: Path) -> None:
        save_to_pkl(folder / "buffer.pkl", self._buffer)

    def load(self, folder: Path) -> None:
        self._buffer = load_from_pkl(folder / "buffer.pkl")


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Batches:
    if prioritized:
        raise NotOfferedError
    return Sb3Batches(count, batch, fill)


class Sb3Adding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        self._envs = num_envs
        self._buffer = ReplayBuffer(capacity, OBSERVATION, ACTION, n_envs=num_envs)

    def add(self, step: Rows) -> None:
        infos = [{"TimeLimit.truncated": cut} for cut in step["truncated"].tolist()]
        self._buffer.add(
            step["observation"],
            step["next_observation"],
            step["action"],
            step["reward"],
            step["terminated"] | step["truncated"],
            infos,
        )

    def sample(self) -> Any:
        return self._buffer.sample(256)

    def held(self) -> int:
        return int(self._buffer.size() * self._envs)


adding = Sb3Adding
