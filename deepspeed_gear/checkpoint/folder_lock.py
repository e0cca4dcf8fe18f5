"""The lock of a checkpoint's folder: one run at a time saves into it.

A lock of the open file, not of the process: the kernel releases it when the process ends, however it ends; on
NFS the server does, once it has noticed. A file system without locks is named in the log and not guarded.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import weakref
from pathlib import Path

from deepspeed_gear.errors import CheckpointError
from deepspeed_gear.liveness import hold, release
from deepspeed_gear.store.shared_memory import try_lock

LOG = logging.getLogger("deepspeed_gear")
FILE = ".saves.lock"
_MOST_HELD = 64  # folders: an engine saves into one for each tag, and each lock is a descriptor
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLocks:
    """The locks of the folders that this run has saved into, from the first save until it is closed.

    Of more than 64 folders the latest saved ones are held. Rank 0 holds them for all ranks. Main thread.
    """

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}
        self._finalizer = weakref.finalize(self, _release_all, self._held)

    def acquire(self, folder: Path) -> None:
        """Hold the lock of a folder; it exists.

        Raises:
            CheckpointError: Another run holds it.
            OSError: From the file system.
        """
        known = self._held.pop(folder, None)
        if known is not None and not _is_file(known, folder / FILE):  # the folder was deleted, and made again
            release(known)
            known = None
        self._held[folder] = _locked(folder) if known is None else known
        if len(self._held) > _MOST_HELD:
            release(self._held.pop(next(iter(self._held))))

    def release(self) -> None:
        """Release all."""
        _release_all(self._held)


def _locked(folder: Path) -> int:
    """Return a descriptor that holds the lock of a folder."""
    path = folder / FILE
    while True:
        fd = hold(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        try:
            if not try_lock(fd, fcntl.F_WRLCK, 0, 1):
                raise CheckpointError(
                    str(folder),
                    "must be saved into by one run at a time",
                    _holder(fd),
                    "give each run a folder of its own, or end that one; any number may load from it",
                )
            if _is_file(fd, path):
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
                return fd
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                release(fd)
                raise
            LOG.warning("%s: its file system has no locks (%s): let one run save into it", folder, error)
            return fd
        except BaseException:
            release(fd)
            raise
        release(fd)  # it was removed meanwhile, with its folder


def _holder(fd: int) -> str:
    return os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"


def _is_file(fd: int, path: Path) -> bool:
    """Return whether a path is that of an open file."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


def _release_all(held: dict[Path, int]) -> None:
    while held:
        release(held.popitem()[1])
