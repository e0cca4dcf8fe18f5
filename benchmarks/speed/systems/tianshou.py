"""Tianshou: VectorReplayBuffer and PrioritizedVectorReplayBuffer."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
from tianshou.data import Batch, PrioritizedVectorReplayBuffer, VectorReplayBuffer

from speed import work
from speed.work import Adding, Array, Batches, NotOfferedError, Rows

MOST_ITEMS = 200_000  # they are added by environment and step; more of them take minutes


def version() -> str:
    return version_of("tianshou")


def _add(buffer: Any, rows: Rows, terminated: Array, truncated: Array, envs: Array) -> None:
    buffer.add(
        Batch(
            obs=rows["observation"],
            act=rows["action"],
            rew=rows["reward"],
            terminated=terminated,
            truncated=truncated,
            obs_next=rows["next_observation"],
            info=Batch(),
        ),
        buffer_ids=envs,
    )


class TianshouBatches(Batches):
    def __init__(self, count: int, batch: int, prioritized: bool, fill: int | None = None) -> None:
        if (fill or count) > 1_000_000:
            raise NotOfferedError("takes minutes to fill")
        self.count = count = min(count, MOST_ITEMS)
        num_envs = 8
        if prioritized:
            self._buffer: Any = PrioritizedVectorReplayBuffer(count, num_envs, alpha=0.6, beta=0.4)
        else:
            self._buffer = VectorReplayBuffer(count, num_envs)
        self._batch, envs, never = batch, np.arange(num_envs), np.zeros(num_envs, bool)
        for first in range(0, count if fill is None else fill, num_envs):
            rows = work.steps(first, num_envs)
            _add(self._buffer, rows, rows["done"], never, envs)

    def sample(self) -> Any:
        return self._buffer.sample(self._batch)

    def update(self, found: Any, priorities: Array) -> None:
        self._buffer.update_weight(found[1], priorities)

    def rows(self, found: Any) -> Rows:
        batch = found[0]
        return {
            "observation": batch.obs,
            "next_observation": batch.obs_next,
            "action": batch.act,
            "reward": batch.rew,
            "done": batch.done,
        }

    def save(self, folder: Path) -> None:
        self._buffer.save_hdf5(str(folder / "buffer.hdf5"))

    def load(self, folder: Path) -> None:
        self._buffer = type(self._buffer).load_hdf5(str(folder / "buffer.hdf5"))


transitions = TianshouBatches


class TianshouAdding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        self._envs, self._buffer = np.arange(num_envs), VectorReplayBuffer(capacity, num_envs)

    def add(self, step: Rows) -> None:
        _add(self._buffer, step, step["terminated"], step["truncated"], self._envs)

    def sample(self) -> Any:
        return self._buffer.sample(256)

    def held(self) -> int:
        return len(self._buffer)


adding = TianshouAdding
