"""What the machine itself needs: C loops that draw, copy rows by memcpy and update a tree of
integer sums.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from support.limit import CopyLimit, SelectLimit
from speed import derived, work

from peers.interface import Array, Buffer, Rows, System


def _outs(columns: list[torch.Tensor], *lead: int) -> list[list[torch.Tensor]]:
    return [[torch.zeros(*lead, *c.shape[1:], dtype=c.dtype) for c in columns] for _ in range(2)]


class Loop(Buffer):
    """A loop that times itself; `block` takes the place of single steps."""

    def __init__(self, names: list[str], outs: list[list[torch.Tensor]], run: Any) -> None:
        self._names = names
        self._outs = outs
        self._run = run

    def sample(self) -> Any:
        self._run(1)
        return self._outs[0]

    def update(self, found: Any, priorities: Array) -> None:
        """`sample` has updated the tree."""

    def rows(self, found: Any) -> Rows:
        return {name: values.numpy() for name, values in zip(self._names, found, strict=True)}

    def block(self, seconds: float, model: Callable[[], None] | None = None) -> dict[str, Any]:
        """As `child.block`; with a model, the loop makes one batch after each of its passes."""
        if model is not None:
            times = []
            until = perf_counter() + seconds
            while perf_counter() < until or len(times) < 3:
                model()
                times.append(int(self._run(1)[1][0]))
            return {"us": float(np.median(times)) / 1e3, "steps": len(times)}
        wall = self._run(8)[1]
        wall = self._run(max(4, min(20000, int(seconds * 1e9 / max(1, np.median(wall))))))[1]
        return {"us": float(np.median(wall)) / 1e3, "steps": len(wall)}


def _loop(rows: Rows, batch: int, prioritized: bool) -> Buffer:
    columns = [torch.from_numpy(values) for values in rows.values()]
    random = np.random.default_rng(0)
    count = len(columns[0])
    masses = random.integers(1, 1 << 30, count) if prioritized else None
    fresh = random.integers(1, 1 << 30, (64, batch))
    outs = _outs(columns, batch)
    return Loop(list(rows), outs, SelectLimit(columns, outs, masses, fresh, count).run)


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Buffer:
    return _loop(work.steps(0, count), batch, prioritized)


def n_step(count: int, batch: int) -> Buffer:
    """Copy rows that hold their returns, as of systems that compute them once."""
    return _loop(work.steps(0, count) | derived.returns(np.arange(count)), batch, False)


def _copies(rows: Rows, length: int, batch: int, longest: int, kind: type[Loop] = Loop) -> Buffer:
    columns = [torch.from_numpy(values) for values in rows.values()]
    count = len(columns[0])
    random = np.random.default_rng(0)
    outs = _outs(columns, batch, length)
    limit = CopyLimit(columns, outs, length)
    draws = random.integers(0, count // longest, (4096, batch)) * longest
    draws += random.integers(0, longest - length + 1, draws.shape)
    done = 0

    def run(count: int) -> Any:
        nonlocal done
        turns = np.arange(done, done + count) % len(draws)
        done += count
        return limit.run(draws[turns])

    return kind(list(rows), outs, run)


def windows(count: int, batch: int, length: int) -> Buffer:
    rows = work.steps(0, count)
    del rows["next_observation"]
    return _copies(rows, length, batch, work.EPISODE)


def _row() -> np.dtype[Any]:
    rows = next(work.trajectories(1))
    return np.dtype([(name, values.dtype, values.shape[1:]) for name, values in rows.items()])


def write(count: int, folder: Path) -> None:
    row = _row()
    with open(folder / "rows", "wb") as file:
        for rows in work.trajectories(count // work.EPISODE):
            packed = np.empty(work.EPISODE, row)
            for name, values in rows.items():
                packed[name] = values
            file.write(packed.tobytes())


def _unpack(packed: Array, batch: int, length: int) -> Rows:
    values = packed.view(_row()).reshape(batch, length)
    return {name: values[name] for name in values.dtype.names or ()}


class Packed(Loop):
    """Rows of all columns, mapped."""

    def rows(self, found: Any) -> Rows:
        return _unpack(found[0].numpy().reshape(-1), *found[0].shape[:2])


class Reads(Buffer):
    """One read after another, of rows of all columns."""

    def __init__(self, count: int, batch: int, length: int, folder: Path) -> None:
        self._file = os.open(folder / "rows", os.O_RDONLY)
        self._random = np.random.default_rng(0)
        self._width = _row().itemsize
        self._count = count // work.EPISODE
        self._batch = batch
        self._length = length

    def sample(self) -> Any:
        first = self._random.integers(self._count, size=self._batch) * work.EPISODE
        first += self._random.integers(work.EPISODE - self._length + 1, size=self._batch)
        size = self._width * self._length
        return [os.pread(self._file, size, self._width * at) for at in first.tolist()]

    def rows(self, found: Any) -> Rows:
        return _unpack(np.frombuffer(b"".join(found), np.uint8), self._batch, self._length)

    def close(self) -> None:
        os.close(self._file)


def stored(count: int, batch: int, length: int, folder: Path) -> Buffer:
    rows = np.memmap(folder / "rows", np.uint8, mode="r+").reshape(count, -1)
    return _copies({"rows": rows}, length, batch, work.EPISODE, Packed)


def frames(count: int, batch: int, length: int) -> Buffer:
    parts = [rows["frame"] for rows in work.frames(count // 500, 500)]
    return _copies({"frame": np.concatenate(parts)}, length, batch, 500)


class Limit(System):
    def version(self) -> str:
        return "C, -O3"


SYSTEM = Limit(
    "",
    transitions=transitions,
    windows=windows,
    frames=frames,
    n_step=n_step,
    write=write,
    stored=stored,
    read=Reads,
)
