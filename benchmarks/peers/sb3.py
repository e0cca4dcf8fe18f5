"""Stable-Baselines3: ReplayBuffer and NStepReplayBuffer (CleanRL's ring is an earlier copy of the first)."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.save_util import load_from_pkl, save_to_pkl

from peers.interface import Moment, NotOfferedError, Sampled, StepBuffer, Steps, System


class Sb3Steps(StepBuffer):
    def __init__(self, need: Steps) -> None:
        if need.prioritized:
            raise NotOfferedError
        space, action = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2)
        self._need = need
        if need.n_step > 1:
            self._buffer: ReplayBuffer = NStepReplayBuffer(
                need.capacity, space, action, n_envs=need.num_envs, n_steps=need.n_step, gamma=need.gamma
            )
        else:
            self._buffer = ReplayBuffer(need.capacity, space, action, n_envs=need.num_envs)
        np.random.seed(need.seed)

    def add(self, moment: Moment) -> None:
        infos = [{"TimeLimit.truncated": bool(cut)} for cut in moment.truncated]
        self._buffer.add(
            moment.obs[:, None],
            moment.next_obs[:, None],
            np.zeros((len(moment.obs), 1), np.int64),
            moment.reward,
            moment.terminated | moment.truncated,
            infos,
        )

    def sample(self) -> Sampled:
        data = self._buffer.sample(self._need.batch)
        discounts = getattr(data, "discounts", None)
        discount = self._need.gamma * (1 - data.dones) if discounts is None else discounts * (1 - data.dones)
        columns = (data.observations, data.next_observations, data.rewards, discount)
        return Sampled(*(column.numpy()[:, 0] for column in columns), np.ones(self._need.batch))

    def __len__(self) -> int:
        return int(self._buffer.size() * self._need.num_envs)

    def save(self, folder: Path) -> None:
        save_to_pkl(folder / "buffer.pkl", self._buffer)

    def load(self, folder: Path) -> None:
        self._buffer = load_from_pkl(folder / "buffer.pkl")


class Sb3(System):
    name = "Stable-Baselines3"

    def version(self) -> str:
        return version("stable_baselines3")

    def steps(self, need: Steps) -> StepBuffer:
        return Sb3Steps(need)


SYSTEM = Sb3()
