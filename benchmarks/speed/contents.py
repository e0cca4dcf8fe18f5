"""How buffers are filled with the same data, of systems that have no way of their own for a kind of
work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from peers.interface import Buffer, NotOfferedError, Rows, Steps, System, Windows

from speed import derived, work


def made(system: System, kind: str, options: dict[str, Any]) -> Buffer:
    """Return a system's buffer for a kind of work, full."""
    return system.own[kind](**options) if kind in system.own else KINDS[kind](system, **options)


def transitions(
    system: System, count: int, batch: int, prioritized: bool, fill: int | None = None
) -> Buffer:
    """Return transitions; `fill`: so many of them, in a buffer for `count`."""
    if system.most_items is not None:
        if (fill or count) > 1_000_000:
            raise NotOfferedError("takes minutes to fill")
        count = min(count, system.most_items)
    sizes = {"capacity": count, "num_envs": system.fills, "batch": batch, "seed": None}
    columns = work.steps(0, 1)
    buffer = system.steps(
        Steps(**sizes, prioritized=prioritized, alpha=0.6, beta=0.4, columns=columns)
    )
    buffer.count = count
    end = fill or count
    for first in range(0, end, system.fills):
        buffer.add(work.steps(first, min(system.fills, end - first)))
    return buffer


def n_step(system: System, count: int, batch: int) -> Buffer:
    """Return transitions, in the order of environments where a system counts them."""
    count = min(count, system.most_items or count)
    num_envs = 10 if system.most_items else count // work.EPISODE
    if system.fills == System.fills:  # steps that follow each other are those of one environment
        num_envs = 1
        parts = (work.steps(at, work.EPISODE) for at in range(0, count, work.EPISODE))
    else:
        parts = derived.trajectory_steps(count, num_envs)
    sizes = {"capacity": count, "num_envs": num_envs, "batch": batch, "seed": None}
    returns = {"n_step": derived.N, "gamma": derived.GAMMA}
    buffer = system.steps(Steps(**sizes, **returns, columns=work.steps(0, 1)))
    for rows in parts:
        buffer.add(rows)
    return buffer


def hindsight(system: System, count: int, batch: int) -> Buffer:
    """Return episodes with goals."""
    return system.goals(derived.episodes(count), count, batch)


def windows(system: System, count: int, batch: int, length: int) -> Buffer:
    """Return trajectories."""
    parts = work.trajectories(count // work.EPISODE)
    columns = next(work.trajectories(1))
    return _windows(system, Windows(count, length, batch, seed=None, columns=columns), parts)


def frames(system: System, count: int, batch: int, length: int) -> Buffer:
    """Return trajectories of frames."""
    parts = work.frames(count // 500, 500)
    columns = next(work.frames(1, 500))
    return _windows(system, Windows(count, length, batch, seed=None, columns=columns), parts)


def _windows(system: System, need: Windows, parts: Iterable[Rows]) -> Buffer:
    buffer = system.windows(need)
    for rows in parts:
        buffer.add(rows)
    return buffer


def adding(system: System, num_envs: int, capacity: int) -> Buffer:
    """Return a buffer for steps of environments, which reset in the step that ends an episode."""
    columns = next(work.environment_steps(num_envs))
    need = Steps(capacity, num_envs, 256, seed=None, autoreset="same_step", columns=columns)
    return system.steps(need)


def calls(system: System, capacity: int) -> Buffer:
    """Return a buffer for the steps of one environment, as gymnasium returns them."""
    return system.steps(Steps(capacity, 1, 256, seed=None, columns=work.call_columns()))


def whole(system: System, capacity: int) -> Buffer:
    """Return a buffer for whole trajectories."""
    columns = next(work.trajectories(1))
    return system.steps(Steps(capacity, work.EPISODE, 256, seed=None, columns=columns))


def numbered(system: System, count: int, batch: int) -> Buffer:
    """Return items that are their number, of equal priorities."""
    columns = {"number": np.zeros(1, np.int32)}
    most = 1 << 20
    buffer = system.steps(Steps(count, most, batch, prioritized=True, seed=None, columns=columns))
    for first in range(0, count, most):
        buffer.add({"number": np.arange(first, min(first + most, count), dtype=np.int32)})
    return buffer


KINDS: dict[str, Callable[..., Buffer]] = {
    "transitions": transitions,
    "n_step": n_step,
    "hindsight": hindsight,
    "windows": windows,
    "frames": frames,
    "adding": adding,
    "calls": calls,
    "whole": whole,
    "numbered": numbered,
}
