"""Stable-Baselines3: ReplayBuffer, whose copy is CleanRL's; NStepReplayBuffer and
HerReplayBuffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from speed import derived, work
from stable_baselines3 import HerReplayBuffer
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl
from stable_baselines3.common.vec_env import DummyVecEnv

from peers.interface import Array, Buffer, NotOfferedError, Rows, Steps, System


def _box(rows: Array, bound: float = np.inf) -> spaces.Box:
    return spaces.Box(-bound, bound, rows.shape[1:])


class Sb3Steps(Buffer):
    def __init__(self, need: Steps) -> None:
        if need.prioritized:
            raise NotOfferedError
        action = need.columns["action"]
        actions = spaces.Discrete(2) if action.dtype.kind == "i" else _box(action, 1)
        spaces_of = _box(need.columns["observation"]), actions
        kind = ReplayBuffer
        options = {"n_envs": need.num_envs}
        if need.n_step > 1:
            kind = NStepReplayBuffer
            options = {**options, "n_steps": need.n_step, "gamma": need.gamma}
        self._need = need
        self._buffer = kind(need.capacity, *spaces_of, **options)
        self._going = [{"TimeLimit.truncated": False}] * need.num_envs
        np.random.seed(need.seed)

    def add(self, rows: Rows) -> None:
        ends = rows["done"]
        infos = self._going
        if "truncated" in rows:
            ends = ends | rows["truncated"]
            infos = [{"TimeLimit.truncated": cut} for cut in rows["truncated"].tolist()]
        states = rows["observation"], rows["next_observation"]
        self._buffer.add(*states, rows["action"], rows["reward"], ends, infos)

    def sample(self) -> Any:
        return self._buffer.sample(self._need.batch)

    def rows(self, found: Any) -> Rows:
        rows = {
            "observation": found.observations.numpy(),
            "next_observation": found.next_observations.numpy(),
            "action": found.actions.numpy(),
            "reward": found.rewards.numpy(),
            "done": found.dones.numpy(),
        }
        if self._need.n_step > 1:
            rows |= {
                "return": rows["reward"],
                "discount": (found.discounts * (1 - found.dones)).numpy(),
            }
        return rows

    def __len__(self) -> int:
        return int(self._buffer.size() * self._need.num_envs)

    def save(self, folder: Path) -> None:
        save_to_pkl(folder / "buffer.pkl", self._buffer)

    def load(self, folder: Path) -> None:
        self._buffer = load_from_pkl(folder / "buffer.pkl")


class Task(gymnasium.Env[Any, Any]):
    """The part of an environment that relabelling calls."""

    def __init__(self, first: Rows) -> None:
        goals = dict.fromkeys(("achieved_goal", "desired_goal"), _box(first["achieved"]))
        self.observation_space = spaces.Dict({"observation": _box(first["observation"]), **goals})
        self.action_space = _box(first["action"], 1)

    def compute_reward(self, achieved: Array, wanted: Array, _: Any) -> Array:
        return derived.reward(achieved, wanted)


class Sb3Goals(Buffer):
    def __init__(self, episodes: Iterable[Rows], count: int, batch: int) -> None:
        parts = list(episodes)
        num_envs = max(1, len(parts) // 10)
        task = Task(parts[0])
        given = task.observation_space, task.action_space, DummyVecEnv([lambda: task])
        self._batch = batch
        self._buffer = HerReplayBuffer(count, *given, n_envs=num_envs, n_sampled_goal=4)
        infos = [{"TimeLimit.truncated": False}] * num_envs
        for now, following, rest in derived.goal_steps(parts, num_envs):
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


class Sb3(System):
    fills = work.EPISODE  # environments, as adding one by one takes minutes
    kinds = frozenset(("transitions", "n_step", "hindsight", "adding", "calls"))
    steps = Sb3Steps
    goals = Sb3Goals


SYSTEM = Sb3("stable_baselines3")
