"""Blocks of remote files in one temporary file, so that no byte is fetched twice."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from typing import IO, TypeAlias

BLOCK_BYTES = 256 << 10
_Key: TypeAlias = "tuple[str, int]"  # name of a file, number of a block


class BlockCache:
    """A file of blocks without a name, so that a process that dies leaves nothing on the disk.

    It takes at most half of the space that is free in the temporary folder (`TMPDIR`) when it is
    made. Then the block that was read longest ago gives its place to a new one. Thread-safe.
    """

    def __init__(self, most_blocks: int | None = None) -> None:
        self._most = most_blocks
        self._slots: OrderedDict[_Key, int] = OrderedDict()  # the block that was read last is last
        self._lengths: dict[_Key, int] = {}
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()

    def get(self, name: str, number: int) -> bytes | None:
        """Return a block, or None if it is not there."""
        key = (name, number)
        with self._lock:
            if key not in self._slots or self._file is None:
                return None
            self._slots.move_to_end(key)
            at = self._slots[key] * BLOCK_BYTES
            return os.pread(self._file.fileno(), self._lengths[key], at)

    def __contains__(self, key: _Key) -> bool:
        return key in self._slots

    def put(self, name: str, number: int, block: bytes | memoryview) -> None:
        """Keep a block; one that the disk has no space for is not kept."""
        key = (name, number)
        with self._lock:
            if self._most is None:
                free = shutil.disk_usage(tempfile.gettempdir()).free
                self._most = free // 2 // BLOCK_BYTES
            if key in self._slots or self._most < 1:
                return
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="gear-ingest-")  # noqa: SIM115
            slot = len(self._slots)
            if slot >= self._most:
                oldest, slot = self._slots.popitem(last=False)
                del self._lengths[oldest]
            try:
                written = os.pwrite(self._file.fileno(), block, slot * BLOCK_BYTES)
            except OSError:
                written = 0
            if written == len(block):
                self._slots[key] = slot
                self._lengths[key] = len(block)
            else:  # the disk is full: the slots that exist are used again
                self._most = len(self._slots)

    def close(self) -> None:
        """Remove all blocks."""
        with self._lock:
            self._slots.clear()
            self._lengths.clear()
            if self._file is not None:
                self._file.close()
                self._file = None
