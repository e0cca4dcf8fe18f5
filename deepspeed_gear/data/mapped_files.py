"""Mapped files of a data set: their identity, and the SIGBUS handler that prints the file's name."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import numpy as np

from deepspeed_gear.errors import DataError

CHECK_EVERY_S = 1.0
_ATTRIBUTES = {"device": "st_dev", "inode": "st_ino", "size": "st_size"}
_ATTRIBUTES["modification time (ns)"] = "st_mtime_ns"
_REMEDY = (
    "leave a data set unchanged while a run uses it; end the run, and copy the data set again or make it "
    "with gear ingest"
)


class MappedFiles:
    """Identities of a folder's files as they were before they were mapped, and their maps.

    A change of a file shows in its map or not, and a truncated file ends the process with SIGBUS, so a file
    whose device, inode, size or modification time has changed is a DataError that names it and what has
    changed. Where the folder as a whole is another one, as after `gear ingest --append`, the mapped files are
    checked through descriptors: they exist as long as they are mapped. Any thread may check.
    """

    def __init__(self, folder: Path) -> None:
        self._identities: dict[Path, os.stat_result] = {}
        self._maps: dict[Path, np.memmap] = {}
        self._checked_at = time.monotonic()
        self._folder, opened = folder, os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        # Descriptors of the folder and its files: none of their inodes is used again.
        self._opened: dict[Path, int] = {folder: opened}
        weakref.finalize(self, _close, self._opened)

    def record(self, path: Path) -> None:
        """Record a file's identity before it is checked and mapped."""
        if not path.is_file():
            raise DataError(str(path), "must exist", None, "a file of the data set is missing")
        self._opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._identities[path] = os.fstat(self._opened[path])

    @property
    def is_replaced(self) -> bool:
        """Whether the folder as a whole is another one than that of the mapped files."""
        return self._folder.exists() and not os.path.samestat(
            os.stat(self._folder), os.fstat(self._opened[self._folder])
        )

    def add(self, path: Path, array: np.memmap) -> None:
        """Add the map of a recorded file, unless the file has changed since."""
        _compare(path, self._identities[path], path)
        self._maps[path] = array

    def advise(self, option: int) -> None:
        """Tell the kernel how the maps are read: one of `mmap.MADV_*`."""
        for array in self._maps.values():
            array._mmap.madvise(option)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Compare all files with their recorded identities. Cost: one `stat` a file."""
        try:
            for path, known in self._identities.items():
                _compare(path, known, path)
        except DataError:
            if not self.is_replaced:
                raise
            for path, known in self._identities.items():
                _compare(path, known, self._opened[path])

    def check_at_times(self) -> None:
        """Call `check`, unless it was called within the last `CHECK_EVERY_S` seconds: that takes 0.1 us."""
        now = time.monotonic()
        if now - self._checked_at >= CHECK_EVERY_S:
            self._checked_at = now
            self.check()

    def guard(self, native: ModuleType) -> None:
        """Install the SIGBUS handler that prints the file's name if an access to one of the maps fails.

        The handler writes one line to standard error and passes the signal on to the one that was installed
        before (faulthandler's, or the default action). A map that is closed is removed automatically.
        """
        for path, array in self._maps.items():
            memory = array._mmap  # type: ignore[attr-defined]
            address = np.frombuffer(memory, np.uint8, 1).ctypes.data
            entry = native.map_guard_add(address, len(memory), os.fsencode(path.absolute()))
            weakref.finalize(memory, native.map_guard_remove, entry).atexit = False


def _close(opened: Mapping[Path, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)


def _compare(path: Path, known: os.stat_result, file: Path | int) -> None:
    with DataError.on(str(path), "must exist while it is used", OSError, remedy=_REMEDY):
        status = os.stat(file)
    pairs = {what: (getattr(known, name), getattr(status, name)) for what, name in _ATTRIBUTES.items()}
    changed = [f"{what} {before} -> {now}" for what, (before, now) in pairs.items() if now != before]
    if changed:
        raise DataError(str(path), "must not change while it is mapped", ", ".join(changed), _REMEDY)
