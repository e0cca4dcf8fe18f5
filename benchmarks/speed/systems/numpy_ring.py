"""A ring of NumPy arrays, as single-file implementations (CleanRL's) have one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from speed import derived, work
from speed.systems.numpy_rollouts import NumpyRollouts
from speed.work import Adding, Array, Batches, NotOfferedError, Rows


def version() -> str:
    return np.__version__


class NumpyBatches(Batches):
    def __init__(self, rows: Rows, batch: int, length: int = 1, longest: int = 1) -> None:
        self._rows, self._batch, self._length, self._longest = rows, batch, length, longest
        self._count = len(next(iter(rows.values())))

    def sample(self) -> Any:
        if self._length == 1:
            at: Array = np.random.randint(0, self._count, self._batch)
        else:
            first = np.random.randint(0, self._count // self._longest, self._batch) * self._longest
            first += np.random.randint(0, self._longest - self._length + 1, self._batch)
            at = first[:, None] + np.arange(self._length)
        return {name: values[at] for name, values in self._rows.items()}

    def rows(self, found: Any) -> Rows:
        return dict(found)

    def save(self, folder: Path) -> None:
        np.savez(folder / "rows.npz", **self._rows)

    def load(self, folder: Path) -> None:
        with np.load(folder / "rows.npz") as file:
            self._rows = {name: file[name] for name in file}
        self._count = len(next(iter(self._rows.values())))


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Batches:
    if prioritized:
        raise NotOfferedError
    return NumpyBatches(work.steps(0, fill or count), batch)


def windows(count: int, batch: int, length: int) -> Batches:
    rows = work.steps(0, count)
    del rows["next_observation"]
    return NumpyBatches(rows, batch, length, work.EPISODE)


def write(count: int, folder: Path) -> None:
    columns = {
        name: np.lib.format.open_memmap(
            folder / f"{name}.npy", mode="w+", dtype=values.dtype, shape=(count, *values.shape[1:])
        )
        for name, values in next(work.trajectories(1)).items()
    }
    for number, rows in enumerate(work.trajectories(count // work.EPISODE)):
        for name, values in rows.items():
            columns[name][number * work.EPISODE : (number + 1) * work.EPISODE] = values
    for values in columns.values():
        values.flush()


def stored(count: int, batch: int, length: int, folder: Path) -> Batches:
    rows = {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
    return NumpyBatches(rows, batch, length, work.EPISODE)


def frames(count: int, batch: int, length: int) -> Batches:
    parts = [rows["frame"] for rows in work.frames(count // 500, 500)]
    return NumpyBatches({"frame": np.concatenate(parts)}, batch, length, 500)


class NumpyAdding(Adding):
    def __init__(self, num_envs: int, capacity: int) -> None:
        self._envs, self._size, self._at, self._full = num_envs, capacity // num_envs, 0, False
        step = next(work.environment_steps(num_envs))
        self._rings = {name: np.zeros((self._size, *rows.shape), rows.dtype) for name, rows in step.items()}

    def add(self, step: Rows) -> None:
        for name, ring in self._rings.items():
            ring[self._at] = np.array(step[name])
        self._at += 1
        if self._at == self._size:
            self._full, self._at = True, 0

    def sample(self) -> Any:
        at = np.random.randint(0, self._size if self._full else self._at, 256)
        env = np.random.randint(0, self._envs, 256)
        return {name: ring[at, env] for name, ring in self._rings.items()}

    def held(self) -> int:
        return (self._size if self._full else self._at) * self._envs


adding = NumpyAdding
rollouts = NumpyRollouts


def whole(capacity: int) -> tuple[Callable[[Rows], None], Callable[[], None]]:
    rows = next(work.trajectories(1))
    rings = {name: np.zeros((capacity, *values.shape[1:]), values.dtype) for name, values in rows.items()}
    at = 0

    def add(given: Rows) -> None:
        nonlocal at
        for name, ring in rings.items():
            ring[at : at + work.EPISODE] = given[name]
        at = (at + work.EPISODE) % capacity

    return add, lambda: None


def n_step(count: int, batch: int) -> Batches:
    """Add returns instead of rewards, as CleanRL's Rainbow does, from a window of the latest steps."""
    rows, length = work.steps(0, count), work.EPISODE
    rewards = rows.pop("reward").reshape(-1, length)
    shifted = [np.pad(rewards[:, k:], ((0, 0), (0, k))) for k in range(derived.N)]
    rows["return"] = sum(derived.GAMMA**k * values for k, values in enumerate(shifted)).reshape(-1)
    last = np.minimum(np.arange(length) + derived.N, length)
    ends = np.where(last == length, 0, derived.GAMMA ** (last - np.arange(length)))
    rows["discount"] = np.tile(ends.astype(np.float32), len(rewards))
    following = rows["next_observation"].reshape(-1, length, work.OBSERVATION)
    rows["next_observation"] = following[:, last - 1].reshape(count, -1)
    return NumpyBatches(rows, batch)


class NumpyGoals(NumpyBatches):
    """Arrays [episodes, steps, ...]; goals are drawn by index arithmetic, as in OpenAI Baselines."""

    def sample(self) -> Any:
        rows, count, steps = self._rows, self._count, derived.HORIZON
        episode = np.random.randint(0, count, self._batch)
        at = np.random.randint(0, steps, self._batch)
        relabelled = np.random.rand(self._batch) < derived.RATIO
        later = at + 1 + (np.random.rand(self._batch) * (steps - at)).astype(np.int64)
        goal = rows["pursued"][episode]
        goal[relabelled] = rows["achieved"][episode[relabelled], later[relabelled]]
        return {
            "observation": rows["observation"][episode, at],
            "next_observation": rows["observation"][episode, at + 1],
            "action": rows["action"][episode, at],
            "reward": derived.reward(rows["achieved"][episode, at + 1], goal),
            "done": rows["done"][episode, at],
            "goal": goal,
        }


def hindsight(count: int, batch: int) -> Batches:
    parts = list(derived.episodes(count))
    return NumpyGoals({name: np.stack([rows[name] for rows in parts]) for name in parts[0]}, batch)
