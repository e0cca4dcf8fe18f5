"""A ring of NumPy arrays, as single-file implementations (CleanRL's) have one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from speed import derived, work

from peers.interface import Array, Buffer, NotOfferedError, Rows, Steps, System
from peers.numpy_rollouts import NumpyLeases, NumpyRollouts


class NumpyBatches(Buffer):
    def __init__(self, rows: Rows, batch: int, length: int = 1, longest: int = 1) -> None:
        self._rows = rows
        self._batch = batch
        self._length = length
        self._longest = longest
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


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Buffer:
    if prioritized:
        raise NotOfferedError
    return NumpyBatches(work.steps(0, fill or count), batch)


def windows(count: int, batch: int, length: int) -> Buffer:
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


def stored(count: int, batch: int, length: int, folder: Path) -> Buffer:
    rows = {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
    return NumpyBatches(rows, batch, length, work.EPISODE)


def frames(count: int, batch: int, length: int) -> Buffer:
    parts = [rows["frame"] for rows in work.frames(count // 500, 500)]
    return NumpyBatches({"frame": np.concatenate(parts)}, batch, length, 500)


class NumpyRing(Buffer):
    """Arrays [capacity / N, N, ...]."""

    def __init__(self, need: Steps) -> None:
        self._need = need
        self._at = 0
        self._full = False
        self._size = need.capacity // need.num_envs
        shapes = {
            name: (self._size, need.num_envs, *v.shape[1:]) for name, v in need.columns.items()
        }
        self._rings = {name: np.zeros(shapes[name], v.dtype) for name, v in need.columns.items()}

    def add(self, rows: Rows) -> None:
        for name, ring in self._rings.items():
            ring[self._at] = np.array(rows[name])
        self._next()

    def _next(self) -> None:
        self._at += 1
        if self._at == self._size:
            self._full = True
            self._at = 0

    def add_call(
        self,
        obs: Array,
        next_obs: Array,
        action: int,
        reward: float,
        terminated: bool,
        truncated: bool,
    ) -> None:
        rings = self._rings
        at = self._at
        rings["observation"][at, 0] = obs
        rings["next_observation"][at, 0] = next_obs
        rings["action"][at, 0] = action
        rings["reward"][at, 0] = reward
        rings["done"][at, 0] = terminated
        rings["truncated"][at, 0] = truncated
        self._next()

    def sample(self) -> Any:
        at = np.random.randint(0, self._size if self._full else self._at, self._need.batch)
        env = np.random.randint(0, self._need.num_envs, self._need.batch)
        return {name: ring[at, env] for name, ring in self._rings.items()}

    def rows(self, found: Any) -> Rows:
        return dict(found)

    def __len__(self) -> int:
        return (self._size if self._full else self._at) * self._need.num_envs


class NumpyWhole(NumpyRing):
    """A ring of steps that trajectories are copied into."""

    def __init__(self, capacity: int) -> None:
        super().__init__(Steps(capacity, columns=next(work.trajectories(1))))
        self._flat = {name: ring[:, 0] for name, ring in self._rings.items()}

    def add(self, rows: Rows) -> None:
        for name, ring in self._flat.items():
            ring[self._at : self._at + work.EPISODE] = rows[name]
        self._at = (self._at + work.EPISODE) % self._size


def n_step(count: int, batch: int) -> Buffer:
    """Add returns instead of rewards, as CleanRL's Rainbow does, from a window of the
    latest steps.
    """
    rows = work.steps(0, count)
    length = work.EPISODE
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
    """Arrays [episodes, steps, ...]; goals are drawn by index arithmetic, as in OpenAI
    Baselines.
    """

    def __init__(self, episodes: Iterable[Rows], count: int, batch: int) -> None:
        parts = list(episodes)
        super().__init__(
            {name: np.stack([rows[name] for rows in parts]) for name in parts[0]}, batch
        )

    def sample(self) -> Any:
        rows = self._rows
        count = self._count
        steps = derived.HORIZON
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


class NumpyArrays(System):
    kinds = frozenset(("adding", "calls", "hindsight"))
    steps = NumpyRing
    goals = NumpyGoals


SYSTEM = NumpyArrays(
    "numpy",
    transitions=transitions,
    windows=windows,
    frames=frames,
    n_step=n_step,
    whole=NumpyWhole,
    rollouts=NumpyRollouts,
    leases=NumpyLeases,
    write=write,
    stored=stored,
)
