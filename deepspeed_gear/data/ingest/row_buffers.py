"""Reuse of memory for the rows that readers pass on, once no array refers to it."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES = 64 * 1024  # smaller arrays come from the allocator, which keeps their pages
_STEP_BYTES = 256 * 1024  # of the sizes of buffers
MOST_FREE_BYTES = 64 * 1024 * 1024


class RowBuffers:
    """Arrays whose memory is used again after the last reference to them.

    The pages of a new array are cleared by the kernel when they are first written, which takes
    longer than copying rows into them; and memory that was used a moment ago is still in a cache.

    Thread-safe. Memory: that of the arrays in use at one time, and up to 64 MiB that are free.
    """

    _shared: weakref.ref[RowBuffers] | None = None
    _shared_lock = threading.Lock()

    def __init__(self) -> None:
        """Begin without memory."""
        # Reentrant: the garbage collector may delete a loan while this thread has the lock.
        self._lock = threading.RLock()
        self._free: list[NDArray[np.uint8]] = []  # the one that was used last at the end

    @classmethod
    def shared(cls) -> RowBuffers:
        """Return the buffers of all readers of this process, which last as long as one uses them.

        Sources that are read one after the other use the same memory.
        """
        with cls._shared_lock:
            known = None if cls._shared is None else cls._shared()
            if known is None:
                known = cls()
                cls._shared = weakref.ref(known)
            return known

    def lends(self, shape: Sequence[int], dtype: np.dtype[Any]) -> bool:
        """Return whether the memory of such an array is used again: of 64 KiB or more."""
        return math.prod(shape) * dtype.itemsize >= LEAST_BYTES and not dtype.hasobject

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array without a certain content, in C order."""
        if not self.lends(shape, dtype):
            return np.empty(shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        loan = _Loan(self, self._buffer(-(-size // _STEP_BYTES) * _STEP_BYTES))
        return np.asarray(loan)[:size].view(dtype).reshape(shape)

    def _buffer(self, size: int) -> NDArray[np.uint8]:
        """Return the buffer that was used last of those with a fitting size, or a new one."""
        with self._lock:
            for place in reversed(range(len(self._free))):
                if size <= len(self._free[place]) <= 2 * size:
                    return self._free.pop(place)
        return np.empty(size, np.uint8)

    def take_back(self, buffer: NDArray[np.uint8]) -> None:
        """Keep a buffer that no array refers to."""
        with self._lock:
            self._free.append(buffer)
            while sum(map(len, self._free)) > MOST_FREE_BYTES:
                self._free.pop(0)


class _Loan:
    """A buffer in use: the base of all arrays that view it, which is deleted with the last one."""

    def __init__(self, buffers: RowBuffers, buffer: NDArray[np.uint8]) -> None:
        self._buffers = buffers
        self._buffer = buffer
        self.__array_interface__ = buffer.__array_interface__

    def __del__(self) -> None:
        self._buffers.take_back(self._buffer)
