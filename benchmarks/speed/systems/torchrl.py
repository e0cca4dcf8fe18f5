"""TorchRL: tensordict replay buffers, PrioritizedSampler and SliceSampler."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
import torch
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

from speed import derived, work
from speed.work import Adding, Array, Batches, Rows

CHUNK = 100_000


def version() -> str:
    return version_of("torchrl")


def dict_of(rows: Rows) -> TensorDict:
    count = len(next(iter(rows.values())))
    return TensorDict({name: torch.from_numpy(values) for name, values in rows.items()}, [count])


class TorchrlBatches(Batches):
    def __init__(self, buffer: Any, batch: int, length: int = 1) -> None:
        self._buffer, self._lead = buffer, (batch,) if length == 1 else (batch, length)

    def sample(self) -> Any:
        return self._buffer.sample()

    def update(self, found: Any, priorities: Array) -> None:
        found["td_error"] = torch.from_numpy(priorities)
        self._buffer.update_tensordict_priority(found)

    def rows(self, found: Any) -> Rows:
        names = ("observation", "next_observation", "action", "reward", "done", "frame", "number")
        return {
            name: found[name].reshape(*self._lead, *found[name].shape[1:]).numpy()
            for name in names
            if name in found.keys()  # noqa: SIM118  (`in` a TensorDict is of its rows)
        }

    def save(self, folder: Path) -> None:
        self._buffer.dumps(folder)

    def load(self, folder: Path) -> None:
        self._buffer.loads(folder)


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Batches:
    options: dict[str, Any] = {"storage": LazyTensorStorage(count), "batch_size": batch}
    if prioritized:
        buffer: Any = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, priority_key="td_error", **options
        )
    else:
        buffer = TensorDictReplayBuffer(**options)
    for first in range(0, fill or count, CHUNK):
        buffer.extend(dict_of(work.steps(first, min(CHUNK, (fill or count) - first))))
    return TorchrlBatches(buffer, batch)


def _slices(parts: Any, count: int, batch: int, length: int) -> Batches:
    buffer = _sliced(LazyTensorStorage(count), batch, length)
    _extend(buffer, parts)
    return TorchrlBatches(buffer, batch, length)


def _sliced(storage: Any, batch: int, length: int) -> Any:
    sampler = SliceSampler(slice_len=length, traj_key="episode", strict_length=True, cache_values=True)
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch * length)


def _extend(buffer: Any, parts: Any) -> None:
    for number, rows in enumerate(parts):
        size = len(next(iter(rows.values())))
        buffer.extend(dict_of({**rows, "episode": np.full(size, number)}))


def windows(count: int, batch: int, length: int) -> Batches:
    return _slices(work.trajectories(count // work.EPISODE), count, batch, length)


def _mapped(count: int, batch: int, length: int, folder: Path) -> Any:
    storage = LazyMemmapStorage(count, scratch_dir=folder / "storage", existsok=True)
    return _sliced(storage, batch, length)


def write(count: int, folder: Path) -> None:
    buffer = _mapped(count, 1, 1, folder)  # the sampler is not used
    _extend(buffer, work.trajectories(count // work.EPISODE))
    buffer.dumps(folder)


def stored(count: int, batch: int, length: int, folder: Path) -> Batches:
    buffer = _mapped(count, batch, length, folder)
    buffer.storage.loads(folder / "storage")
    return TorchrlBatches(buffer, batch, length)


def frames(count: int, batch: int, length: int) -> Batches:
    return _slices(work.frames(count // 500, 500), count, batch, length)


class TorchrlAdding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        self._buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=256)

    def add(self, step: Rows) -> None:
        self._buffer.extend(dict_of(step))

    def sample(self) -> Any:
        return self._buffer.sample()

    def held(self) -> int:
        return len(self._buffer)


adding = TorchrlAdding


def whole(capacity: int) -> tuple[Callable[[Rows], Any], Callable[[], None]]:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=256)
    return lambda rows: buffer.extend(dict_of(rows)), lambda: None


def numbered(count: int, batch: int) -> tuple[Callable[[], Array], Callable[[], None]]:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.4, storage=LazyTensorStorage(count), batch_size=batch
    )
    for first in range(0, count, 1 << 20):
        numbers = np.arange(first, min(first + (1 << 20), count), dtype=np.int32)
        buffer.extend(dict_of({"number": numbers}))
    return lambda: buffer.sample()["number"].numpy(), lambda: None


class TorchrlReturns(TorchrlBatches):
    def rows(self, found: Any) -> Rows:
        following = found["next"]
        discount = derived.GAMMA ** found["steps_to_next_obs"].flatten() * ~following["terminated"].flatten()
        return {
            "observation": found["observation"].numpy(),
            "next_observation": following["observation"].numpy(),
            "return": following["reward"].numpy(),
            "discount": discount.numpy(),
        }


def n_step(count: int, batch: int) -> Batches:
    transform = MultiStepTransform(n_steps=derived.N, gamma=derived.GAMMA)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(count), batch_size=batch, transform=transform)
    for first in range(0, count, CHUNK):
        rows = {name: torch.from_numpy(values) for name, values in work.steps(first, CHUNK).items()}
        ends = rows["done"][:, None]
        following = {
            "observation": rows["next_observation"],
            "reward": rows["reward"][:, None],
            "done": ends,
            "terminated": ends,
            "truncated": torch.zeros_like(ends),
        }
        buffer.extend(
            TensorDict(
                {"observation": rows["observation"], "action": rows["action"], "next": following}, [CHUNK]
            )
        )
    return TorchrlReturns(buffer, batch)


class TorchrlGoals(TorchrlBatches):
    def rows(self, found: Any) -> Rows:
        return {
            "observation": found["observation"].numpy(),
            "next_observation": found["next", "observation"].numpy(),
            "reward": found["next", "reward"].numpy(),
            "goal": found["desired_goal"].numpy(),
        }


def goal_reward(rows: TensorDict) -> torch.Tensor:
    distance = (rows["next", "achieved_goal"] - rows["desired_goal"]).norm(dim=-1, keepdim=True)
    return -(distance > 0.05).float()


def hindsight(count: int, batch: int) -> Batches:
    buffer = HERReplayBuffer(
        goal_reward,
        her_ratio=derived.RATIO,
        strategy="future",
        achieved_goal_key=("next", "achieved_goal"),  # by default a goal may be the state's own
        storage=LazyTensorStorage(count),
        batch_size=batch,
    )
    for arrays in derived.episodes(count):
        rows = {name: torch.from_numpy(values) for name, values in arrays.items()}
        goals, ends = rows["pursued"].expand(derived.HORIZON, -1), rows["done"][:, None]
        state = {"observation": rows["observation"], "achieved_goal": rows["achieved"]}
        following = {name: values[1:] for name, values in state.items()}
        following |= {
            "desired_goal": goals,
            "done": ends,
            "terminated": ends,
            "reward": -torch.ones(ends.shape),
        }
        steps = {name: values[:-1] for name, values in state.items()}
        steps |= {"desired_goal": goals, "action": rows["action"], "next": following}
        buffer.extend(TensorDict(steps, [derived.HORIZON]))
    return TorchrlGoals(buffer, batch)
