"""cpprb: ReplayBuffer, PrioritizedReplayBuffer, HindsightReplayBuffer; frames by compression of
stacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cpprb
import numpy as np
from speed import derived, work

from peers.interface import Array, Buffer, NotOfferedError, Rows, Steps, System


def columns_of(rows: Rows) -> dict[str, Any]:
    return {
        name: {"shape": values.shape[1:] or 1, "dtype": values.dtype}
        for name, values in rows.items()
    }


class CpprbSteps(Buffer):
    def __init__(self, need: Steps, buffer: Any = None) -> None:
        self._need = need
        self._options = {"beta": need.beta} if need.prioritized else {}
        self._buffer = self._made(need) if buffer is None else buffer
        np.random.seed(need.seed)

    @staticmethod
    def _made(need: Steps) -> Any:
        options: dict[str, Any] = {}
        if need.n_step > 1:
            if need.num_envs > 1:
                raise NotOfferedError("one local buffer of n-step returns")
            window = {
                "size": need.n_step,
                "gamma": need.gamma,
                "rew": "reward",
                "next": "next_observation",
            }
            options["Nstep"] = window
        if need.prioritized:
            options["alpha"] = need.alpha
        kind = cpprb.PrioritizedReplayBuffer if need.prioritized else cpprb.ReplayBuffer
        return kind(need.capacity, columns_of(need.columns), **options)

    def add(self, rows: Rows) -> None:
        self._buffer.add(**rows)
        if self._need.n_step > 1 and (rows["done"] | rows.get("truncated", rows["done"]))[-1]:
            self._buffer.on_episode_end()

    def add_call(
        self,
        obs: Array,
        next_obs: Array,
        action: int,
        reward: float,
        terminated: bool,
        truncated: bool,
    ) -> None:
        self._buffer.add(
            observation=obs,
            next_observation=next_obs,
            action=action,
            reward=reward,
            done=terminated,
            truncated=truncated,
        )

    def sample(self) -> Any:
        return self._buffer.sample(self._need.batch, **self._options)

    def update(self, found: Any, priorities: Array) -> None:
        self._buffer.update_priorities(found["indexes"], priorities)

    def rows(self, found: Any) -> Rows:
        rows = {
            name: values for name, values in found.items() if name not in ("indexes", "weights")
        }
        if "weights" in found:
            rows["weight"] = found["weights"]
        if self._need.n_step > 1:
            rows["return"] = found["reward"]
            rows["discount"] = self._need.gamma**self._need.n_step * (1 - found["done"])
        return rows

    def __len__(self) -> int:
        return int(self._buffer.get_stored_size())

    def save(self, folder: Path) -> None:
        self._buffer.save_transitions(str(folder / "buffer"), safe=False)

    def load(self, folder: Path) -> None:
        self._buffer.load_transitions(str(folder / "buffer.npz"))


class CpprbFrames(CpprbSteps):
    def rows(self, found: Any) -> Rows:
        return {"frame": np.moveaxis(found["frame"], -1, 1)}  # [B, ..., stacked]


def frames(count: int, batch: int, length: int) -> Buffer:
    shape = (*work.FRAME, length)
    buffer = cpprb.ReplayBuffer(
        count, {"frame": {"shape": shape, "dtype": np.uint8}}, stack_compress="frame"
    )
    for rows in work.frames(count // 500, 500):
        values = rows["frame"]
        for last in range(length, len(values) + 1):
            buffer.add(frame=np.moveaxis(values[last - length : last], 0, -1))
        buffer.on_episode_end()
    return CpprbFrames(Steps(count, batch=batch), buffer)


class CpprbGoals(CpprbSteps):
    """Goals are drawn when an episode ends; a state holds what is achieved in it."""

    def __init__(self, episodes: Iterable[Rows], count: int, batch: int) -> None:
        parts = list(episodes)
        first = parts[0]
        horizon = len(parts[0]["done"])
        self._width = first["observation"].shape[1]
        goal = first["pursued"].shape
        columns = {
            name: {"shape": self._width + goal[0]} for name in ("observation", "next_observation")
        }
        columns |= {"action": {"shape": first["action"].shape[1]}, "done": {}}
        buffer = cpprb.HindsightReplayBuffer(
            5 * count,
            columns,
            max_episode_len=horizon,
            reward_func=lambda following, _, goal: derived.reward(
                following[:, self._width :], goal
            ),
            goal_func=lambda state: state[:, self._width :],
            goal_shape=goal,
            state="observation",
            action="action",
            next_state="next_observation",
            additional_goals=4,
            prioritized=False,
        )
        for rows in parts:
            state = np.concatenate([rows["observation"], rows["achieved"]], 1)
            steps = {"observation": state[:-1], "next_observation": state[1:]}
            buffer.add(**steps, action=rows["action"], done=rows["done"])
            buffer.on_episode_end(rows["pursued"])
        super().__init__(Steps(count, batch=batch), buffer)

    def rows(self, found: Any) -> Rows:
        states = {
            name: found[name][:, : self._width] for name in ("observation", "next_observation")
        }
        return {**states, "reward": found["rew"], "goal": found["goal"]}


class Cpprb(System):
    kinds = frozenset(
        ("transitions", "n_step", "hindsight", "adding", "calls", "whole", "numbered")
    )
    steps = CpprbSteps
    goals = CpprbGoals


SYSTEM = Cpprb("cpprb", frames=frames)
