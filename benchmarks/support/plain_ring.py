"""The replay buffer that a program of one environment would write itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch


class Transitions(NamedTuple):
    """A batch of transitions, named as those of `TransitionBuffer`; [B, ...] each."""

    observations: torch.Tensor
    next_observations: torch.Tensor
    actions: torch.Tensor
    rewards: torch.Tensor
    dones: torch.Tensor


class PlainRing:
    """A ring of NumPy arrays, with one array for each part of a transition.

    Args:
        capacity: Transitions.
        elements: Of an observation, float32.
        batch: Transitions of a sample.
        seed: Of the draws.
    """

    def __init__(self, capacity: int, elements: int, batch: int = 1, seed: int = 0) -> None:
        self._observation = np.zeros((capacity, elements), np.float32)
        self._next_observation = np.zeros((capacity, elements), np.float32)
        self._action = np.zeros((capacity, 1), np.int64)
        self._reward = np.zeros((capacity, 1), np.float32)
        self._done = np.zeros((capacity, 1), np.float32)
        self._capacity = capacity
        self._batch = batch
        self._random = np.random.default_rng(seed)
        self._count = 0

    def add(
        self, obs: Any, next_obs: Any, action: Any, reward: Any, terminated: Any, truncated: Any
    ) -> None:
        row = self._count % self._capacity
        self._observation[row] = obs
        self._next_observation[row] = next_obs
        self._action[row] = action
        self._reward[row] = reward
        self._done[row] = terminated
        self._count += 1

    def sample(self) -> Transitions:
        rows = self._random.integers(min(self._count, self._capacity), size=self._batch)
        parts = (
            self._observation,
            self._next_observation,
            self._action,
            self._reward,
            self._done,
        )
        return Transitions(*(torch.from_numpy(part[rows]) for part in parts))

    def close(self) -> None:
        """Nothing is to be released."""
