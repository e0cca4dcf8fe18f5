"""Deferred release of selections that a device reads: after the event that follows its last kernel."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from deepspeed_gear.batching.transfer.cuda_streams import Event

Release = Callable[[int], None]


class DeferredRelease:
    """Selections that wait for release, in the order of their gathers. Thread safe.

    A selection pins the rows that it has drawn, and its ring entry. So the process releases it only when its
    device has read the rows: `settle` checks, without waiting, whenever the process samples or adds.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Event, Release, int]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, event: Event, release: Release, key: int) -> None:
        """Release a selection once an event is done; events are passed in the order of one stream.

        Args:
            event: After the last kernel that reads the selection.
            release: `consume` of the selection's stream.
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
