"""Reading several files or episodes at once, in their order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_AHEAD_BYTES = 256 << 20  # of results that are computed or wait
_MOST_THREADS = 8


def read_ahead(
    read: Callable[[Item], Result], items: Iterable[Item], num_bytes: Callable[[Item], int]
) -> Iterator[Result]:
    """Yield `read(item)` of each item in order, while threads read the items that follow.

    For readers whose work releases the interpreter's lock, as decompression in pyarrow and decoding in PyAV
    do; HDF5 has a lock of its own.

    Args:
        read: Reads one item. What it raises is raised at the item's place in the order.
        items: Taken as far as is read ahead, by the calling thread.
        num_bytes: Returns the memory that the result of an item takes, at least about.
    Cost: a thread per core, at most 8; memory of 256 MiB of results, or of one that is larger.
    """
    waiting: deque[tuple[Future[Result], int]] = deque()
    ahead = 0
    with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "gear-ingest") as pool:
        try:
            for item in items:
                size = num_bytes(item)
                while waiting and ahead + size > _AHEAD_BYTES:
                    first, first_bytes = waiting.popleft()
                    ahead -= first_bytes
                    yield first.result()
                waiting.append((pool.submit(read, item), size))
                ahead += size
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for future, _ in waiting:
                future.cancel()
