"""A remote file as an open binary file that fetches the ranges that are read."""

from __future__ import annotations

import io
from typing import Any

from deepspeed_gear.data.sources.block_cache import BLOCK_BYTES
from deepspeed_gear.data.sources.remote_source import RemoteSource
from deepspeed_gear.errors import DataError

_MOST_BLOCKS = 32  # of one request: 8 MiB


class RangedFile(io.RawIOBase):
    """Reads blocks of a remote file: one block at first, and up to 8 MiB in sequence.

    A read returns as many bytes as are asked for, up to the end of the file. Not thread-safe; a
    file may be opened several times.
    """

    def __init__(self, source: RemoteSource, name: str) -> None:
        self._source = source
        self._name = name
        self._size = source.files[name].size
        self._read_range = source.range_reader(name)
        self._at = 0
        self._next = -1  # the block after those of the last request
        self._ahead = 1  # blocks of the next request in sequence
        self._held: dict[int, bytes] = {}  # blocks of the last request

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        bases = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        at = bases[whence] + offset
        if at < 0:
            raise OSError("a place before the beginning of the file")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        filled = self.read_at(self._at, view)
        self._at += filled
        return filled

    def read_at(self, at: int, view: memoryview) -> int:
        """Fill a view with the bytes from a place on, and return how many there are."""
        stop = min(self._size, at + len(view))
        begin = at
        while at < stop:
            number, offset = divmod(at, BLOCK_BYTES)
            block = self._block(number, -(-stop // BLOCK_BYTES))
            part = block[offset : offset + stop - at]
            view[at - begin : at - begin + len(part)] = part
            at += len(part)
        return max(0, stop - begin)

    def _block(self, number: int, end: int) -> bytes:
        """Return a block; `end` is the first one that the caller does not need."""
        if number in self._held:
            return self._held[number]
        block = self._source.cache.get(self._name, number)
        if block is not None:
            return block
        is_next = number == self._next
        self._ahead = min(_MOST_BLOCKS, 2 * self._ahead) if is_next else 1
        last = -(-self._size // BLOCK_BYTES)
        stop = min(last, number + min(_MOST_BLOCKS, max(self._ahead, end - number)))
        if self._source.has_ranges:
            inside = range(number + 1, stop)
            known = (i for i in inside if (self._name, i) in self._source.cache)
            self._fetch(number, next(known, stop), number)
        else:
            self._fetch(0, last, number)
        return self._held[number]

    def _fetch(self, first: int, stop: int, needed: int) -> None:
        """Fetch blocks [first, stop); those of the last 8 MiB and the needed one are held."""
        low = first * BLOCK_BYTES
        high = min(self._size, stop * BLOCK_BYTES)
        self._held = {}
        number = first
        waiting = bytearray()
        for part in self._source.fetch(self._name, self._read_range, low, high):
            waiting += part
            is_end = low + len(part) >= high
            low += len(part)
            while len(waiting) >= BLOCK_BYTES or (is_end and waiting):
                block = bytes(waiting[:BLOCK_BYTES])
                del waiting[:BLOCK_BYTES]
                self._source.cache.put(self._name, number, block)
                self._held[number] = block
                old = number - _MOST_BLOCKS
                if old != needed:
                    self._held.pop(old, None)
                number += 1
        self._next = stop
        if needed not in self._held:
            raise DataError(
                self._source.shown(self._name),
                "must have the bytes that its server states",
                self._size,
                "ingest it again",
            )


class RemoteBytes:
    """The bytes of a remote file by index; a slice fetches nothing until its bytes are used."""

    def __init__(self, file: RangedFile, low: int, high: int) -> None:
        self._file = file
        self._low = low
        self._high = high
        self._window = b""  # bytes around the last index
        self._window_at = 0

    @classmethod
    def whole(cls, source: RemoteSource, name: str) -> RemoteBytes:
        """Return all bytes of a file."""
        return cls(RangedFile(source, name), 0, source.files[name].size)

    def __len__(self) -> int:
        return self._high - self._low

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            low, high, _ = at.indices(len(self))
            return RemoteBytes(self._file, self._low + low, self._low + max(low, high))
        if not 0 <= at < len(self):
            raise IndexError(at)
        if not 0 <= at - self._window_at < len(self._window):
            end = min(len(self), at + 256)
            self._window = self[at:end].tobytes()
            self._window_at = at
        return self._window[at - self._window_at]

    def tobytes(self) -> bytes:
        content = bytearray(len(self))
        self._file.read_at(self._low, memoryview(content))
        return bytes(content)
