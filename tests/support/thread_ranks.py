"""Ranks, or nodes, that are threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deepspeed_gear.distributed.control_plane import ControlPlane


class ThreadPlane(ControlPlane):
    """The control plane of one of several ranks that are threads, which share values
    and barrier.
    """

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = len(values)
        self.num_gathered = 0
        self._values = values
        self._barrier = barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        self.num_gathered += 1
        return found


def on_ranks(count: int, action: Callable[[ThreadPlane], Any]) -> list[Any]:
    """Run an action on several ranks; give the result, or the error, of each."""
    values = [None] * count
    barrier = threading.Barrier(count, timeout=280.0)

    def run(rank: int) -> Any:
        try:
            return action(ThreadPlane(rank, values, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as ranks:
        return list(ranks.map(run, range(count)))
