"""Reading ahead: threads that read several sources of an ingest side by side."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepspeed_gear.data.ingest.output_columns import OutputColumns
from deepspeed_gear.data.ingest.reader import Reader
from deepspeed_gear.data.ingest.readers import READERS
from deepspeed_gear.data.ingest.row_values import plain_bytes
from deepspeed_gear.data.trajectory_block import TrajectoryBlock

_MOST_THREADS = 8
HELD_BYTES = 1 << 30  # of rows that all open sources have in memory, beside those of the first one
# Of episodes that are read and not written yet, of all sources together: as many as are still in a
# cache when they are written, or many where the writer has waited for sources.
CACHED_BYTES = 16 << 20
_AHEAD_BYTES = 256 << 20
MOST_WAITS = 8


class ReadBlock(NamedTuple):
    """Episodes as a source has yielded them."""

    episodes: TrajectoryBlock
    file: Path | None  # `Reader.file` at that time

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays, about."""
        return sum(map(_num_bytes, self.episodes.arrays.values()))


def _num_bytes(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    is_plain = isinstance(value, np.ndarray) and value.dtype != object
    return value.nbytes if is_plain else plain_bytes(value)


def without_surplus(readers: Iterable[Reader]) -> Iterator[Reader]:
    """Yield readers as they are opened, and release the rows that exceed 1 GiB in memory together.

    Those of the first one stay, since reading them twice takes time.
    """
    held = 0
    for number, reader in enumerate(readers):
        held += reader.held_bytes
        if number and held > HELD_BYTES:
            held -= reader.held_bytes
            reader.release()
        yield reader


class SourceThread:
    """Reads the episodes of one source in a thread, up to a number of bytes ahead of their user.

    An error of the source is raised by the iterator, in the place of the episodes.

    Attributes:
        num_waits: How often the user has waited for a block.
    """

    def __init__(self, output: OutputColumns, most_bytes: int) -> None:
        self._output = output
        self._most_bytes = most_bytes
        self._change = threading.Condition()
        self._blocks: deque[ReadBlock] = deque()
        self._num_bytes = 0
        self.num_waits = 0
        self._is_done = False
        self._is_stopped = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gear-source", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for block in read(self._output):
                if not self._put(block):
                    break
        except BaseException as error:
            self._error = error  # the user raises it
        with self._change:
            self._is_done = True
            self._change.notify_all()

    def _put(self, block: ReadBlock) -> bool:
        """Add a block once there is room, or none waits; False: the user reads no more."""
        size = block.num_bytes

        def may_go_on() -> bool:
            fits = self._num_bytes + size <= self._most_bytes
            return self._is_stopped or fits or not self._blocks

        with self._change:
            self._change.wait_for(may_go_on)
            if self._is_stopped:
                return False
            self._blocks.append(block)
            self._num_bytes += size
            self._change.notify_all()
            return True

    def __iter__(self) -> Iterator[ReadBlock]:
        while True:
            with self._change:
                self.num_waits += not self._blocks
                self._change.wait_for(lambda: self._blocks or self._is_done)
                if not self._blocks:
                    break
                block = self._blocks.popleft()
                self._num_bytes -= block.num_bytes
                self._change.notify_all()
            yield block
        if self._error is not None:
            raise self._error

    def read_further(self, most_bytes: int) -> None:
        """Read up to another number of bytes ahead from now on."""
        with self._change:
            self._most_bytes = most_bytes
            self._change.notify_all()

    def close(self) -> None:
        """End the thread, after the block that it reads; safe to call twice."""
        with self._change:
            self._is_stopped = True
            self._change.notify_all()
        self._thread.join()


class SideBySide:
    """The episodes of all sources in their order, read ahead by a thread for each of some sources.

    The source whose episodes are asked for and those after it are read at the same time, as many as
    threads may work, up to 16 MiB ahead together (or one block of each), and up to 256 MiB once the
    caller has waited for sources eight times, which are decompressed more slowly than they are
    written. So the data set, and the error of a wrong source, are those of reading one source after
    the other. With one thread the caller reads, as it does for sources that are not read ahead.

    A context manager: its threads end with it, before readers are closed.
    """

    def __init__(
        self,
        outputs: Sequence[OutputColumns],
        num_threads: int | None = None,
    ) -> None:
        """Start no thread yet.

        Args:
            outputs: The sources.
            num_threads: Threads that may work. None: the cores of this process, at most 8.
        """
        cores = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._outputs = outputs
        self._num_threads = cores if num_threads is None else num_threads
        self._at_once = max(1, min(self._num_threads, len(outputs)))
        self._threads: dict[int, SourceThread] = {}  # by index of the source
        self._ahead_bytes = CACHED_BYTES
        self._num_waits = 0  # for sources that are read

    def blocks(self, index: int) -> Iterator[ReadBlock]:
        """Yield the episodes of a source in blocks; sources are asked for in their order."""
        if self._num_threads > 1:
            for other in range(index, min(index + self._at_once, len(self._outputs))):
                self._start(other)
        if index not in self._threads:
            yield from read(self._outputs[index])
            return
        thread = self._threads[index]
        for block in thread:
            yield block
            if self._num_waits + thread.num_waits > MOST_WAITS:
                self._read_further()
        self._num_waits += thread.num_waits
        thread.close()
        del self._threads[index]

    def _read_further(self) -> None:
        if self._ahead_bytes == _AHEAD_BYTES:
            return
        self._ahead_bytes = _AHEAD_BYTES
        for thread in self._threads.values():
            thread.read_further(_AHEAD_BYTES // self._at_once)

    def _start(self, index: int) -> None:
        output = self._outputs[index]
        reader = output.reader
        # A class from outside may not know what a thread may do.
        may_read_ahead = reader.reads_ahead and type(reader) in READERS.values()
        if index not in self._threads and may_read_ahead:
            self._threads[index] = SourceThread(output, self._ahead_bytes // self._at_once)

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *raised: object) -> None:
        for thread in self._threads.values():
            thread.close()


def read(output: OutputColumns) -> Iterator[ReadBlock]:
    """Yield the episodes of a source in blocks, each with the file that it comes from."""
    for block in output.blocks():
        yield ReadBlock(block, output.reader.file)
