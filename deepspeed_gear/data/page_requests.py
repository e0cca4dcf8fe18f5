"""Pages of a mapped array that are requested from the disk before they are read."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PageRequests:
    """Requests runs of elements of a mapped array, so that the disk reads many pages at a time.

    A request only advises the kernel. One beyond the end of the file, or that fails, has no effect:
    its pages are read by page faults.
    """

    def __init__(self, array: NDArray[Any]) -> None:
        """Prepare requests.

        Args:
            array: A one-dimensional `numpy.memmap`.
        """
        self._memory: mmap.mmap = array._mmap  # type: ignore[attr-defined]
        self._first_byte = array.ctypes.data - np.frombuffer(self._memory, np.uint8, 1).ctypes.data
        self._width = array.itemsize

    def request(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Request the elements [begins[i], ends[i]) of all runs, each page once.

        Cost: about 1 us for each run of pages.
        """
        size = len(self._memory)
        page = mmap.PAGESIZE
        first = np.clip(self._first_byte + begins * self._width, 0, size) // page * page
        last = np.clip(self._first_byte + ends * self._width, 0, size)
        order = np.argsort(first, kind="stable")
        first = first[order]
        until = np.maximum.accumulate(last[order])
        # Runs that share a page or touch are one: of pages [0, 2), [1, 3) and [5, 6), the second
        # begins before the first ends, and the third begins a request.
        whole = -(-until // page) * page
        starts = np.flatnonzero(np.concatenate([[True], first[1:] > whole[:-1]]))
        stops = np.concatenate([starts[1:] - 1, [len(first) - 1]])
        for begin, end in zip(first[starts].tolist(), until[stops].tolist(), strict=True):
            if begin < end:
                self._memory.madvise(mmap.MADV_WILLNEED, begin, end - begin)
