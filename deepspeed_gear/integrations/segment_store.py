"""TransferQueue's values in files of a node: put, get, clear, save and load, safe under kills.

The files outlive every process that uses them. A put writes an unnamed file, then, under the lock
of the store, names it and appends one record to the log: that record is the commit point of the
whole put. A get reads the log's new records, then the files. The kernel drops the lock of a process
that dies, and an unnamed file with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepspeed_gear.errors import (
    CheckpointError,
    DataError,
    StoreError,
    StoreFullError,
    show_bytes,
)
from deepspeed_gear.file_system import sync
from deepspeed_gear.integrations.segment_index import (
    MOST_DIMS,
    FieldBlock,
    Form,
    Freed,
    SegmentIndex,
    aligned,
    check_samples,
    clear_record,
    frame,
    put_record,
    unframed,
)
from deepspeed_gear.store.process_bound import ProcessBound

LOCK = "lock"
LOG = "log"
SEGMENTS = "segments"
_STAGE = "saving-"
_LEAST_LOG = 4 << 20  # bytes from which on the log is written anew
_RESERVE = 16 << 20  # bytes that puts leave to the log: a full store must take clears
_LOG_GROWTH = 4  # times the records of live segments
_MOST_BUFFERS = 512  # of one system call
_MOST_BYTES = 1 << 30  # likewise
_READ_WRITE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


class StoredField(NamedTuple):
    """Values of one field as they were put, in the order of the samples that were asked for."""

    forms: list[Form]  # that occur
    form_indexes: np.ndarray  # of each value, in `forms`. [n], int64
    sizes: np.ndarray  # bytes of each value. [n], int64
    shapes: np.ndarray  # of each value, the first `num_dims` of its form. [n, MOST_DIMS], int64
    content: np.ndarray  # their bytes, one after another. [sizes.sum()], uint8


class _Read(NamedTuple):
    """Bytes that lie together in a segment and in what is read."""

    segment: int
    start: int
    field: str
    to: int
    size: int


class SegmentStore(ProcessBound):
    """A node's values in this process. Any number of processes may open a folder at once.

    Invariants: a put that returned is found by every get that begins afterwards, in every process,
    also if any of them is killed; a value that a get returns is the whole value of one put; a value
    that was superseded or cleared leaves its pages to the file system.

    Thread safety: every method may be called from several threads.

    Args:
        folder: On a file system of this machine, tmpfs, ext4 or xfs; made if it does not exist.
        capacity_bytes: Bytes of live values above which puts are refused; None: what the file
            system holds.
        syncs: Whether each put is flushed to the disk before it returns, for crashes of the
            machine.
    """

    def __init__(
        self, folder: Path, capacity_bytes: int | None = None, syncs: bool = False
    ) -> None:
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.syncs = syncs
        self._threads = threading.RLock()
        self._index = SegmentIndex()
        self._segments = folder / SEGMENTS
        self._log_path = folder / LOG
        self._log = -1
        self._log_end = 0
        self._segments.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._lock = os.open(folder / LOCK, _READ_WRITE, 0o600)
        with self._locked():
            self._sweep()
        if syncs:
            sync(folder)

    def close(self) -> None:
        """Release the descriptors; the values stay."""
        with self._threads:
            for descriptor in (self._log, self._lock):
                if descriptor >= 0:
                    os.close(descriptor)
            self._log = -1
            self._lock = -1

    def put(self, samples: Sequence[int] | np.ndarray, blocks: Mapping[str, FieldBlock]) -> None:
        """Store values of fields, all of them or, on an error or death, none.

        Args:
            samples: Numbers of the samples. [n]; of one that is named twice the last value stays.
            blocks: By the names of fields.
        Raises:
            DataError: A block does not have one value for each sample.
            StoreFullError: There is too little room; nothing was stored.
        Cost: one copy of the bytes, into the page cache.
        """
        numbers = check_samples(np.asarray(samples))
        for name, block in blocks.items():
            if len(block.sizes) != len(numbers):
                rule = f"must have {len(numbers)} values, one for each sample"
                raise DataError(f"field {name}", rule, len(block.sizes), "give all or no values")
        if not len(numbers) or not blocks:
            return
        incoming = sum(int(block.sizes.sum()) for block in blocks.values())
        try:
            fd = os.open(self._segments, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            rule = "must lie on a file system with unnamed files"
            remedy = "choose a folder of this machine on tmpfs, ext4 or xfs"
            raise StoreError(str(self.folder), rule, error.strerror, remedy) from error
        try:
            self._check_room(incoming)
            space = os.fstatvfs(fd)
            if incoming + _RESERVE > space.f_bavail * space.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _write_blocks(fd, blocks)
            if self.syncs:
                os.fsync(fd)
            with self._locked():
                self._check_room(incoming)
                number = self._index.next_number
                path = self._segments / str(number)
                # A name that the log lacks is of a process that died before its record.
                path.unlink(missing_ok=True)
                # With a descriptor, ignored for absolute paths, Python calls linkat, which
                # follows the link.
                os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
                if self.syncs:
                    sync(self._segments)
                self._append(put_record(number, numbers, blocks))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._full(incoming, str(error.strerror)) from error
        finally:
            os.close(fd)

    def get(
        self, samples: Sequence[int] | np.ndarray, names: Sequence[str]
    ) -> dict[str, StoredField]:
        """Read values of fields into new memory.

        Args:
            samples: Numbers of the samples, in any order. [n].
            names: Fields that every one of them has.
        Raises:
            FieldError: A sample has no value of a field.
        Cost: one copy of the bytes, out of the page cache. It is repeated if a value is superseded
            or cleared meanwhile.
        """
        numbers = check_samples(np.asarray(samples))
        while True:
            with self._threads:
                self._refresh()
                places = {name: self._index.find(numbers, name) for name in names}
                fields, reads = self._plan(places)
            gone = None
            try:
                self._read(fields, reads)
            except FileNotFoundError as error:
                gone = error
            with self._threads:
                # Values are superseded or cleared in the log before their pages are freed, so what
                # is unchanged now was whole when it was read.
                changed = self._refresh() and any(
                    not np.array_equal(self._index.find(numbers, name), at)
                    for name, at in places.items()
                )
            if not changed and gone is None:
                return fields
            if not changed:
                rule = "must exist while its values are live"
                remedy = "it was removed by another program; put these values again"
                raise StoreError(str(gone.filename if gone else ""), rule, None, remedy) from gone

    def clear(self, samples: Sequence[int] | np.ndarray) -> None:
        """Remove all values of samples; those that have none are ignored. [n]."""
        numbers = check_samples(np.asarray(samples))
        if len(numbers):
            with self._locked():
                self._append(clear_record(numbers))

    def statistics(self) -> dict[str, int]:
        """Return the number of segments and the bytes of live values, of files and of the log."""
        with self._threads:
            self._refresh()
            held = 0
            for number in self._index.segments:
                with contextlib.suppress(FileNotFoundError):
                    held += (self._segments / str(number)).stat().st_blocks * 512
            return {
                "segments": len(self._index.segments),
                "live_bytes": self._index.live_bytes,
                "held_bytes": held,
                "log_bytes": self._log_end,
            }

    def save(self, folder: Path) -> None:
        """Save all values into a new folder.

        On the same file system its files are links: no bytes are copied, and puts wait only until
        the links are made. On another one they are copied after that.
        """
        shares = os.stat(folder.parent).st_dev == os.stat(self._segments).st_dev
        name = f"{_STAGE}{os.getpid()}-{threading.get_ident()}"
        stage = folder if shares else self.folder / name
        held = -1
        try:
            with self._locked():
                stage.mkdir()
                held = os.open(stage, os.O_RDONLY | os.O_CLOEXEC)
                # While it is held, `_sweep` of no process takes the stage for a dead one's.
                fcntl.flock(held, fcntl.LOCK_EX)
                (stage / SEGMENTS).mkdir()
                for number in self._index.segments:
                    os.link(self._segments / str(number), stage / SEGMENTS / str(number))
                (stage / LOG).write_bytes(self._index.snapshot())
            if not shares:
                shutil.copytree(stage, folder)
            for path in [*(folder / SEGMENTS).iterdir(), folder / LOG, folder / SEGMENTS, folder]:
                sync(path)
        finally:
            if held >= 0:
                os.close(held)
            if not shares:
                shutil.rmtree(stage, ignore_errors=True)

    def load(self, folder: Path) -> None:
        """Replace all values by those of a folder that `save` made.

        Raises:
            CheckpointError: The folder is not whole; nothing has changed.
        """
        index = SegmentIndex()
        content = (folder / LOG).read_bytes() if (folder / LOG).exists() else b""
        end = 0
        for record, record_end in unframed(content):
            index.apply(record)
            end = record_end
        lacking = [n for n in index.segments if not (folder / SEGMENTS / str(n)).exists()]
        if not content or end < len(content) or lacking:
            rule = "must hold a whole log and the segments that it names"
            given = f"{end} of {len(content)} bytes of the log, {len(lacking)} segments missing"
            raise CheckpointError(str(folder), rule, given, "load another save")
        with self._locked():
            first = self._index.next_number
            renamed = {number: first + at for at, number in enumerate(index.segments)}
            for number, to in renamed.items():
                (self._segments / str(to)).unlink(missing_ok=True)
                _link_or_copy(folder / SEGMENTS / str(number), self._segments / str(to))
            self._replace_log(index.snapshot(renamed))
            self._sweep()

    # What follows requires the lock of the threads; where stated, that of the store too.

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the store, with the index as the log has it."""
        with self._threads:
            self._check_open()
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                self._refresh()
                # What is left of a record by a process that died.
                if os.fstat(self._log).st_size > self._log_end:
                    os.ftruncate(self._log, self._log_end)
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _check_open(self) -> None:
        if self._lock < 0:
            raise StoreError(str(self.folder), "must be open", None, "open it again")

    def _refresh(self) -> bool:
        """Take over new records of the log; return whether there were any."""
        self._check_open()
        status = None
        with contextlib.suppress(FileNotFoundError):
            status = os.stat(self._log_path)
        if self._log < 0 or status is None or status.st_ino != os.fstat(self._log).st_ino:
            if self._log >= 0:
                os.close(self._log)
            self._log = os.open(self._log_path, _READ_WRITE, 0o600)
            self._log_end = 0
            self._index = SegmentIndex()
        size = os.fstat(self._log).st_size
        if size == self._log_end:
            return False
        with open(self._log, "rb", closefd=False) as file:
            file.seek(self._log_end)
            content = file.read(size - self._log_end)  # less if another process cuts the log
        before = self._log_end
        for record, end in unframed(content):
            self._index.apply(record)
            self._log_end = before + end
        return self._log_end != before

    def _append(self, record: bytes) -> None:
        """Commit a record, then free what it freed. Requires the lock of the store."""
        whole = frame(record)
        try:
            _write_pieces(self._log, [memoryview(whole)], self._log_end)
        except BaseException:
            os.ftruncate(self._log, self._log_end)
            raise
        if self.syncs:
            os.fsync(self._log)
        self._log_end += len(whole)
        self._free(self._index.apply(record))
        if self._log_end > max(_LEAST_LOG, _LOG_GROWTH * self._index.record_bytes):
            self._replace_log(self._index.snapshot())
            self._sweep()

    def _replace_log(self, content: bytes) -> None:
        """Write the log anew. Requires the lock of the store."""
        new = self.folder / f"{LOG}.new"
        new.write_bytes(content)
        if self.syncs:
            sync(new)
        new.chmod(0o600)
        new.replace(self._log_path)
        if self.syncs:
            sync(self.folder)
        self._refresh()

    def _sweep(self) -> None:
        """Free what processes left that died between a record and its effect. Requires the lock of
        the store.
        """
        for entry in os.scandir(self._segments):
            if int(entry.name) not in self._index.segments:
                os.unlink(entry.path)
        for segment in list(self._index.segments.values()):
            for name, part in segment.fields.items():
                dead = np.flatnonzero(~part.live)
                if len(dead):
                    self._punch(Freed(segment, name, dead))
        for stage in self.folder.glob(f"{_STAGE}*"):
            held = os.open(stage, os.O_RDONLY | os.O_CLOEXEC)
            try:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(stage, ignore_errors=True)
            finally:
                os.close(held)

    def _free(self, freed: Sequence[Freed]) -> None:
        for one in freed:
            if one.segment.number in self._index.segments:
                self._punch(one)
            else:
                with contextlib.suppress(FileNotFoundError):
                    (self._segments / str(one.segment.number)).unlink()

    def _punch(self, freed: Freed) -> None:
        """Free the pages that hold nothing but dead values.

        A file that a save links stays as it is: it is freed when all of its values are dead.
        """
        part = freed.segment.fields[freed.field]
        # Runs of dead values: of live [1, 0, 0, 1, 0] they are [1, 3) and [4, 5).
        edges = np.flatnonzero(np.diff(np.concatenate([[True], part.live, [True]])))
        firsts = edges[::2]
        lasts = edges[1::2]
        touched = np.searchsorted(firsts, freed.positions, side="right") - 1
        runs = np.unique(touched)
        starts = part.starts[firsts[runs]]
        ends = part.ends[lasts[runs] - 1]
        starts = -(-starts // _PAGE) * _PAGE
        sizes = ends // _PAGE * _PAGE - starts
        if not (sizes > 0).any():
            return
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(self._segments / str(freed.segment.number), os.O_RDWR | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_nlink == 1:
                    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
                        if size > 0:
                            _punch_hole(fd, start, size)
            finally:
                os.close(fd)

    def _check_room(self, incoming: int) -> None:
        if self.capacity_bytes is not None:
            with self._threads:
                free = self.capacity_bytes - self._index.live_bytes
            if incoming > free:
                raise self._full(incoming, f"{show_bytes(free)} of {self.capacity_bytes} bytes")

    def _full(self, incoming: int, given: str) -> StoreFullError:
        rule = f"must have {show_bytes(incoming)} free"
        remedy = "clear samples that were consumed, or raise capacity_bytes"
        return StoreFullError(str(self.folder), rule, given, remedy)

    def _plan(self, places: Mapping[str, np.ndarray]) -> tuple[dict[str, StoredField], list[_Read]]:
        """Return fields with room for their bytes, and what to read into them."""
        fields = {}
        reads = []
        for name, at in places.items():
            count = len(at)
            forms: dict[Form, int] = {}
            form_indexes = np.zeros(count, np.int64)
            sizes = np.zeros(count, np.int64)
            shapes = np.zeros((count, MOST_DIMS), np.int64)
            starts = np.zeros(count, np.int64)
            for number in np.unique(at[:, 0]).tolist():
                part = self._index.segments[number].fields[name]
                chosen = np.flatnonzero(at[:, 0] == number)
                positions = at[chosen, 1]
                form = part.block.form
                form_indexes[chosen] = forms.setdefault(form, len(forms))
                sizes[chosen] = part.block.sizes[positions]
                shapes[chosen, : form.num_dims] = part.block.shapes[positions]
                starts[chosen] = part.starts[positions]
            ends = np.cumsum(sizes)
            content = np.empty(int(ends[-1]) if count else 0, np.uint8)
            fields[name] = StoredField(list(forms), form_indexes, sizes, shapes, content)
            if count == 0:
                continue
            # Values that follow each other in the file and here are read at once.
            follows = (np.diff(at[:, 0]) == 0) & (starts[1:] == starts[:-1] + sizes[:-1])
            firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
            lasts = np.append(firsts[1:], count) - 1
            to = ends - sizes
            rows = zip(
                at[firsts, 0].tolist(),
                starts[firsts].tolist(),
                to[firsts].tolist(),
                (ends[lasts] - to[firsts]).tolist(),
                strict=True,
            )
            reads += [_Read(number, start, name, here, size) for number, start, here, size in rows]
        reads.sort(key=lambda one: one.segment)
        return fields, reads

    def _read(self, fields: Mapping[str, StoredField], reads: Sequence[_Read]) -> None:
        """Read bytes into fields; `reads` are in the order of their segments."""
        views = {name: one.content.data for name, one in fields.items()}
        for segment, of_segment in groupby(reads, key=lambda one: one.segment):
            fd = os.open(self._segments / str(segment), os.O_RDONLY | os.O_CLOEXEC)
            try:
                for one in of_segment:
                    _read_into(fd, one.start, views[one.field][one.to : one.to + one.size])
            finally:
                os.close(fd)


def _write_blocks(fd: int, blocks: Mapping[str, FieldBlock]) -> None:
    """Write the values of a segment, each field from its aligned start."""
    end = 0
    for block in blocks.values():
        at = end
        pieces = [memoryview(one).cast("B") for one in block.buffers if len(memoryview(one))]
        for first in range(0, len(pieces), _MOST_BUFFERS):
            at = _write_pieces(fd, pieces[first : first + _MOST_BUFFERS], at)
        end += int(block.sizes.sum())
        if at != end:
            rule = f"must have buffers of {int(block.sizes.sum())} bytes, the sum of its sizes"
            given = at - end + int(block.sizes.sum())
            raise DataError("a field's block", rule, given, "give the bytes of all values")
        end = aligned(end)


def _write_pieces(fd: int, pieces: list[memoryview], at: int) -> int:
    """Write pieces one after another; return where they end."""
    while pieces:
        written = os.pwritev(fd, pieces, at)
        at += written
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][written:]
    return at


def _read_into(fd: int, start: int, view: memoryview) -> None:
    while len(view):
        count = os.preadv(fd, [view[:_MOST_BYTES]], start)
        if count == 0:
            rule = "must have the bytes that the log names"
            raise StoreError("a segment", rule, f"none at {start}", "put its values again")
        view = view[count:]
        start += count


def _punch_hole(fd: int, start: int, size: int) -> None:
    """Free pages of a file, where its file system can."""
    fallocate: Any = ctypes.CDLL(None, use_errno=True).fallocate
    place = (ctypes.c_int64(start), ctypes.c_int64(size))
    if fallocate(ctypes.c_int(fd), ctypes.c_int(_PUNCH_HOLE), *place) != 0:
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))


def _link_or_copy(source: Path, to: Path) -> None:
    try:
        os.link(source, to)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        shutil.copyfile(source, to)
