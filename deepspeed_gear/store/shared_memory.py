"""Shared-memory files of a node: create, attach, which processes live, removal of leftovers.

A file is created under no name, allocated, initialised and only then linked, so no process ever
maps half a store. Each attached process holds a lock on one byte of the file; the kernel releases
it when the process ends, however it ends. The lock belongs to an open file of its own: a map holds
its open file, so that the map of a forked child would keep the lock. A file on which no process
holds a lock is garbage: the last process to detach unlinks it, else its reaper does, else
`remove_garbage`. All of them lock the whole file first. A store that is kept is no garbage.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import mmap
import os
import re
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from deepspeed_gear.errors import (
    ConfigError,
    StoreError,
    StoreFullError,
    StoreGoneError,
    show_bytes,
)
from deepspeed_gear.liveness import hold, release
from deepspeed_gear.log import LOG
from deepspeed_gear.store.cgroup_limits import ENLARGE_SHM, check_available
from deepspeed_gear.store.memory_layout import KEPT_OFFSET, MAGIC
from deepspeed_gear.store.reaper import FLOCK, WHOLE, Start, unlink_same
from deepspeed_gear.timeouts import wait_until

SHM = Path("/dev/shm")
DEFAULT_PREFIX = "gear"  # of the names there
MADV_POPULATE_WRITE = 23  # Linux 5.14: allocate now, as a write would; an error instead of a SIGBUS
_NO_PEER = 1 << 40  # byte of no process: its holder has locked the whole file, to remove it
_REMOVAL_S = 1.0  # longest wait for another process to end a removal, which takes it two calls
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
# EFAULT: of populating a full tmpfs.
_NO_MEMORY = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFAULT)


def _record_lock(fd: int, command: int, kind: int, start: int, length: int) -> int:
    """Call fcntl with an open-file-description lock; return the lock type that it reports."""
    packed = FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    return int(FLOCK.unpack(fcntl.fcntl(fd, command, packed))[0])


def try_lock(fd: int, kind: int, start: int, length: int) -> bool:
    """Lock bytes of an open file (F_WRLCK, F_RDLCK); return whether no other open file has them."""
    try:
        _record_lock(fd, fcntl.F_OFD_SETLK, kind, start, length)
        return True
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise


def file_path(name: str) -> Path:
    """Return the path of a file's name or prefix; ConfigError: it could lead out of /dev/shm."""
    if not isinstance(name, str) or not name or "/" in name or "\0" in name or name in (".", ".."):
        rule = "must be the name of a file without its folder"
        raise ConfigError(f"name of a file in {SHM}", rule, name, "leave out slashes")
    return SHM / name


class PeerTakenError(StoreError):
    """Another process has this index."""


def clean_command(prefix: str, kept: bool = True) -> str:
    """Return the command that removes the stores of a prefix, for the remedy of an error."""
    named = [] if prefix == DEFAULT_PREFIX else ["--prefix", shlex.quote(prefix)]
    return f"`{' '.join(['gear clean', *['--kept'] * kept, *named])}`"


