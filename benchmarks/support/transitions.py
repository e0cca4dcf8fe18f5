"""W2: single transitions, prioritized or uniform, in a Replay, in the limit and in cpprb."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from support.limit import SelectLimit
from support.subject import RING
from support.turns import Times, timed
from support.workloads import Workload, workload
from deepspeed_gear import Replay
from deepspeed_gear.ops import load_backend
from deepspeed_gear.ops.constants import MOST_MASS_BITS, ONE_Q62

ALPHA, BETA = 0.6, 0.4
SAMPLERS = ("prioritized", "uniform")
_NUM_FRESH = 64  # batches of new priorities that are used in turn
_CHUNK = 1 << 14  # priorities that are set at once before everything is timed


def mass(priorities: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the masses of priorities. [n], float32 -> [n], int64."""
    masses = torch.empty(len(priorities), dtype=torch.int64)
    load_backend().mass_(masses, priorities, round(alpha * ONE_Q62), MOST_MASS_BITS)
    return masses


def has_cpprb() -> bool:
    """Return whether cpprb is installed."""
    return find_spec("cpprb") is not None


def first_priorities(num_items: int) -> np.ndarray:
    """Return what every system's items have before the first batch. [n], float32, in (0, 1]."""
    return 1 - np.random.default_rng(1).random(num_items, np.float32)


def fresh_priorities(batch: int, seed: int = 2) -> np.ndarray:
    """Return new priorities of some batches. [n, B], float32, in (0, 1]."""
    return 1 - np.random.default_rng(seed).random((_NUM_FRESH, batch), np.float32)


class Gear:
    """A Replay over W2. Collective.

    Args:
        content: W2.
        sampler: "prioritized" or "uniform".
        batch: Samples of a batch on each rank.
    """

    def __init__(self, content: Workload, sampler: str, batch: int) -> None:
        self.prioritized = sampler == "prioritized"
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        exponents = {"alpha": ALPHA, "beta": BETA} if self.prioritized else {}
        size = content.num_trajectories * content.num_steps
        room = {"capacity_steps": size, "capacity_trajectories": content.num_trajectories}
        section: dict[str, Any] = {
            "tables": {"main": room},
            "sampler": {"kind": sampler, "unit": "step", **exponents},
            "fields": {column.name: {"offset": 0} for column in content.schema},
            "batch_size": ranks * batch,
        }
        self.replay = Replay(section, schemas={"main": content.schema})
        if self.replay._topology.rank == 0:
            for trajectory in content.trajectories():
                self.replay.add(trajectory)
        if dist.is_initialized():
            dist.barrier()
        if self.prioritized:
            self._set_first(size, content.num_steps)
        self._fresh = torch.from_numpy(fresh_priorities(batch)).unbind()

    def _set_first(self, num_items: int, num_steps: int) -> None:
        """Set the first priorities, in parts that the log has room for; all ranks sample between them."""
        values = first_priorities(num_items)
        for begin in range(0, num_items, _CHUNK):
            self.replay.sample()
            if self.replay._topology.rank == 0:
                items = np.arange(begin, min(begin + _CHUNK, num_items))
                ids, steps = (torch.from_numpy(x) for x in np.divmod(items, num_steps))
                self.replay.set_priorities(ids, torch.from_numpy(values[items]), steps)

    def step(self, turn: int) -> None:
        """Sample a batch with its weights, and update its priorities."""
        batch = self.replay.sample()
        if self.prioritized:
            assert batch.is_weight is not None
            self.replay.update_priorities(batch, self._fresh[turn % _NUM_FRESH])

    def run(self, count: int) -> Times:
        return timed(self.step, count)

    def close(self) -> None:
        self.replay.close()


class Cpprb:
    """cpprb's buffer with the same transitions.

    Args:
        content: W2.
        sampler: "prioritized" or "uniform".
        batch: Samples of a batch.
    """

    def __init__(self, content: Workload, sampler: str, batch: int) -> None:
        import cpprb

        size = content.num_trajectories * content.num_steps
        columns = {
            column.name: {"shape": column.shape or 1, "dtype": np.dtype(column.dtype)}
            for column in content.schema
        }
        self._batch, self.prioritized = batch, sampler == "prioritized"
        if self.prioritized:
            self.buffer = cpprb.PrioritizedReplayBuffer(size, columns, alpha=ALPHA)
        else:
            self.buffer = cpprb.ReplayBuffer(size, columns)
        for trajectory in content.trajectories():
            self.buffer.add(**trajectory)
        if self.prioritized:
            self.buffer.update_priorities(np.arange(size), first_priorities(size))
        self._fresh = fresh_priorities(batch)

    def step(self, turn: int) -> None:
        """Sample a batch with its weights, and update its priorities."""
        if self.prioritized:
            batch = self.buffer.sample(self._batch, beta=BETA)
            self.buffer.update_priorities(batch["indexes"], self._fresh[turn % _NUM_FRESH])
        else:
            self.buffer.sample(self._batch)

    def run(self, count: int) -> Times:
        return timed(self.step, count)

    def close(self) -> None:
        del self.buffer


def limit_of(gear: Gear, content: Workload, batch: int) -> SelectLimit:
    """Return the limit over the rows that a Replay holds, with buffers of its own."""
    table = gear.replay.tables["main"]
    columns = [table.tensor(column.name) for column in content.schema]
    outs = [[torch.zeros(batch, *c.shape[1:], dtype=c.dtype) for c in columns] for _ in range(RING)]
    size = content.num_trajectories * content.num_steps
    masses = mass(torch.from_numpy(first_priorities(size)), ALPHA).numpy() if gear.prioritized else None
    fresh = mass(torch.from_numpy(fresh_priorities(batch)).reshape(-1), ALPHA).view(-1, batch).numpy()
    return SelectLimit(columns, outs, masses, fresh, size)


def w2(scale: float = 1.0) -> Workload:
    """Return W2, or a part of it."""
    return workload("W2", scale)
