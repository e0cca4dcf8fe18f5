"""TorchRL: tensordict replay buffers with MultiStepTransform, PrioritizedSampler, SliceSampler and
HER.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speed import derived, work
from tensordict import TensorDict
from torchrl.data import (
    HERReplayBuffer,
    LazyMemmapStorage,
    LazyTensorStorage,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import MultiStepTransform

from peers.interface import Array, Buffer, NotOfferedError, Rows, Steps, System, Windows


def dict_of(rows: Rows) -> TensorDict:
    count = len(next(iter(rows.values())))
    return TensorDict({name: torch.from_numpy(values) for name, values in rows.items()}, [count])


class TorchrlSteps(Buffer):
    """Rows as they come; with n-step returns as a collector gives them, with a "next"."""

    def __init__(self, need: Steps) -> None:
        if need.prioritized and need.normalize == "table":
            raise NotOfferedError
        options: dict[str, Any] = {
            "batch_size": need.batch,
            "storage": LazyTensorStorage(need.capacity),
        }
        if need.n_step > 1:
            if need.num_envs > 1:
                raise NotOfferedError(
                    "MultiStepTransform takes rollouts [environments, time], not steps"
                )
            options["transform"] = MultiStepTransform(n_steps=need.n_step, gamma=need.gamma)
        kind: Any = TensorDictReplayBuffer
        if need.prioritized:
            kind = TensorDictPrioritizedReplayBuffer
            options |= {"alpha": need.alpha, "beta": need.beta, "priority_key": "td_error"}
        self._need = need
        self._buffer = kind(**options)
        if need.seed is not None:
            self._buffer.set_rng(torch.Generator().manual_seed(need.seed))

    def add(self, rows: Rows) -> None:
        self._buffer.extend(dict_of(rows) if self._need.n_step == 1 else self._with_next(rows))

    def _with_next(self, rows: Rows) -> TensorDict:
        given = {name: torch.from_numpy(values) for name, values in rows.items()}
        ends = given["done"][:, None]
        truncated = given["truncated"][:, None] if "truncated" in given else torch.zeros_like(ends)
        following = {
            "observation": given["next_observation"],
            "reward": given["reward"][:, None],
            "done": ends | truncated,
            "terminated": ends,
            "truncated": truncated,
        }
        steps = {"observation": given["observation"], "action": given["action"], "next": following}
        return TensorDict(steps, [len(ends)])

    def sample(self) -> Any:
        return self._buffer.sample()

    def update(self, found: Any, priorities: Array) -> None:
        found["td_error"] = torch.from_numpy(priorities)
        self._buffer.update_tensordict_priority(found)

    def rows(self, found: Any) -> Rows:
        if self._need.n_step > 1:
            following = found["next"]
            steps = found["steps_to_next_obs"].flatten()
            ends = following["terminated"].flatten()
            return {
                "observation": found["observation"].numpy(),
                "next_observation": following["observation"].numpy(),
                "return": following["reward"].numpy(),
                "discount": (self._need.gamma**steps * ~ends).numpy(),
            }
        names = {name: name for name in self._need.columns} | {"weight": "priority_weight"}
        known = set(found.keys())  # `in` a TensorDict is of its rows
        return {name: found[own].numpy() for name, own in names.items() if own in known}

    def set_alpha(self, alpha: float) -> None:
        self._buffer.sampler.alpha = alpha

    def __len__(self) -> int:
        return len(self._buffer)

    def save(self, folder: Path) -> None:
        self._buffer.dumps(folder)

    def load(self, folder: Path) -> None:
        self._buffer.loads(folder)


class TorchrlWindows(Buffer):
    """Windows of trajectories that are numbered as they come."""

    def __init__(self, need: Windows, storage: Any = None) -> None:
        pads = {} if need.whole else {"pad_output": True}
        options = {"strict_length": need.whole, "cache_values": True, **pads}
        sampler = SliceSampler(slice_len=need.length, traj_key="episode", **options)
        self._need = need
        self._count = 0
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(need.capacity) if storage is None else storage,
            sampler=sampler,
            batch_size=need.batch * need.length,
        )
        if need.seed is not None:
            self._buffer.set_rng(torch.Generator().manual_seed(need.seed))

    def add(self, rows: Rows) -> None:
        size = len(next(iter(rows.values())))
        self._buffer.extend(dict_of({**rows, "episode": np.full(size, self._count)}))
        self._count += 1

    def sample(self) -> Any:
        return self._buffer.sample()

    def rows(self, found: Any) -> Rows:
        lead = (-1, self._need.length)
        rows = {
            name: found[name].reshape(*lead, *found[name].shape[1:]) for name in self._need.columns
        }
        if not self._need.whole:
            mask = found.get(("collector", "mask"), found.get("mask", None))
            if mask is not None:
                rows["mask"] = mask.reshape(lead)
        return {name: values.numpy() for name, values in rows.items()}

    def dump(self, folder: Path) -> None:
        self._buffer.dumps(folder)

    def open(self, folder: Path) -> None:
        self._buffer.storage.loads(folder / "storage")


def _mapped(count: int, batch: int, length: int, folder: Path) -> TorchrlWindows:
    storage = LazyMemmapStorage(count, scratch_dir=folder / "storage", existsok=True)
    columns = next(work.trajectories(1))
    return TorchrlWindows(Windows(count, length, batch, seed=None, columns=columns), storage)


def write(count: int, folder: Path) -> None:
    buffer = _mapped(count, 1, 1, folder)  # the sampler is not used
    for rows in work.trajectories(count // work.EPISODE):
        buffer.add(rows)
    buffer.dump(folder)


def stored(count: int, batch: int, length: int, folder: Path) -> Buffer:
    buffer = _mapped(count, batch, length, folder)
    buffer.open(folder)
    return buffer


def goal_reward(rows: TensorDict) -> torch.Tensor:
    distance = (rows["next", "achieved_goal"] - rows["desired_goal"]).norm(dim=-1, keepdim=True)
    return -(distance > 0.05).float()


class TorchrlGoals(Buffer):
    def __init__(self, episodes: Iterable[Rows], count: int, batch: int) -> None:
        self._buffer = HERReplayBuffer(
            goal_reward,
            her_ratio=derived.RATIO,
            strategy="future",
            achieved_goal_key=("next", "achieved_goal"),  # by default a goal may be the state's own
            storage=LazyTensorStorage(count),
            batch_size=batch,
        )
        for arrays in episodes:
            rows = {name: torch.from_numpy(values) for name, values in arrays.items()}
            ends = rows["done"][:, None]
            goals = rows["pursued"].expand(len(ends), -1)
            state = {"observation": rows["observation"], "achieved_goal": rows["achieved"]}
            following = {name: values[1:] for name, values in state.items()} | {
                "desired_goal": goals
            }
            following |= {"done": ends, "terminated": ends, "reward": -torch.ones(ends.shape)}
            steps = {name: values[:-1] for name, values in state.items()}
            steps |= {"desired_goal": goals, "action": rows["action"], "next": following}
            self._buffer.extend(TensorDict(steps, [len(ends)]))

    def sample(self) -> Any:
        return self._buffer.sample()

    def rows(self, found: Any) -> Rows:
        return {
            "observation": found["observation"].numpy(),
            "next_observation": found["next", "observation"].numpy(),
            "reward": found["next", "reward"].numpy(),
            "goal": found["desired_goal"].numpy(),
        }


class Torchrl(System):
    kinds = frozenset(
        (
            "transitions",
            "windows",
            "frames",
            "n_step",
            "hindsight",
            "adding",
            "calls",
            "whole",
            "numbered",
        )
    )
    steps = TorchrlSteps
    windows = TorchrlWindows
    goals = TorchrlGoals


SYSTEM = Torchrl("torchrl", write=write, stored=stored)
