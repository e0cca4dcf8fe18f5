"""Locks of the folders that a run saves into, so that no other run saves into them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import weakref
from functools import partial
from pathlib import Path

from deepspeed_gear.errors import CheckpointError, undo_on_error
from deepspeed_gear.liveness import hold, release
from deepspeed_gear.log import LOG
from deepspeed_gear.store.shared_memory import try_lock

FILE = ".saves.lock"
_MOST_HELD = 64  # folders: an engine saves into one for each tag, and each lock is a descriptor
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLocks:
    """Locks of the folders that this run saves into, so that no other run does.

    Rank 0 holds the locks of the latest 64 folders, until `release`. Main thread.
    """

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}
        self.release = weakref.finalize(self, _release_all, self._held)

    def acquire(self, folder: Path) -> None:
        """Take the lock of an existing folder.

        Raises:
            CheckpointError: Another run holds it.
        """
        fd = self._held.pop(folder, None)
        if fd is not None and not _is_file(fd, folder / FILE):
            release(fd)  # the folder was deleted and made again
            fd = None
        self._held[folder] = _locked(folder) if fd is None else fd  # at the end: the latest one
        if len(self._held) > _MOST_HELD:
            release(self._held.pop(next(iter(self._held))))


def _locked(folder: Path) -> int:
    """Return the descriptor of a folder's locked file."""
    path = folder / FILE
    while True:
        fd = hold(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        with undo_on_error(partial(release, fd)):
            try:
                is_own = try_lock(fd, fcntl.F_WRLCK, 0, 1)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                LOG.warning(
                    "%s: its file system has no locks (%s): let one run save into it", folder, error
                )
                return fd
            if not is_own:
                owner = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
                remedy = (
                    "give each run a folder of its own, or end that one; any number may "
                    "load from it"
                )
                raise CheckpointError(
                    str(folder), "must be saved into by one run at a time", owner, remedy
                )
            if _is_file(fd, path):
                owner = json.dumps({"process": os.getpid(), "host": socket.gethostname()})
                os.ftruncate(fd, 0)
                os.pwrite(fd, owner.encode(), 0)
                return fd
        release(fd)  # the file was removed meanwhile, with its folder: lock the new one


def _is_file(fd: int, path: Path) -> bool:
    """Return whether a path names an open file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _release_all(held: dict[Path, int]) -> None:
    while held:
        release(held.popitem()[1])
