"""Futex events: processes that share a file notify each other, and wait for notifications."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from deepspeed_gear.store.native_rows import address

EVENT_WORDS = 32  # 128 bytes each: no two events share a cache line


class FutexEvents:
    """Events between the processes of a file: any may notify an event and wait for it.

    An event is a futex word that counts its notifications: a waiter reads the count, checks its
    condition, and waits with that count, so it misses no change. `words`: [n, EVENT_WORDS], uint32.
    """

    def __init__(self, words: np.ndarray, native: ModuleType) -> None:
        self._words = words
        self._native = native
        self._counts = [words[i, :1].data for i in range(len(words))]  # NumPy's scalars are slower
        self._addresses = [address(words) + i * words.strides[0] for i in range(len(words))]

    def count(self, event: int) -> int:
        """Return how often an event was notified."""
        return int(self._counts[event][0])

    def notify(self, event: int) -> None:
        """Wake all waiters of an event; this thread's earlier writes are visible by then."""
        self._native.futex_notify(self._addresses[event])

    def wait(self, event: int, seen: int, timeout_s: float) -> None:
        """Wait until an event's count is not `seen`, at most `timeout_s`; a signal ends it too."""
        self._native.futex_wait(self._addresses[event], seen, timeout_s)

    def fence(self) -> None:
        """Issue a memory fence between earlier and later accesses, as other processes see them."""
        self._native.fence()
