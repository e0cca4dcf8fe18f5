"""The data that every system gets, made from numbers, so that any row can be checked.
NumPy only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from peers.interface import Array, Rows

#: Names of rows that several modules use; BETWEEN ends some.
CALL = "a step as gymnasium returns it"
COMMIT = "commit of a lease: 8 responses of 500 tokens"
BETWEEN = ", a model between"

OBSERVATION = 11
ACTION = 3
EPISODE = 1000  # steps of a trajectory
FRAME = (84, 84)
LONGEST = 200  # steps of an episode whose steps are added one by one
_DISTINCT = (
    4096  # rows of random values that the data repeats, so that a check can make any row again
)


def _table(width: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((_DISTINCT, width), np.float32)


_OBSERVATIONS = _table(OBSERVATION, 0)
_ACTIONS = _table(ACTION, 1)


def observation(number: Array) -> Array:
    """Return the observations of steps, of which the first element is the step's number. [n] -> [n,
    11].
    """
    rows = _OBSERVATIONS[number % _DISTINCT]
    rows[..., 0] = number  # exact in float32 below 2^24
    return rows


def steps(first: int, count: int) -> Rows:
    """Return transitions by number: every EPISODE steps a trajectory ends. [count, ...] each, 105 B
    a row.
    """
    return transitions(np.arange(first, first + count))


def transitions(number: Array) -> Rows:
    """Return transitions of any numbers, as `steps` does. [n] -> [n, ...] each."""
    return {
        "observation": observation(number),
        "next_observation": observation(number + 1),
        "action": _ACTIONS[number % _DISTINCT],
        "reward": number.astype(np.float32),
        "done": number % EPISODE == EPISODE - 1,
    }


def trajectories(count: int) -> Iterator[Rows]:
    """Yield trajectories of EPISODE steps, without next observations: 61 B a step."""
    for number in range(count):
        rows = steps(number * EPISODE, EPISODE)
        del rows["next_observation"]
        yield rows


def frames(count: int, length: int) -> Iterator[Rows]:
    """Yield trajectories of frames, in which every pixel is the frame's number modulo 251."""
    for first in range(0, count * length, length):
        number = np.arange(first, first + length)
        yield {
            "frame": np.broadcast_to(
                (number % 251).astype(np.uint8)[:, None, None], (length, *FRAME)
            ).copy()
        }


def environment_steps(num_envs: int) -> Iterator[Rows]:
    """Yield steps of environments, which reset in the step that ends an episode: after LONGEST
    steps, at different times. Within an episode every observation is the next one of the step
    before.
    """
    begun = np.arange(num_envs) * 17 % LONGEST
    rows = [observation(np.arange(num_envs) + at) for at in range(5)]  # LONGEST is a multiple of 5
    cycle: list[Rows] = []
    for at in range(1, LONGEST + 1):
        truncated = (begun + at) % LONGEST == 0
        following = rows[at % 5].copy()
        following[truncated] = observation(np.flatnonzero(truncated) + 1000)
        cycle.append(
            {
                "observation": rows[(at - 1) % 5],
                "next_observation": following,
                "action": _ACTIONS[:num_envs].copy(),
                "reward": np.ones(num_envs, np.float32),
                "done": np.zeros(num_envs, bool),
                "truncated": truncated,
            }
        )
    return itertools.cycle(cycle)


class Call(NamedTuple):
    """What a program of one environment has after gymnasium's `step`: CartPole-v1's types."""

    obs: Array  # [4], float32
    next_obs: Array
    action: int
    reward: float
    terminated: bool
    truncated: bool


def calls() -> Iterator[Call]:
    """Yield the steps of one environment, each with a fresh next observation, as `env.step` returns
    it. Episodes have 10 to 40 steps, as those of CartPole-v1 under random actions.
    """
    random = np.random.default_rng(4)
    lengths = itertools.cycle(random.integers(10, 41, 64).tolist())
    states = itertools.cycle(random.standard_normal((256, 4)).tolist())
    for length in lengths:
        obs = np.array(next(states), np.float32)
        for step in range(1, length + 1):
            next_obs = np.array(next(states), np.float32)
            yield Call(obs, next_obs, step % 2, 1.0, step == length, False)
            obs = next_obs


def call_columns() -> Rows:
    """Return rows like those of `calls`. [1, ...] each."""
    return {
        "observation": np.zeros((1, 4), np.float32),
        "next_observation": np.zeros((1, 4), np.float32),
        "action": np.zeros(1, np.int64),
        "reward": np.zeros(1, np.float32),
        "done": np.zeros(1, bool),
        "truncated": np.zeros(1, bool),
    }


class Model:
    """A model's forward pass between two calls: it replaces what a core's own caches hold.

    Its weights are 1.1 MB of float32; NumPy only, so that every system's environment has it.

    Args:
        rows: Observations of a pass: 1 of a program that acts, B of one that trains.
    """

    WIDTH = 512

    def __init__(self, rows: int) -> None:
        random = np.random.default_rng(5)
        widths = [OBSERVATION, self.WIDTH, self.WIDTH, ACTION]
        self._input = random.standard_normal((rows, OBSERVATION), np.float32)
        self._weights = [
            0.05 * random.standard_normal(pair, np.float32) for pair in itertools.pairwise(widths)
        ]

    def __call__(self) -> None:
        hidden = self._input
        for weights in self._weights:
            hidden = np.maximum(hidden @ weights, 0)


def check(found: Rows, batch: int, length: int, num_steps: int) -> None:
    """Raise unless a batch consists of rows that were added, each once in its place.

    Args:
        found: By column, [B, ...] for length 1, else [B, length, ...].
        num_steps: Steps that were added.
    """
    lead = (batch,) if length == 1 else (batch, length)
    if "frame" in found:
        values = found["frame"].reshape(batch, length, -1)
        first = values[:, :, 0].astype(np.int64)
        assert (values == values[:, :, :1]).all(), "a frame has pixels of others"
        assert (np.diff(first, axis=1) % 251 == 1).all(), (
            "frames of a sample do not follow each other"
        )
        return
    number = np.rint(found["reward"].reshape(lead)).astype(np.int64)
    is_known = (number >= 0) & (number < num_steps)
    assert is_known.all(), "steps that were never added"
    if length > 1:
        assert (np.diff(number, axis=1) == 1).all(), "steps of a window do not follow each other"
    if "done" in found:
        ends = found["done"].reshape(lead).astype(bool)
        assert (ends == (number % EPISODE == EPISODE - 1)).all(), "wrong end flags"
    expected = {
        "observation": observation(number),
        "next_observation": observation(number + 1),
        "action": _ACTIONS[number % _DISTINCT],
    }
    for name in expected.keys() & found.keys():
        given = found[name].reshape(*lead, -1)
        if (
            name == "next_observation"
        ):  # of a last step, some systems have the row that follows: no fault here
            keep = number % EPISODE != EPISODE - 1
            assert (given[keep] == expected[name][keep]).all(), f"{name} of other steps"
        else:
            assert (given == expected[name]).all(), f"{name} of other steps"
