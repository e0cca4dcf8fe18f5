"""Futex notifications between processes."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from deepspeed_gear.store.native_rows import address

BELL_WORDS = 32  # 128 bytes each: no two bells share a cache line


class FutexEvents:
    """Futex words ("bells") of the processes of a file; each counts how often it was rung.

    A waiter reads the count, checks its condition, and waits with the count that it read, so no change in
    between is missed.

    Thread and process safety: any process may ring and wait.

    Args:
        words: [n, BELL_WORDS], uint32, in shared memory.
    """

    def __init__(self, words: np.ndarray, native: ModuleType) -> None:
        self._words, self._native = words, native
        self._counts = [words[i, :1].data for i in range(len(words))]  # NumPy's scalars are slower
        self._addresses = [address(words) + i * words.strides[0] for i in range(len(words))]

    def count(self, bell: int) -> int:
        """Return how often a bell was rung."""
        return int(self._counts[bell][0])

    def ring(self, bell: int) -> None:
        """Wake all waiters of a bell; this thread's earlier writes are visible by then."""
        self._native.bell_ring(self._addresses[bell])

    def wait(self, bell: int, seen: int, timeout_s: float) -> None:
        """Wait until a bell's count is not `seen`, at most `timeout_s`; a signal ends the wait too."""
        self._native.bell_wait(self._addresses[bell], seen, timeout_s)

    def fence(self) -> None:
        """Issue a memory fence between earlier and later reads and writes, as other processes see them."""
        self._native.fence()
