"""Descriptors whose open file marks this process as alive; a forked child closes its copies.

The kernel releases a lock of an open file, and ends a pipe, with its last descriptor. Children
forked without exec (os.fork, multiprocessing) have copies of all: a killed parent would count as
alive until they end, as with those that C code forks, which run no hook of Python.
"""

from __future__ import annotations

import contextlib
import os

_descriptors: set[int] = set()


def hold(fd: int) -> int:
    """Register a descriptor before it is locked or given to another process; return it."""
    _descriptors.add(fd)
    return fd


def release(fd: int) -> None:
    """Close a registered descriptor."""
    forget(fd)
    os.close(fd)


def forget(fd: int) -> None:
    """Leave a registered descriptor to its owner, who closes it next."""
    _descriptors.discard(fd)


def _close_in_child() -> None:
    """Make the copies descriptors of /dev/null, so that none of their numbers is taken by another
    file.
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
