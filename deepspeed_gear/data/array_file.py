"""NumPy files that grow row by row, written, digested and scanned by threads."""

from __future__ import annotations

import hashlib
import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepspeed_gear.data.dataset_files import FileEntry, npy_header, probe_digest
from deepspeed_gear.data.file_threads import Task, Workers
from deepspeed_gear.data.statistics.column_scan import ColumnScan, block_rows
from deepspeed_gear.errors import DataError
from deepspeed_gear.file_system import start_writeback
from deepspeed_gear.schema import LENGTH_BYTES

BLOCK_BYTES = 2 * 1024 * 1024
LEAST_BLOCKS = 3  # of a file: one that is filled, and two that threads read
MOST_BLOCKS = 6
_LEAST_HOLED_ROW = 64 * 1024
_WRITEBACK_BYTES = 16 * 1024 * 1024


class _Block:
    """Rows that are written together, and which of them count in the statistics."""

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.rows: NDArray[np.uint8] = np.empty((num_rows, row_bytes), np.uint8)
        self.keep: NDArray[np.bool_] = np.empty(num_rows, np.bool_)
        self.num_readers = 0  # threads that still read it


class ArrayFile:
    """A NumPy file that grows row by row, and whose header is completed at the end.

    Rows are copied into a block of about 2 MiB. Full blocks are written, digested and scanned, each
    at the same time as the others and in the order of rows. So file, digest and scan do not depend
    on the number of threads, nor on how many rows are appended at a time.

    Not thread-safe.
    """

    def __init__(
        self,
        path: Path,
        dtype: np.dtype[Any],
        row_shape: tuple[int, ...],
        workers: Workers | None = None,
        scan: ColumnScan | None = None,
        block_bytes: int = BLOCK_BYTES,
        is_opaque: bool = False,
        most_blocks: int = MOST_BLOCKS,
    ) -> None:
        """Create the file.

        Args:
            workers: Threads that take the blocks; None: the caller does.
            scan: Takes the rows for statistics.
            block_bytes: Bytes of a block, at most; but at least one block of the scan.
            is_opaque: The rows are those of an opaque column. The zeros after large values are
                holes of the file, which take no disk.
            most_blocks: Blocks in memory: with more of them, one task that waits, such as a write,
                stops the others later.
        """
        self.path = path
        self._dtype = dtype
        self._row_shape = row_shape
        self._row_bytes = int(np.prod(row_shape, dtype=np.int64)) * dtype.itemsize
        self._scan = scan
        least = 1 if scan is None else block_rows(scan.column)
        self._has_holes = is_opaque and self._row_bytes >= _LEAST_HOLED_ROW
        self._block_rows = least * max(1, block_bytes // (least * self._row_bytes))
        self._file = path.open("wb", buffering=0)
        header = npy_header(dtype, (0, *row_shape))
        self._file.write(header)
        self._begin = len(header)
        self._end = self._begin  # of the rows that were given to threads
        self._started = self._begin  # of the rows whose writeback has started
        self._digest = hashlib.sha256()
        workers = workers or Workers(1)
        self._chains = [workers.chain(uses_disk=True), workers.chain(), workers.chain()]
        self._block: _Block | None = None
        self._num_filled = 0  # rows of the block
        self._free: list[_Block] = []
        self._most_blocks = most_blocks
        self._num_busy = 0  # blocks that threads read
        self._change = threading.Condition()  # of the two
        self._error: BaseException | None = None

    def append(
        self,
        array: NDArray[Any],
        and_zero_row: bool = False,
        keep: bool | NDArray[np.bool_] = True,
    ) -> None:
        """Append rows, or one row without the row axis, and then a row of zeros if asked for.

        Args:
            keep: Whether rows count in the statistics, all alike or [rows]; a row of zeros never
                does.
        Raises:
            OSError: A block that was appended before could not be written.
        """
        rows = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, self._row_bytes)
        at = 0
        while at < len(rows):
            block = self._block_to_fill()
            count = min(len(rows) - at, self._block_rows - self._num_filled)
            until = self._num_filled + count
            block.rows[self._num_filled : until] = rows[at : at + count]
            kept = keep if isinstance(keep, bool) else keep[at : at + count]
            block.keep[self._num_filled : until] = kept
            self._filled(until)
            at += count
        if and_zero_row:
            block = self._block_to_fill()
            block.rows[self._num_filled] = 0
            block.keep[self._num_filled] = False
            self._filled(self._num_filled + 1)

    def flush(self) -> None:
        """Pass on the rows that are left in the block. Later appends would begin in mid-block."""
        if self._block is not None:
            self._pass_on()

    def wait(self) -> None:
        """Wait until all rows are written, digested and scanned; after `flush`.

        Raises:
            OSError: One could not be written.
        """
        with self._change:
            self._change.wait_for(lambda: self._num_busy == 0)
        if self._error is not None:
            raise self._error
        if self._has_holes:
            os.truncate(self._file.fileno(), self._end)  # the last row may end with a hole

    def leave_out_scan(self) -> None:
        """Scan no row; before the first one."""
        self._scan = None

    def memory_map(self) -> NDArray[Any]:
        """Return the written rows, [rows, *shape], mapped; after `wait`."""
        rows = (self._end - self._begin) // self._row_bytes
        shape = (rows, *self._row_shape)
        return np.memmap(self.path, self._dtype, "r", offset=self._begin, shape=shape)

    def finish(self) -> FileEntry:
        """Complete the header, flush the file to the disk and close it."""
        self.flush()
        self.wait()
        num_rows = (self._end - self._begin) // self._row_bytes
        os.pwrite(self._file.fileno(), npy_header(self._dtype, (num_rows, *self._row_shape)), 0)
        os.fsync(self._file.fileno())
        self._file.close()
        size = self.path.stat().st_size
        return FileEntry(size, self._digest.hexdigest(), probe_digest(self.path))

    def stop(self) -> None:
        """Wait until no thread uses the file, and leave out what has not begun."""
        if self._error is None:
            self._error = DataError(str(self.path), "must not be discarded", None, "write it again")
        with self._change:
            self._change.wait_for(lambda: self._num_busy == 0)

    def discard(self) -> None:
        """Close the file without completing it; safe to call twice, and on a full disk."""
        self.stop()
        with suppress(OSError):
            self._file.close()

    def _block_to_fill(self) -> _Block:
        if self._error is not None:
            raise self._error
        if self._block is None:
            with self._change:
                self._change.wait_for(lambda: self._free or self._num_busy < self._most_blocks - 1)
                block = self._free.pop() if self._free else None
            self._block = block or _Block(self._block_rows, self._row_bytes)
        return self._block

    def _filled(self, num_rows: int) -> None:
        self._num_filled = num_rows
        if num_rows == self._block_rows:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the block to the threads."""
        block = self._block
        assert block is not None
        self._block = None
        rows = block.rows[: self._num_filled]
        keep = block.keep[: self._num_filled]
        self._num_filled = 0
        tasks: list[Task] = [
            partial(self._write, rows, self._end),
            partial(self._digest.update, rows.reshape(-1).data),
        ]
        if self._scan is not None:
            tasks.append(partial(self._scan_rows, rows, keep))
        self._end += rows.nbytes
        block.num_readers = len(tasks)
        with self._change:
            self._num_busy += 1
        for chain, task in zip(self._chains, tasks, strict=False):
            chain.add(partial(self._do, task, block))

    def _do(self, task: Task, block: _Block) -> None:
        try:
            if self._error is None:
                task()
        except BaseException as error:
            self._error = error  # the thread that appends raises it
        with self._change:
            block.num_readers -= 1
            if block.num_readers == 0:
                self._num_busy -= 1
                self._free.append(block)
                self._change.notify_all()

    def _write(self, rows: NDArray[np.uint8], offset: int) -> None:
        fd = self._file.fileno()
        if self._has_holes:
            for row in rows:
                length = LENGTH_BYTES + int.from_bytes(row[:LENGTH_BYTES].tobytes(), "little")
                _write_all(fd, row[:length].data, offset)
                offset += len(row)
        else:
            _write_all(fd, rows.reshape(-1).data, offset)
            offset += rows.nbytes
        if offset - self._started >= _WRITEBACK_BYTES:
            # The disk writes while rows are still added, so that the flush at the end is short.
            start_writeback(fd, self._started, offset - self._started)
            self._started = offset

    def _scan_rows(self, rows: NDArray[np.uint8], keep: NDArray[np.bool_]) -> None:
        assert self._scan is not None
        values = rows.view(self._dtype).reshape(len(rows), *self._row_shape)
        self._scan.add(values, None if keep.all() else keep)


def _write_all(fd: int, left: memoryview, offset: int) -> None:
    while left:
        written = os.pwrite(fd, left, offset)
        left = left[written:]
        offset += written
