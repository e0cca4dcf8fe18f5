"""Prefetcher: a background thread that prepares batches in advance."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_CHECK_S = 0.05


class Prefetcher(Generic[T]):
    """Background thread that calls a function with 0, 1, ... and keeps up to `depth` results.

    An error of the function ends the thread and is raised by the `get` that would have returned its
    result; the next `get` tries again. One thread begins, gets and stops.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._produce: Callable[[int], T] | None = None
        self._next = 0  # argument of the next call
        self._results: queue.Queue[T] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None  # the latest; None: there was none yet

    def begin(self, produce: Callable[[int], T]) -> None:
        """Drop prepared results; the next `get` begins again with `produce(0)`."""
        self.end()
        self._produce = produce

    def end(self) -> None:
        """Stop the thread; drop its results and its function."""
        self.stop()
        self._produce = None
        self._next = 0
        self._results = queue.Queue(self._depth)

    def start(self) -> None:
        """Start a thread; none may be alive."""
        self._error = None
        self._stop.clear()
        self._thread = threading.Thread(target=self._run, name="gear-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        assert self._produce is not None
        while not self._stop.is_set():
            try:
                result = self._produce(self._next)
            except BaseException as error:
                self._error = error
                return
            self._next += 1
            while not self._stop.is_set():
                with suppress(queue.Full):
                    self._results.put(result, timeout=_CHECK_S)
                    break
            else:
                # Stopped while the queue is full. The result is kept beyond the depth: the next
                # thread continues after it, so without it a batch would be missing.
                self._results.queue.append(result)

    def get(self, check: Callable[[], None] = lambda: None) -> T:
        """Return the next result, or raise the error of `produce`; waits end if `check` raises."""
        while True:
            if not self.is_alive and self._results.empty():
                error, self._error = self._error, None
                if error is not None:
                    raise error
                self.start()
            try:
                return self._results.get(timeout=_CHECK_S)
            except queue.Empty:
                check()

    @property
    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def ready(self) -> T | None:
        """Return the next result if it is ready; else None."""
        return None if self._results.empty() else self._results.get_nowait()

    def stop(self) -> None:
        """End the thread; the first `get` that finds no ready result starts it again."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._error = None
