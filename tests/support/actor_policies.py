"""Policies and environments of the actors in test_start_actors.py; actors import this module."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from torch import nn

from deepspeed_gear.actors.actor_process import Actor


class Counting(gymnasium.Env):
    """Observation [episode, step]; the reward is the number of the step; episode e has e % 3 + 1
    steps.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self) -> None:
        self.episode = -1
        self.at = 0

    def _observation(self) -> np.ndarray:
        return np.array([self.episode, self.at], np.float32)

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode = self.episode + 1
        self.at = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at += 1
        ended = self.at == self.episode % 3 + 1
        return self._observation(), float(self.at), ended and bool(self.episode % 2), ended, {}


class CountingParts(Counting):
    """The same observation as a Dict of a Box and a Tuple."""

    _box = gymnasium.spaces.Box(-np.inf, np.inf, (), np.float32)
    observation_space = gymnasium.spaces.Dict(
        {"episode": _box, "at": gymnasium.spaces.Tuple([_box])}
    )

    def _observation(self) -> Any:
        return {"episode": np.float32(self.episode), "at": (np.float32(self.at),)}


def counting(num_envs: int, mode: str = "next_step") -> gymnasium.vector.VectorEnv:
    options = {"autoreset_mode": AutoresetMode[mode.upper()]}
    return gymnasium.vector.SyncVectorEnv([Counting] * num_envs, **options)


def slowly(actor: Actor) -> Callable[[np.ndarray], dict[str, Any]]:
    """Add which actor it was, and what it saw."""

    def act(observation: np.ndarray) -> dict[str, Any]:
        time.sleep(0.002)
        count = len(observation)
        return {
            "action": np.ones(count, np.int64),
            "seen": observation[:, 1].astype(np.float32),
            "actor": np.full(count, actor.index, np.int64),
        }

    return act


def by_board(actor: Actor) -> Callable[[np.ndarray], np.ndarray]:
    """Act with the bias of the newest policy."""
    policy = nn.Linear(1, 1)

    def act(observation: np.ndarray) -> np.ndarray:
        assert actor.board is not None
        actor.board.load_into(policy)
        time.sleep(0.002)
        return np.full(len(observation), int(policy.bias.item()), np.int64)

    return act


def failing(actor: Actor) -> Callable[[np.ndarray], np.ndarray]:
    def act(observation: np.ndarray) -> np.ndarray:
        if actor.index == 1:
            raise ValueError("the policy of actor 1 is broken")
        time.sleep(0.01)
        return np.zeros(len(observation), np.int64)

    return act


def dying(actor: Actor) -> Callable[[np.ndarray], np.ndarray]:
    def act(observation: np.ndarray) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        return observation

    return act


def at_once(actor: Actor) -> Callable[[np.ndarray], np.ndarray]:
    return lambda observation: np.zeros(len(observation), np.int64)
