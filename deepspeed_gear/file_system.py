"""Atomic and durable renames, and the test whether a file is open anywhere on the machine."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Start to write bytes of a file from the page cache to the disk, where the system can.

    They are not durable before `sync`.
    """
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_file_range is not None:
        place = (ctypes.c_int64(offset), ctypes.c_int64(size))
        sync_file_range(ctypes.c_int(fd), *place, ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def swap_names(one: Path, other: Path) -> bool:
    """Swap two names atomically; return False, with nothing changed, if the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    names = os.fsencode(one), os.fsencode(other)
    if renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def is_open(path: Path) -> bool:
    """Return whether any process of the machine, in any container, has a file open or mapped.

    The kernel grants a write lease only while no other descriptor or mapping of the file exists.
    The file must belong to this user. A process that opens the file before the lease is released
    here makes the kernel send SIGURG, whose default action is to ignore it.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        # Set first: without it the lease would be broken by SIGIO, which ends the process.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
