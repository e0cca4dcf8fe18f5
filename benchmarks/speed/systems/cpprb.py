"""cpprb: ReplayBuffer and PrioritizedReplayBuffer; frames by its compression of stacks."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import cpprb
import numpy as np

from speed import derived, work
from speed.work import Adding, Array, Batches, Rows

CHUNK = 100_000


def version() -> str:
    return version_of("cpprb")


def columns_of(rows: Rows) -> dict[str, Any]:
    return {name: {"shape": values.shape[1:] or 1, "dtype": values.dtype} for name, values in rows.items()}


class CpprbBatches(Batches):
    def __init__(self, buffer: Any, batch: int, prioritized: bool = False, name: str = "") -> None:
        self._buffer, self._batch, self._name = buffer, batch, name
        self._options = {"beta": 0.4} if prioritized else {}

    def sample(self) -> Any:
        return self._buffer.sample(self._batch, **self._options)

    def update(self, found: Any, priorities: Array) -> None:
        self._buffer.update_priorities(found["indexes"], priorities)

    def rows(self, found: Any) -> Rows:
        if self._name:  # [B, ..., stacked]
            return {self._name: np.moveaxis(found[self._name], -1, 1)}
        return {name: found[name] for name in found if name not in ("indexes", "weights")}

    def save(self, folder: Path) -> None:
        self._buffer.save_transitions(str(folder / "buffer"), safe=False)

    def load(self, folder: Path) -> None:
        self._buffer.load_transitions(str(folder / "buffer.npz"))


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Batches:
    columns = columns_of(work.steps(0, 1))
    if prioritized:
        buffer: Any = cpprb.PrioritizedReplayBuffer(count, columns, alpha=0.6)
    else:
        buffer = cpprb.ReplayBuffer(count, columns)
    for first in range(0, fill or count, CHUNK):
        buffer.add(**work.steps(first, min(CHUNK, (fill or count) - first)))
    return CpprbBatches(buffer, batch, prioritized)


def frames(count: int, batch: int, length: int) -> Batches:
    shape = (*work.FRAME, length)
    buffer = cpprb.ReplayBuffer(count, {"frame": {"shape": shape, "dtype": np.uint8}}, stack_compress="frame")
    for rows in work.frames(count // 500, 500):
        values = rows["frame"]
        for last in range(length, len(values) + 1):
            buffer.add(frame=np.moveaxis(values[last - length : last], 0, -1))
        buffer.on_episode_end()
    return CpprbBatches(buffer, batch, name="frame")


class CpprbReturns(CpprbBatches):
    def rows(self, found: Any) -> Rows:
        discount = derived.GAMMA**derived.N * (1 - found["done"])
        return {**found, "return": found["reward"], "discount": discount}


def n_step(count: int, batch: int) -> Batches:
    window = {"size": derived.N, "gamma": derived.GAMMA, "rew": "reward", "next": "next_observation"}
    buffer = cpprb.ReplayBuffer(count, columns_of(work.steps(0, 1)), Nstep=window)
    for first in range(0, count, work.EPISODE):
        buffer.add(**work.steps(first, work.EPISODE))
        buffer.on_episode_end()
    return CpprbReturns(buffer, batch)


class CpprbGoals(CpprbBatches):
    def rows(self, found: Any) -> Rows:
        states = {name: found[name][:, : work.OBSERVATION] for name in ("observation", "next_observation")}
        return {**states, "reward": found["rew"], "goal": found["goal"]}


def hindsight(count: int, batch: int) -> Batches:
    """Goals are drawn when an episode ends; a state holds what is achieved in it."""
    width = work.OBSERVATION + derived.GOAL
    columns = {name: {"shape": width} for name in ("observation", "next_observation")}
    columns |= {"action": {"shape": work.ACTION}, "done": {}}
    buffer = cpprb.HindsightReplayBuffer(
        5 * count,
        columns,
        max_episode_len=derived.HORIZON,
        reward_func=lambda following, _, goal: derived.reward(following[:, work.OBSERVATION :], goal),
        goal_func=lambda state: state[:, work.OBSERVATION :],
        goal_shape=(derived.GOAL,),
        state="observation",
        action="action",
        next_state="next_observation",
        additional_goals=4,
        prioritized=False,
    )
    for rows in derived.episodes(count):
        state = np.concatenate([rows["observation"], rows["achieved"]], 1)
        steps = {"observation": state[:-1], "next_observation": state[1:]}
        buffer.add(**steps, action=rows["action"], done=rows["done"])
        buffer.on_episode_end(rows["pursued"])
    return CpprbGoals(buffer, batch)


class CpprbAdding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        self._buffer = cpprb.ReplayBuffer(capacity, columns_of(next(work.environment_steps(num_envs))))

    def add(self, step: Rows) -> None:
        self._buffer.add(**step)

    def sample(self) -> Any:
        return self._buffer.sample(256)

    def held(self) -> int:
        return int(self._buffer.get_stored_size())


adding = CpprbAdding


def whole(capacity: int) -> tuple[Callable[[Rows], Any], Callable[[], None]]:
    buffer = cpprb.ReplayBuffer(capacity, columns_of(next(work.trajectories(1))))
    return lambda rows: buffer.add(**rows), lambda: None


def numbered(count: int, batch: int) -> tuple[Callable[[], Array], Callable[[], None]]:
    buffer = cpprb.PrioritizedReplayBuffer(count, {"number": {"dtype": np.int32}}, alpha=1.0)
    for first in range(0, count, 1 << 20):
        numbers = np.arange(first, min(first + (1 << 20), count), dtype=np.int32)
        buffer.add(number=numbers, priorities=np.ones(len(numbers)))
    return lambda: buffer.sample(batch)["number"][:, 0], lambda: None
