"""TorchRL: tensordict replay buffers with MultiStepTransform, PrioritizedSampler, SliceSampler and HER."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torchrl.data import (
    HERReplayBuffer,
    LazyTensorStorage,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs.transforms import MultiStepTransform

from peers.interface import (
    Array,
    Moment,
    NotOfferedError,
    Sampled,
    StepBuffer,
    Steps,
    System,
    Window,
    WindowBuffer,
    Windows,
)


class TorchrlSteps(StepBuffer):
    def __init__(self, need: Steps) -> None:
        if need.prioritized and need.normalize == "table":
            raise NotOfferedError
        self._need, self._has_time = need, need.n_step > 1
        if self._has_time and need.num_envs > 1:
            raise NotOfferedError("MultiStepTransform takes rollouts [environments, time], not steps")
        options: dict[str, Any] = {"batch_size": need.batch}
        options["storage"] = LazyTensorStorage(need.capacity)
        if self._has_time:
            options["transform"] = MultiStepTransform(n_steps=need.n_step, gamma=need.gamma)
        if need.prioritized:
            self._buffer: Any = TensorDictPrioritizedReplayBuffer(
                alpha=need.alpha, beta=need.beta, priority_key="td_error", **options
            )
        else:
            self._buffer = TensorDictReplayBuffer(**options)
        self._buffer.set_rng(torch.Generator().manual_seed(need.seed))

    def add(self, moment: Moment) -> None:
        def column(values: Array) -> torch.Tensor:
            return torch.from_numpy(values.copy())[:, None]

        terminated, truncated = column(moment.terminated), column(moment.truncated)
        following = {
            "observation": column(moment.next_obs),
            "reward": column(moment.reward),
            "terminated": terminated,
            "truncated": truncated,
            "done": terminated | truncated,
        }
        count = len(moment.obs)
        steps = TensorDict(
            {"observation": column(moment.obs), "next": TensorDict(following, [count])}, [count]
        )
        self._buffer.extend(steps)

    def sample(self) -> Sampled:
        need, found = self._need, self._buffer.sample()
        rows = found.reshape(-1)
        following = rows["next"]
        steps = rows["steps_to_next_obs"].flatten() if self._has_time else 1
        discount = need.gamma**steps * ~following["terminated"][:, 0]
        weight = rows["priority_weight"].numpy() if need.prioritized else np.ones(len(rows))
        columns = (
            rows["observation"][:, 0],
            following["observation"][:, 0],
            following["reward"][:, 0],
            discount,
        )
        return Sampled(*(torch.as_tensor(values).numpy() for values in columns), weight, found)

    def update(self, sampled: Sampled, priorities: Array) -> None:
        sampled.handle["td_error"] = torch.from_numpy(priorities.astype(np.float32))
        self._buffer.update_tensordict_priority(sampled.handle)

    def set_alpha(self, alpha: float) -> None:
        self._buffer.sampler.alpha = alpha

    def __len__(self) -> int:
        return len(self._buffer)

    def save(self, folder: Path) -> None:
        self._buffer.dumps(folder)

    def load(self, folder: Path) -> None:
        self._buffer.loads(folder)


class TorchrlWindows(WindowBuffer):
    def __init__(self, need: Windows) -> None:
        pads = {} if need.whole else {"pad_output": True}
        sampler = SliceSampler(slice_len=need.length, traj_key="episode", strict_length=need.whole, **pads)
        self._need, self._count = need, 0
        self._buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(need.capacity), sampler=sampler, batch_size=need.batch * need.length
        )
        self._buffer.set_rng(torch.Generator().manual_seed(need.seed))

    def add(self, obs: Array) -> None:
        columns = {"obs": torch.from_numpy(obs.copy()), "episode": torch.full((len(obs),), self._count)}
        self._buffer.extend(TensorDict(columns, [len(obs)]))
        self._count += 1

    def sample(self) -> Window:
        found = self._buffer.sample()
        obs = found["obs"].reshape(-1, self._need.length).numpy()
        if self._need.whole:
            return Window(obs, np.ones(obs.shape, bool))
        mask = found.get(("collector", "mask"), found.get("mask", None))
        return Window(obs, np.ones(obs.shape, bool) if mask is None else mask.reshape(obs.shape).numpy())


class Torchrl(System):
    name = "TorchRL"

    def version(self) -> str:
        return version("torchrl")

    def steps(self, need: Steps) -> StepBuffer:
        return TorchrlSteps(need)

    def windows(self, need: Windows) -> WindowBuffer:
        return TorchrlWindows(need)

    def goals(self, episodes: list[Array], batch: int) -> Mapping[str, Array]:
        buffer = HERReplayBuffer(
            lambda rows: torch.zeros(rows.batch_size[0], 1),
            her_ratio=1.0,
            strategy="future",
            goal_key="goal",
            achieved_goal_key="achieved",
            storage=LazyTensorStorage(1000),
            batch_size=batch,
        )
        for obs in episodes:
            values = torch.from_numpy(obs.copy())[:, None]
            ends = (torch.arange(len(obs)) == len(obs) - 1)[:, None]
            following = TensorDict(
                {"achieved": values + 1, "done": ends, "terminated": ends, "reward": values * 0}, [len(obs)]
            )
            columns = {"achieved": values, "goal": values * 0 - 1, "next": following}
            buffer.extend(TensorDict(columns, [len(obs)]))
        found = buffer.sample()
        return {"obs": found["achieved"][:, 0].numpy(), "goal": found["goal"][:, 0].numpy()}


SYSTEM = Torchrl()
