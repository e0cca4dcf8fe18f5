"""Descriptors that mark this process as alive; a forked child closes its copies.

The kernel releases the lock of an open file, and ends a pipe, when the last descriptor is closed.
Children forked without exec (os.fork, multiprocessing) hold copies of all descriptors, so a parent
that was killed would count as alive until they end. Children that C code forks run no hook of
Python, and still have this effect.
"""

from __future__ import annotations

import contextlib
import os

_descriptors: set[int] = set()


def hold(fd: int) -> int:
    """Register a descriptor before it is locked or handed to another process; return it."""
    _descriptors.add(fd)
    return fd


def release(fd: int) -> None:
    """Close a registered descriptor."""
    forget(fd)
    os.close(fd)


def forget(fd: int) -> None:
    """Unregister a descriptor that its owner is about to close."""
    _descriptors.discard(fd)


def _close_in_child() -> None:
    """Replace the child's copies by descriptors of /dev/null.

    Closing them would free their numbers: the objects that hold a number would then close whichever
    file had got it since.
    """
    if not _descriptors:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.dup2(null, fd, inheritable=False)
    os.close(null)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
