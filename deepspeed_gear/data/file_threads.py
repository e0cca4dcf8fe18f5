"""Threads that write, digest and scan the files of a data set."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_MOST_THREADS = 8
_DISK_THREADS = 4  # they wait for the disk, and compute nothing

Task = Callable[[], None]
Result = TypeVar("Result")


class Workers:
    """Threads that write, digest and scan files; with one thread, the caller does it at once.

    Threads start with the first task. `close` ends them.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        """Make the threads' pools.

        Args:
            num_threads: Threads that compute. None: the cores of this process, at most 8.
        """
        cores = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self.num_threads = cores if num_threads is None else num_threads
        self._compute: ThreadPoolExecutor | None = None
        self._disk: ThreadPoolExecutor | None = None
        if self.num_threads > 1:
            self._compute = ThreadPoolExecutor(self.num_threads, "gear-data")
            self._disk = ThreadPoolExecutor(_DISK_THREADS, "gear-disk")

    def chain(self, uses_disk: bool = False) -> Chain:
        """Return a chain of tasks, which run one after the other."""
        return Chain(self._disk if uses_disk else self._compute)

    def start_one(self, task: Callable[[], Result]) -> Callable[[], Result]:
        """Start a task that waits for the disk; return what waits for its result."""
        if self._disk is not None:
            return self._disk.submit(task).result
        result = task()
        return lambda: result

    def run(self, tasks: list[Task]) -> None:
        """Run tasks that may run at the same time; raise the first error."""
        if self._compute is None:
            for task in tasks:
                task()
            return
        for future in [self._compute.submit(task) for task in tasks]:
            future.result()

    def close(self) -> None:
        """End the threads; safe to call twice."""
        for pool in (self._compute, self._disk):
            if pool is not None:
                pool.shutdown(cancel_futures=True)


class Chain:
    """Tasks of which one runs at a time, in their order."""

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._tasks: deque[Task] = deque()
        self._is_running = False

    def add(self, task: Task) -> None:
        """Run a task after those that were added before; it must not raise."""
        if self._pool is None:
            task()
            return
        with self._lock:
            self._tasks.append(task)
            if self._is_running:
                return
            self._is_running = True
        self._pool.submit(self._run)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._is_running = False
                    return
                task = self._tasks.popleft()
            task()
