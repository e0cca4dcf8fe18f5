"""Memory that the processes of a node share: create, attach, liveness, removal.

A file is created under no name, allocated, initialised and only then linked, so nobody ever sees half a
store. Each attached process holds a lock on one byte of the file; the kernel releases it when the process
ends, however it ends. A file on which nobody holds a lock is garbage: `remove_garbage` unlinks it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed_gear.errors import ConfigError, StoreError, StoreFullError
from deepspeed_gear.store.layout import MAGIC
from deepspeed_gear.store.memory_limits import check_available

SHM = Path("/dev/shm")
MADV_POPULATE_WRITE = 23  # Linux 5.14: allocate now, as a write would; an error instead of a SIGBUS
_PAGE = mmap.PAGESIZE
_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux
_WHOLE = 0  # l_len of "to the end of the file, however long"


def _record_lock(fd: int, command: int, kind: int, start: int, length: int) -> int:
    """Call fcntl with an open-file-description lock; return the lock type that it reports."""
    packed = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    return int(_FLOCK.unpack(fcntl.fcntl(fd, command, packed))[0])


def _try_lock(fd: int, kind: int, start: int, length: int) -> bool:
    try:
        _record_lock(fd, fcntl.F_OFD_SETLK, kind, start, length)
        return True
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise


def file_path(name: str) -> Path:
    """Return the path of a shared-memory file.

    Args:
        name: Of the file, or the prefix of its name.
    Raises:
        ConfigError: It could lead out of /dev/shm.
    """
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name in (".", ".."):
        rule = "must be the name of a file without its folder"
        raise ConfigError(f"name of a file in {SHM}", rule, name, "leave out slashes")
    return SHM / name


class PeerTakenError(StoreError):
    """Another process has this index."""


class SharedMemory:
    """A shared-memory file, mapped. Use `create` or `attach`.

    `buffer` is a memoryview, not the map itself: an array over a map does not count as one of its users, so
    that closing the map would leave the array without memory; over a memoryview it keeps the map.

    Thread and process safety: creation, attachment and removal may race between processes; the content is the
    caller's to guard.
    """

    def __init__(self, path: Path, fd: int, num_bytes: int, peer: int) -> None:
        self.path, self.fd, self.num_bytes, self.peer = path, fd, num_bytes, peer
        self.buffer = memoryview(mmap.mmap(fd, num_bytes))
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def create(cls, num_bytes: int, peer: int = 0, huge_pages: bool = True) -> SharedMemory:
        """Allocate memory under no name; `link` makes it visible.

        Args:
            num_bytes: Size in bytes.
            peer: Index of this process, which others can ask `is_alive` about.
            huge_pages: Ask for transparent huge pages; whether they came is `huge_bytes`.
        Raises:
            StoreFullError: The node's shared memory has no room, or this process may not have so much.
            StoreError: There is no usable /dev/shm.
        """
        try:
            fd = os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(str(SHM), "must be a writable tmpfs", error.strerror) from error
        try:
            free = os.fstatvfs(fd)
            if num_bytes > free.f_bavail * free.f_frsize:  # trying would take what others still need
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            check_available(num_bytes)
            os.ftruncate(fd, num_bytes)
            memory = cls(SHM, fd, num_bytes, peer)
            memory._allocate(huge_pages)
        except OSError as error:
            os.close(fd)
            raise _full(num_bytes, error) from error
        except BaseException:
            os.close(fd)
            raise
        _try_lock(fd, fcntl.F_WRLCK, peer, 1)
        return memory

    def _allocate(self, huge_pages: bool) -> None:
        """Make every page exist now, so that a full /dev/shm is an error and not a SIGBUS later."""
        if huge_pages:
            with contextlib.suppress(OSError):  # a kernel without them: the store works with small pages
                self.advise(mmap.MADV_HUGEPAGE)
        try:
            self.advise(MADV_POPULATE_WRITE)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
        os.posix_fallocate(self.fd, 0, self.num_bytes)

    def advise(self, option: int, first: int = 0, num_bytes: int | None = None) -> None:
        """Call madvise for bytes of the map; None: up to its end.

        Raises:
            OSError: The kernel refuses.
        """
        whole: Any = self.buffer.obj
        whole.madvise(option, first, self.num_bytes - first if num_bytes is None else num_bytes)

    def link(self, name: str) -> None:
        """Give the memory its name, after it was initialised."""
        self.path = file_path(name)
        # A directory's descriptor makes Python call linkat, which follows the symbolic link; link does not.
        directory = os.open(SHM, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            source = f"/proc/self/fd/{self.fd}"
            os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
        finally:
            os.close(directory)

    @classmethod
    def attach(cls, name: str, peer: int) -> SharedMemory:
        """Map the memory of a name.

        Raises:
            ConfigError: The name could lead out of /dev/shm.
            StoreError: It is not there, not this user's, not private, or its run has ended.
        """
        path = file_path(name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise StoreError(str(path), "must be an existing store", error.strerror) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(str(path), "must be a regular file")
            if status.st_uid != os.geteuid():
                raise StoreError(str(path), f"must belong to user {os.geteuid()}", status.st_uid)
            if stat.S_IMODE(status.st_mode) != 0o600:
                raise StoreError(str(path), "must have mode 0600", oct(stat.S_IMODE(status.st_mode)))
            if not _try_lock(fd, fcntl.F_WRLCK, peer, 1):
                raise PeerTakenError(f"{path}: peer {peer}", "must be attached by one process only")
            if os.fstat(fd).st_nlink == 0:
                raise StoreError(str(path), "must belong to a living run", None, "its run has ended")
            if status.st_size == 0:
                raise StoreError(str(path), "must be a gear store", "an empty file")
            return cls(path, fd, status.st_size, peer)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach_one_of(cls, name: str, peers: Sequence[int]) -> SharedMemory:
        """Map the memory of a name under the first of some indices that no process has; as `attach`.

        Raises:
            StoreError: All are taken, or as `attach`.
        """
        for peer in peers:
            try:
                return cls.attach(name, peer)
            except PeerTakenError:
                continue
        raise StoreError(str(SHM / name), "must have a free place", len(peers), "raise the table's writers")

    def unlink(self) -> None:
        """Take the name away: nobody can attach any more, and the memory goes with its last process."""
        os.unlink(self.path)
        self.path = SHM

    def is_alive(self, peer: int) -> bool:
        """Return whether the process with this index is attached."""
        if peer == self.peer:
            return not self._closed
        return _record_lock(self.fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, peer, 1) != fcntl.F_UNLCK

    @property
    def huge_bytes(self) -> int:
        """Bytes of this mapping that lie on huge pages, as the kernel counts them."""
        return _mapped_huge_bytes(self.path, os.fstat(self.fd).st_ino)

    def close(self) -> None:
        """Detach; the last to detach removes the file. Views stay valid, and keep the map for that."""
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():  # a forked child shares the lock with its parent and must leave it alone
            _record_lock(self.fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, self.peer, 1)
            _unlink_if_garbage(self.fd, self.path)
        os.close(self.fd)
        self.buffer = memoryview(b"")


def _full(num_bytes: int, error: OSError) -> StoreFullError:
    free = os.statvfs(SHM)
    return StoreFullError(
        str(SHM),
        f"must have {num_bytes} bytes free",
        f"{free.f_bavail * free.f_frsize} bytes ({error.strerror})",
        "lower the table's capacity, use load: map, enlarge /dev/shm, or run `gear clean`",
    )


def _mapped_huge_bytes(path: Path, inode: int) -> int:
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.split()[4] == str(inode)
        elif inside and line.startswith("ShmemPmdMapped:"):
            total += int(line.split()[1]) * 1024
    return total


def _unlink_if_garbage(fd: int, path: Path) -> bool:
    """Remove a store that no process holds a byte of. Of racing callers exactly one succeeds."""
    if path == SHM or os.pread(fd, len(MAGIC), 0) != MAGIC or not _try_lock(fd, fcntl.F_WRLCK, 0, _WHOLE):
        return False
    try:
        if os.stat(path, follow_symlinks=False).st_ino == os.fstat(fd).st_ino:
            os.unlink(path)
            return True
    except FileNotFoundError:
        pass
    return False


def stores(prefix: str) -> list[Path]:
    """Return this user's store files of a prefix, living or not; files of other programs are none.

    Raises:
        ConfigError: The prefix could lead out of /dev/shm.
    """
    found = SHM.glob(f"{glob.escape(file_path(prefix).name)}-*")
    return [path for path in sorted(found) if _is_store(path)]


def _is_store(path: Path) -> bool:
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False  # it is gone, or cannot be read


def living(prefix: str) -> list[Path]:
    """Return this user's store files of a prefix that a process is attached to."""
    return [path for path, fd in _opened(prefix) if _is_held(fd)]


def _is_held(fd: int) -> bool:
    return _record_lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, 0, _WHOLE) != fcntl.F_UNLCK


def _opened(prefix: str) -> Iterator[tuple[Path, int]]:
    """Walk this user's store files of a prefix, each open for as long as it is looked at."""
    for path in stores(prefix):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            yield path, fd
        finally:
            os.close(fd)


def remove_garbage(prefix: str) -> list[Path]:
    """Remove stores of runs that have ended; never touch one that a process is attached to.

    Returns:
        The files that were removed.
    """
    return [path for path, fd in _opened(prefix) if _unlink_if_garbage(fd, path)]
