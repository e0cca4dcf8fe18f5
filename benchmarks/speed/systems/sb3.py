"""Stable-Baselines3: ReplayBuffer, whose copy is CleanRL's."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.vec_env import DummyVecEnv

from speed import derived, work
from speed.work import Adding, Array, Batches, NotOfferedError, Rows

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


class Sb3Returns(Sb3Batches):
    def __init__(self, count: int, batch: int) -> None:
        num_envs = count // work.EPISODE  # each adds a trajectory
        self._batch = batch
        self._buffer = NStepReplayBuffer(
            count, OBSERVATION, ACTION, n_envs=num_envs, n_steps=derived.N, gamma=derived.GAMMA
        )
        infos = [{"TimeLimit.truncated": False}] * num_envs
        names = ("observation", "next_observation", "action", "reward", "done")
        for step in derived.trajectory_steps(count, num_envs):
            self._buffer.add(*(step[name] for name in names), infos)

    def rows(self, found: Any) -> Rows:
        discount = (found.discounts * (1 - found.dones)).numpy()
        rows = super().rows(found)
        return {**rows, "return": rows["reward"], "discount": discount}


n_step = Sb3Returns


class Task(gymnasium.Env[Any, Any]):
    """The part of an environment that relabelling calls."""

    observation_space = spaces.Dict(
        {
            "observation": OBSERVATION,
            **{
                name: spaces.Box(-np.inf, np.inf, (derived.GOAL,))
                for name in ("achieved_goal", "desired_goal")
            },
        }
    )
    action_space = ACTION

    def compute_reward(self, achieved: Array, wanted: Array, _: Any) -> Array:
        return derived.reward(achieved, wanted)


class Sb3Goals(Batches):
    def __init__(self, count: int, batch: int) -> None:
        num_envs = count // derived.HORIZON // 10
        self._batch = batch
        self._buffer = HerReplayBuffer(
            count, Task.observation_space, ACTION, DummyVecEnv([Task]), n_envs=num_envs, n_sampled_goal=4
        )
        infos = [{"TimeLimit.truncated": False}] * num_envs
        for now, following, rest in derived.goal_steps(count, num_envs):
            self._buffer.add(now, following, rest["action"], rest["reward"], rest["done"], infos)

    def sample(self) -> Any:
        return self._buffer.sample(self._batch)

    def rows(self, found: Any) -> Rows:
        return {
            "observation": found.observations["observation"].numpy(),
            "next_observation": found.next_observations["observation"].numpy(),
            "reward": found.rewards.numpy(),
            "goal": found.observations["desired_goal"].numpy(),
        }


hindsight = Sb3Goals