class SharedMemory:
    """A shared-memory file, mapped by `create` or `attach`.

    Creation, attachment and removal may race between processes; the content is the caller's to
    guard.

    `buffer` is a memoryview: over the map itself, an array would not keep it from closing.
    """

    def __init__(self, path: Path, fd: int, num_bytes: int, peer: int) -> None:
        self.path = path
        self.fd = fd
        self.num_bytes = num_bytes
        self.peer = peer
        mapped = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.buffer = memoryview(mmap.mmap(mapped, num_bytes))
        finally:
            os.close(mapped)
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def create(cls, num_bytes: int, peer: int = 0, huge_pages: bool = True) -> SharedMemory:
        """Allocate memory under no name, which `link` gives it; `peer` is this process's index.

        Raises:
            StoreFullError, StoreError: Too little space in /dev/shm or allowed memory; no usable
                /dev/shm.
        """
        try:
            fd = hold(os.open(SHM, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except OSError as error:
            _refuse_no_descriptor(SHM, error)
            raise StoreError(
                str(SHM),
                "must be a writable tmpfs",
                error.strerror,
                "mount a tmpfs there that this user can write to",
            ) from error
        try:
            free = os.fstatvfs(fd)
            # Trying would take memory that others need.
            if num_bytes > free.f_bavail * free.f_frsize:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            check_available(num_bytes)
            os.ftruncate(fd, num_bytes)
            memory = cls(SHM, fd, num_bytes, peer)
            memory._allocate(huge_pages)
        except OSError as error:
            release(fd)
            _refuse_no_descriptor(SHM, error)
            if error.errno in _NO_MEMORY:
                space = os.statvfs(SHM)
                rule = f"must have {show_bytes(num_bytes)} free"
                given = f"{show_bytes(space.f_bavail * space.f_frsize)} ({error.strerror})"
                remedy = (
                    f"lower the table's capacity, use load: mmap, run `gear clean`, or "
                    f"{ENLARGE_SHM}"
                )
                raise StoreFullError(str(SHM), rule, given, remedy) from error
            raise StoreError(
                str(SHM), f"must provide {show_bytes(num_bytes)}", error.strerror, ENLARGE_SHM
            ) from error
        except BaseException:
            release(fd)
            raise
        try_lock(fd, fcntl.F_WRLCK, peer, 1)
        return memory

    def _allocate(self, huge_pages: bool) -> None:
        """Allocate every page now, so that a full /dev/shm is an error and not a SIGBUS later."""
        if huge_pages:
            # On a kernel without them the store works with small pages.
            with contextlib.suppress(OSError):
                self.advise(mmap.MADV_HUGEPAGE)
        try:
            self.advise(MADV_POPULATE_WRITE)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):
                raise
        os.posix_fallocate(self.fd, 0, self.num_bytes)

    def advise(self, option: int, first: int = 0, num_bytes: int | None = None) -> None:
        """Call madvise for bytes of the map; None: up to its end. OSError: the kernel refuses."""
        whole: Any = self.buffer.obj
        whole.madvise(option, first, self.num_bytes - first if num_bytes is None else num_bytes)

    def link(self, name: str, reaped: bool = False, kept: bool = False) -> None:
        """Name the initialised memory in /dev/shm. FileExistsError: the name is taken.

        A reaper (`reaped`) removes the name however the last process ends (20 ms, a process of 9
        MB); if none can be started, a warning is logged. Without one, a name whose processes are
        all killed stays until `remove_garbage`; a `kept` one stays however they end.
        """
        path = file_path(name)
        reaper = None
        os.pwrite(self.fd, bytes([kept]), KEPT_OFFSET)
        try:
            if reaped:
                try:
                    reaper = Start(str(path), self.fd)
                except OSError as error:
                    _refuse_no_descriptor(path, error)
                    LOG.warning(
                        "%s: no reaper can be started (%s). If all processes of the run are "
                        "killed, this memory stays until the next run of its user begins here; %s "
                        "removes it",
                        path,
                        error,
                        clean_command(re.split(r"-(?:board\.)?[0-9a-f]{32}", name)[0], kept=False),
                    )
            # With a descriptor, ignored for absolute paths, Python calls linkat, which follows the
            # link.
            os.link(f"/proc/self/fd/{self.fd}", path, src_dir_fd=self.fd, follow_symlinks=True)
            self.path = path
            if reaper is not None:
                reaper.linked()
        except OSError as error:
            _refuse_no_descriptor(path, error)
            raise
        finally:
            if reaper is not None:
                reaper.close()

    @classmethod
    def attach(cls, name: str, peer: int) -> SharedMemory:
        """Map the memory of a name.

        Raises:
            StoreGoneError: It does not exist, or its run has ended.
            PeerTakenError: Another process has this index.
            StoreError, ConfigError: Not this user's or not private; the name could lead out of
                /dev/shm.
        """
        path = file_path(name)
        fd = hold(_open(path))
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(
                    str(path), "must be a regular file", remedy=f"remove it: rm {path}"
                )
            if status.st_uid != os.geteuid():
                raise StoreError(
                    str(path),
                    f"must belong to user {os.geteuid()}",
                    status.st_uid,
                    "choose another gear.shared_memory.prefix",
                )
            if stat.S_IMODE(status.st_mode) != 0o600:
                raise StoreError(
                    str(path),
                    "must have mode 0600",
                    oct(stat.S_IMODE(status.st_mode)),
                    f"chmod 600 {path}, or remove it",
                )
            is_locked = try_lock(fd, fcntl.F_WRLCK, peer, 1)
            if not is_locked and not is_held(fd, _NO_PEER, 1):
                raise PeerTakenError(f"{path}: peer {peer}", "must be attached by one process only")
            if not is_locked or os.fstat(fd).st_nlink == 0:
                raise StoreGoneError(
                    str(path), "must belong to a living run", None, "its run has ended"
                )
            if status.st_size == 0:
                raise StoreError(
                    str(path), "must be a gear store", "an empty file", f"remove it: rm {path}"
                )
            return cls(path, fd, status.st_size, peer)
        except BaseException:
            release(fd)
            raise

    @classmethod
    def attach_one_of(cls, name: str, peers: Sequence[int]) -> SharedMemory:
        """Map a name's memory under the first free index; StoreError: none is, or as `attach`."""
        for peer in peers:
            with contextlib.suppress(PeerTakenError):
                return cls.attach(name, peer)
        raise StoreError(
            str(SHM / name), "must have a free place", len(peers), "raise the table's writers"
        )

    def unlink(self) -> None:
        """Remove the name: no process can attach; the memory ends with its last process."""
        os.unlink(self.path)
        self.path = SHM

    def is_alive(self, peer: int) -> bool:
        """Return whether the process with this index is attached."""
        return not self._closed if peer == self.peer else is_held(self.fd, peer, 1)

    @property
    def huge_bytes(self) -> int:
        """Bytes of this mapping that lie on huge pages, as the kernel counts them."""
        inode = os.fstat(self.fd).st_ino
        total = 0
        is_ours = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"^[0-9a-f]+-[0-9a-f]+ ", line):
                is_ours = line.split()[4] == str(inode)
            elif is_ours and line.startswith("ShmemPmdMapped:"):
                total += int(line.split()[1]) * 1024
        return total

    def close(self) -> None:
        """Detach; the last to detach removes the file. Views stay valid, and keep the map."""
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():  # in a forked child the descriptor is one of /dev/null
            # While the byte is held, no reaper removes the name: it is gone when the last `close`
            # returns.
            if not _unlink_if_garbage(self.fd, self.path):
                _record_lock(self.fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, self.peer, 1)
                # Two that detach at once block each other.
                if not _unlink_if_garbage(self.fd, self.path):
                    _await_removal(self.fd)
            # A child that C code has forked may have a copy of the descriptor, which would keep the
            # lock.
            _record_lock(self.fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, WHOLE)
        release(self.fd)
        self.buffer = memoryview(b"")


