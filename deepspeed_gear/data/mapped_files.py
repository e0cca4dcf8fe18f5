"""The mapped files of a data set: checked for changes, guarded against SIGBUS, read ahead."""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

from deepspeed_gear.errors import DataError

CHECK_EVERY_S = 1.0
# Attributes of a file that show that it has changed, by their names in errors.
_ATTRIBUTES = {
    "device": "st_dev",
    "inode": "st_ino",
    "size": "st_size",
    "modification time (ns)": "st_mtime_ns",
}
_REMEDY = (
    "leave a data set unchanged while a run uses it; end the run, and copy it again or ingest it"
)


class MappedFiles:
    """The mapped files of a folder, and the check that none has changed since it was mapped.

    A changed file may show in its map or not, and access beyond the end of a truncated file ends
    the process with SIGBUS. So a file whose device, inode, size or modification time differs is a
    DataError. Where the whole folder has been replaced, as by `gear ingest --append`, the mapped
    files still exist without a name, and are checked through descriptors. Any thread may check.
    """

    def __init__(self, folder: Path) -> None:
        self._identities: dict[Path, os.stat_result] = {}
        self._maps: dict[Path, np.memmap] = {}
        self._checked_at = time.monotonic()
        self._folder = folder
        self._is_read_ahead = False
        # Open descriptors keep the inodes of the folder and its files from being used again, so
        # equal inodes mean the same file.
        self._opened: dict[Path, int] = {folder: os.open(folder, os.O_RDONLY | os.O_CLOEXEC)}
        weakref.finalize(self, lambda opened: [*map(os.close, opened.values())], self._opened)

    def record(self, path: Path) -> None:
        """Record a file's identity; called before the file is checked and mapped."""
        if not path.is_file():
            raise DataError(str(path), "must exist", None, "a file of the data set is missing")
        self._opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._identities[path] = os.fstat(self._opened[path])

    @property
    def is_replaced(self) -> bool:
        """Whether another folder is at the path now."""
        opened = os.fstat(self._opened[self._folder])
        return self._folder.exists() and not os.path.samestat(os.stat(self._folder), opened)

    def add(self, path: Path, array: np.memmap) -> None:
        """Keep the map of a recorded file, unless the file has changed since it was recorded."""
        _compare(path, self._identities[path], path)
        self._maps[path] = array

    def advise(self, option: int) -> None:
        """Advise the kernel how the maps are read: one of `mmap.MADV_*`."""
        for array in self._maps.values():
            array._mmap.madvise(option)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raise DataError if a file has changed. Cost: one `stat` per file."""
        try:
            for path, known in self._identities.items():
                _compare(path, known, path)
        except DataError:
            if not self.is_replaced:
                raise
            for path, known in self._identities.items():
                _compare(path, known, self._opened[path])

    def check_at_times(self) -> None:
        """Call `check` at most once per `CHECK_EVERY_S` seconds.

        Cost: 0.1 us where the last check is recent enough.
        """
        now = time.monotonic()
        if now - self._checked_at >= CHECK_EVERY_S:
            self._checked_at = now
            self.check()

    def guard(self, native: ModuleType) -> None:
        """Install a SIGBUS handler that prints the file's name when an access to a map fails.

        The handler writes one line to standard error and then calls the handler that was installed
        before it (faulthandler's, or the default action). A map is removed from the guard when it
        is closed.
        """
        for path, array in self._maps.items():
            memory = array._mmap  # type: ignore[attr-defined]
            address = np.frombuffer(memory, np.uint8, 1).ctypes.data
            entry = native.map_guard_add(address, len(memory), os.fsencode(path.absolute()))
            _remove_with(memory, native.map_guard_remove, entry)

    def read_ahead(self, native: ModuleType, most_bytes: int) -> None:
        """Mark the maps: gathers request the rows of a batch from the disk before they copy them.

        Args:
            native: The native ops.
            most_bytes: Bytes that one gather may request before it copies them.
        """
        if self._is_read_ahead:
            return
        self._is_read_ahead = True
        for array in self._maps.values():
            memory = array._mmap  # type: ignore[attr-defined]
            address = np.frombuffer(memory, np.uint8, 1).ctypes.data
            entry = native.read_ahead_add(address, len(memory), most_bytes)
            _remove_with(memory, native.read_ahead_remove, entry)


def _remove_with(memory: mmap.mmap, remove: Callable[[int], None], entry: int) -> None:
    """Remove the native entry of a map when the map is closed."""
    # Not at exit: maps may still be read then, and the process ends anyway.
    weakref.finalize(memory, remove, entry).atexit = False


def _compare(path: Path, known: os.stat_result, file: Path | int) -> None:
    with DataError.on(str(path), "must exist while it is used", OSError, remedy=_REMEDY):
        status = os.stat(file)
    changed = [
        f"{what} {getattr(known, name)} -> {getattr(status, name)}"
        for what, name in _ATTRIBUTES.items()
        if getattr(known, name) != getattr(status, name)
    ]
    if changed:
        raise DataError(
            str(path), "must not change while it is mapped", ", ".join(changed), _REMEDY
        )
