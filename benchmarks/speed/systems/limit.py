"""What the machine itself needs: C loops that draw, copy rows by memcpy and update a tree of integer sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from support.limit import CopyLimit
from support.select_limit import SelectLimit

from speed import derived, work
from speed.work import Array, Batches, Rows


def version() -> str:
    return "C, -O3"


def _outs(columns: list[torch.Tensor], *lead: int) -> list[list[torch.Tensor]]:
    return [[torch.zeros(*lead, *c.shape[1:], dtype=c.dtype) for c in columns] for _ in range(2)]


class Loop(Batches):
    """A loop that times itself; `block` takes the place of single steps."""

    def __init__(self, names: list[str], outs: list[list[torch.Tensor]], run: Any) -> None:
        self._names, self._outs, self._run = names, outs, run

    def sample(self) -> Any:
        self._run(1)
        return self._outs[0]

    def update(self, found: Any, priorities: Array) -> None:
        """`sample` has updated the tree."""

    def rows(self, found: Any) -> Rows:
        return {name: values.numpy() for name, values in zip(self._names, found, strict=True)}

    def block(self, seconds: float) -> dict[str, Any]:
        """As `child.block`."""
        wall = self._run(8)[1]
        wall = self._run(max(4, min(20000, int(seconds * 1e9 / max(1, np.median(wall))))))[1]
        us = float(np.median(wall)) / 1e3
        return {"us": us, "steps": len(wall), "cpu_us": us}


def _loop(rows: Rows, batch: int, prioritized: bool) -> Batches:
    columns = [torch.from_numpy(values) for values in rows.values()]
    random, count = np.random.default_rng(0), len(columns[0])
    masses = random.integers(1, 1 << 30, count) if prioritized else None
    fresh = random.integers(1, 1 << 30, (64, batch))
    outs = _outs(columns, batch)
    return Loop(list(rows), outs, SelectLimit(columns, outs, masses, fresh, count).run)


def transitions(count: int, batch: int, prioritized: bool, fill: int | None = None) -> Batches:
    return _loop(work.steps(0, count), batch, prioritized)


def n_step(count: int, batch: int) -> Batches:
    """Copy rows that hold their returns, as of systems that compute them once."""
    return _loop(work.steps(0, count) | derived.returns(np.arange(count)), batch, False)


def _copies(rows: Rows, length: int, batch: int, longest: int) -> Batches:
    columns = [torch.from_numpy(values) for values in rows.values()]
    count, random = len(columns[0]), np.random.default_rng(0)
    outs = _outs(columns, batch, length)
    limit = CopyLimit(columns, outs, length)
    draws = random.integers(0, count // longest, (4096, batch)) * longest
    draws += random.integers(0, longest - length + 1, draws.shape)
    return Loop(list(rows), outs, lambda n: limit.run(np.ascontiguousarray(np.resize(draws, (n, batch)))))


def windows(count: int, batch: int, length: int) -> Batches:
    rows = work.steps(0, count)
    del rows["next_observation"]
    return _copies(rows, length, batch, work.EPISODE)


def frames(count: int, batch: int, length: int) -> Batches:
    parts = [rows["frame"] for rows in work.frames(count // 500, 500)]
    return _copies({"frame": np.concatenate(parts)}, length, batch, 500)