def _open(path: Path) -> int:
    """Open a file that must be a store; raises as `opened_file`."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        _refuse_no_descriptor(path, error)
        kind = StoreGoneError if error.errno == errno.ENOENT else StoreError
        raise kind(str(path), "must be an existing store", error.strerror) from error


@contextlib.contextmanager
def opened_file(path: Path) -> Iterator[int]:
    """Open a store's file to read its header without attaching; StoreGoneError: there is none."""
    fd = _open(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _refuse_no_descriptor(path: Path, error: OSError) -> None:
    """Raise StoreError if an error says that too many files are open, here or on the machine."""
    if error.errno in _NO_DESCRIPTOR:
        rule = "must be opened"
        remedy = "raise the limit of open files (ulimit -n), or close some"
        raise StoreError(str(path), rule, error.strerror, remedy) from error


def _unlink_if_garbage(fd: int, path: Path, kept: bool = False) -> bool:
    """Remove a store to which no process is attached. Of racing callers exactly one succeeds."""
    if path == SHM or os.pread(fd, len(MAGIC), 0) != MAGIC or (is_kept(fd) and not kept):
        return False
    if not try_lock(fd, fcntl.F_WRLCK, 0, WHOLE):
        return False
    return unlink_same(str(path), fd)


def _await_removal(fd: int) -> None:
    """Wait until a process that is removing the file has done so."""
    wait_until(lambda: not is_held(fd, _NO_PEER, 1), _REMOVAL_S, 1e-3)


def is_held(fd: int, first: int, count: int) -> bool:
    """Return whether another process locks bytes of an open file; a count of 0: up to its end."""
    return _record_lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, first, count) != fcntl.F_UNLCK


def is_kept(fd: int) -> bool:
    """Return whether a store stays where no process is attached."""
    return os.pread(fd, 1, KEPT_OFFSET) == b"\1"


def opened(prefix: str | None) -> Iterator[tuple[Path, int]]:
    """Iterate over this user's store files of a prefix, living or not, each open in its turn.

    A `prefix` of None is any. ConfigError: it could lead out of /dev/shm; StoreError: too many
    files are open.
    """
    pattern = "*" if prefix is None else f"{glob.escape(file_path(prefix).name)}-*"
    try:
        paths = sorted(SHM.glob(pattern))
    except OSError as error:
        _refuse_no_descriptor(SHM, error)
        raise
    for path in paths:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:  # removed, no file, or another user's
            _refuse_no_descriptor(path, error)
            continue
        try:
            status = os.fstat(fd)
            is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if is_own and os.pread(fd, len(MAGIC), 0) == MAGIC:
                yield path, fd
        finally:
            os.close(fd)


def stores(prefix: str) -> list[Path]:
    """Return this user's store files of a prefix, living or not; raises as `opened`."""
    return [path for path, _ in opened(prefix)]


def living(prefix: str) -> list[Path]:
    """Return this user's store files of a prefix that a process is attached to."""
    return [path for path, fd in opened(prefix) if is_held(fd, 0, WHOLE)]


def remove_garbage(prefix: str, kept: bool = False) -> list[Path]:
    """Remove the stores of ended runs, never one with an attached process; return their paths.

    Those that are kept go if `kept`.
    """
    removed = []
    for path, fd in opened(prefix):
        if _unlink_if_garbage(fd, path, kept):
            removed.append(path)
        else:
            _await_removal(fd)  # by its reaper, where the run has just ended
    return removed
