"""Prefetch: batches prepared by a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_CHECK_S = 0.05


class Prefetcher(Generic[T]):
    """Calls `produce(0)`, `produce(1)`, ... in a daemon thread; at most `depth` results wait. An error of it
    ends the thread, and is raised by the `get` that would have returned its result.
    """

    def __init__(self, produce: Callable[[int], T], depth: int) -> None:
        self._produce = produce
        self._results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gear-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        index = 0
        while not self._stop.is_set():
            try:
                result: tuple[T | None, BaseException | None] = (self._produce(index), None)
            except BaseException as error:
                result = (None, error)
            while not self._stop.is_set():
                try:
                    self._results.put(result, timeout=_CHECK_S)
                    break
                except queue.Full:
                    continue
            if result[1] is not None:
                return
            index += 1

    def get(self, check: Callable[[], None] = lambda: None) -> T:
        """Return the next result, or raise what `produce` raised; a wait ends if `check` raises."""
        while True:
            try:
                result, error = self._results.get(timeout=_CHECK_S)
                break
            except queue.Empty:
                check()
                if not self._thread.is_alive() and self._results.empty():
                    raise RuntimeError("the prefetch thread has ended") from None
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def ready(self) -> T | None:
        """Return the next result if it is ready; None if it is not, or is an error."""
        with self._results.mutex:
            first = self._results.queue[0] if self._results.queue else None
        if first is None or first[1] is not None:
            return None
        return self._results.get_nowait()[0]

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
