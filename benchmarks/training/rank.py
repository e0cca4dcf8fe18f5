"""A rank of one system in a node: takes orders as JSON lines, trains or collects for some steps."""

from __future__ import annotations

import os
import sys
import time
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from peers.orders import carry_out
from speed import work

from training.model import SIZES, Trainer

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])


def take_own_process_id() -> None:
    """Continue with an id that no other node's rank has: Reverb takes processes of equal ids for
    one.
    """
    while os.getpid() % WORLD != RANK:
        if child := os.fork():
            os._exit(os.waitpid(child, 0)[1] != 0)


class Rank:
    """Carries out the orders of `run.py`. Collective."""

    def __init__(self, name: str, folder: str, count: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._system = import_module(f"training.{name}")
        self._version = version({"gear": "deepspeed_gear", "reverb": "dm-reverb"}[name])
        self._folder = folder
        self._count = count
        self._trainers = {point: Trainer(*size) for point, size in SIZES.items()}
        self._sources: dict[str, Any] = {}
        if hasattr(self._system, "serve"):
            self._system.serve(RANK, WORLD, count)
        dist.barrier()

    def open(self, mode: str, batch: int) -> dict[str, Any]:
        """Begin to draw; return the share of trajectories that are in other nodes' parts."""
        self._sources[mode] = self._system.Source(mode, batch, RANK, WORLD, self._folder)
        return {"others": sum(self._check(mode) for _ in range(3)) / 3, "version": self._version}

    def close(self, mode: str) -> dict[str, Any]:
        self._check(mode)
        dist.barrier()
        self._sources.pop(mode).close()
        return {}

    def _check(self, mode: str) -> float:
        """Compare every row of a batch with the data."""
        rows = {name: values.numpy() for name, values in self._sources[mode].next().items()}
        work.check(rows, len(rows["reward"]), work.EPISODE, self._count * work.EPISODE)
        numbers = rows["reward"][:, 0].astype(int) // work.EPISODE
        return float((numbers * WORLD // self._count != RANK).mean())

    def turn(self, mode: str, point: str, steps: int, fresh: bool) -> dict[str, Any]:
        """Train, or collect where the point has no model; after a warm-up, on fresh batches or on
        one.
        """
        source = self._sources[mode]
        trainer = self._trainers.get(point)
        loss = None
        for number in range(steps + 1):
            if number == 1:
                dist.barrier()
                begun = time.perf_counter()
                cpu = time.process_time()
            if fresh or number == 0:
                rows = source.next()
            if trainer is not None:
                loss = trainer.step(rows)
        times = {"s": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}
        return {**times, "loss": None if loss is None else float(loss)}

    def network(self, size: int) -> dict[str, Any]:
        """Send so many bytes from node 1 to node 0."""
        values = torch.zeros(size, dtype=torch.uint8)
        dist.barrier()
        begun = time.perf_counter()
        if RANK < 2:
            (dist.recv, dist.send)[RANK](values, 1 - RANK)
        return {"s": time.perf_counter() - begun}


def main() -> None:
    """Answer orders; the first one begins the rank."""
    take_own_process_id()
    made = cache(lambda: Rank(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    carry_out(lambda order: getattr(made(), order.pop("do"))(**order))
    os._exit(0)  # threads of servers would hold the process


if __name__ == "__main__":
    main()
