"""Selections that a device still reads: released when the event after its last kernel is done."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from deepspeed_gear.batching.transfer.cuda_streams import Event

Release = Callable[[int], None]


class DeferredRelease:
    """Selections in the order in which they were read. Thread safe.

    A selection keeps the rows that it has drawn, and its entry of the ring. So the process says that it has
    read it only when its device has: `settle` looks, without waiting, whenever the process takes or adds
    something.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Event, Release, int]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, event: Event, release: Release, key: int) -> None:
        """Release a selection once an event is done; events come in the order of one lane.

        Args:
            event: After the last kernel that reads the selection.
            release: `consume` of the selection's stream.
            key: Of the selection.
        """
        with self._lock:
            self._waiting.append((event, release, key))

    def settle(self) -> None:
        """Release the selections whose events are done."""
        if not self._waiting:
            return
        with self._lock:
            while self._waiting and self._waiting[0][0].query():
                _, release, key = self._waiting.popleft()
                release(key)

    def drain(self) -> bool:
        """Wait for all events and release their selections; return whether there were any."""
        with self._lock:
            had_some = bool(self._waiting)
            while self._waiting:
                event, release, key = self._waiting.popleft()
                event.synchronize()
                release(key)
        return had_some
