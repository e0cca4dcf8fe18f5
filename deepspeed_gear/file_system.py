"""Names of files and folders that change atomically, and durably; and whether a file is open."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import signal
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def sync(path: Path) -> None:
    """Fsync a file, or the names in a folder."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def swap_names(one: Path, other: Path) -> bool:
    """Swap two names atomically; return False, and change nothing, where the system has no such
    call.
    """
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
    """Return whether a process of this machine, in any container, has a file of this user open or
    mapped: the kernel grants a write lease to its only descriptor. Who opens it before the lease
    ends causes SIGURG here: ignored.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
