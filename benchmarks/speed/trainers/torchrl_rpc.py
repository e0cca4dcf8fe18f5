"""TorchRL: RemoteTensorDictReplayBuffer in a process of its own, which trainers call by RPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support.ranks import free_port
from peers.interface import Array, Buffer, Rows, System
from peers.torchrl import dict_of
from torch.distributed import rpc
from torchrl.data import LazyTensorStorage, PrioritizedSampler, RemoteTensorDictReplayBuffer

from speed import team, work

BUFFERS: dict[bool, Any] = {}  # in the owner's process: the timed one or not


class RemoteBatches(Buffer):
    """Batches of a buffer in another process.

    Args:
        buffer: Returns what has the buffer's methods.
    """

    def __init__(self, buffer: Callable[[], Any], batch: int) -> None:
        self._remote = buffer
        self._batch = batch

    def sample(self) -> Any:
        return self._remote().sample(self._batch)

    def update(self, found: Any, priorities: Array) -> None:
        self._remote().update_priority(found["index"], torch.from_numpy(priorities))

    def rows(self, found: Any) -> Rows:
        known = ("number", *work.steps(0, 1))
        names = [name for name in found.keys() if name in known]  # noqa: SIM118  (a TensorDict's rows)
        return {name: found[name].numpy() for name in names}

    def restore(self) -> None:
        """Set the known priorities."""
        self._remote().update_priority(
            torch.arange(team.ITEMS), torch.from_numpy(team.SHARES).float()
        )


def fill(timed: Any, known: Any, count: int) -> None:
    """Add the transitions, and the items with known priorities."""
    for first in range(0, count, System.fills):
        timed.extend(dict_of(work.steps(first, System.fills)))
    known.extend(dict_of({"number": np.arange(team.ITEMS)}))


def buffer(is_timed: bool) -> Any:
    """Return a buffer of the owner, in its process."""
    return BUFFERS[is_timed]


def _start(rank: int, port: int, processes: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"process{rank}", rank=rank, world_size=processes + 1, rpc_backend_options=options)


class Shared(team.Shared):
    def __init__(self, processes: int, count: int) -> None:
        self._processes = processes
        self.given = free_port()
        for is_timed, capacity, alpha in ((True, count, 0.6), (False, team.ITEMS, 1.0)):
            sampler = PrioritizedSampler(capacity, alpha=alpha, beta=0.4)
            BUFFERS[is_timed] = RemoteTensorDictReplayBuffer(
                storage=LazyTensorStorage(capacity), sampler=sampler
            )
        fill(BUFFERS[True], BUFFERS[False], count)

    def join(self) -> None:
        _start(0, self.given, self._processes)

    def close(self) -> None:
        rpc.shutdown(graceful=False)


class Trainer(team.Trainer):
    def __init__(self, rank: int, processes: int, given: Any) -> None:
        _start(rank + 1, given, processes)
        self._rank = rank

    def open(self, is_timed: bool, trainers: int, batch: int) -> Buffer:
        made = RemoteBatches(rpc.remote("process0", buffer, (is_timed,)).rpc_sync, batch)
        if self._rank == 0 and not is_timed:
            made.restore()
        return made

    def close(self) -> None:
        rpc.shutdown(graceful=False)
