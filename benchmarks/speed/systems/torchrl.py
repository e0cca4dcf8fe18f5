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
    LazyTensorStorage,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from speed import work
from speed.work import Adding, Array, Batches, Rows

CHUNK = 100_000


def version() -> str:
    return version_of("torchrl")


def _dict(rows: Rows) -> TensorDict:
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
        names = ("observation", "next_observation", "action", "reward", "done", "frame")
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
        buffer.extend(_dict(work.steps(first, min(CHUNK, (fill or count) - first))))
    return TorchrlBatches(buffer, batch)


def _slices(parts: Any, count: int, batch: int, length: int) -> Batches:
    sampler = SliceSampler(slice_len=length, traj_key="episode", strict_length=True, cache_values=True)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(count), sampler=sampler, batch_size=batch * length
    )
    for number, rows in enumerate(parts):
        size = len(next(iter(rows.values())))
        buffer.extend(_dict({**rows, "episode": np.full(size, number)}))
    return TorchrlBatches(buffer, batch, length)


def windows(count: int, batch: int, length: int) -> Batches:
    return _slices(work.trajectories(count // work.EPISODE), count, batch, length)


def frames(count: int, batch: int, length: int) -> Batches:
    return _slices(work.frames(count // 500, 500), count, batch, length)


class TorchrlAdding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        self._buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=256)

    def add(self, step: Rows) -> None:
        self._buffer.extend(_dict(step))

    def sample(self) -> Any:
        return self._buffer.sample()

    def held(self) -> int:
        return len(self._buffer)


adding = TorchrlAdding


def whole(capacity: int) -> tuple[Callable[[Rows], Any], Callable[[], None]]:
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(capacity), batch_size=256)
    return lambda rows: buffer.extend(_dict(rows)), lambda: None


def numbered(count: int, batch: int) -> tuple[Callable[[], Array], Callable[[], None]]:
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0, beta=0.4, storage=LazyTensorStorage(count), batch_size=batch
    )
    for first in range(0, count, 1 << 20):
        numbers = np.arange(first, min(first + (1 << 20), count), dtype=np.int32)
        buffer.extend(_dict({"number": numbers}))
    return lambda: buffer.sample()["number"].numpy(), lambda: None
