"""Read-only access to the stores of running processes.

A store has no name once its ranks are attached, but /proc/PID/fd leads its user to the memory as long as a
process holds it. It is mapped read-only and no lock is taken, so a reader can neither change nor block a run;
it may read in the middle of a selection.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepspeed_gear.errors import StoreError
from deepspeed_gear.store.memory_layout import MAGIC, Layout, RunIdentity, read_header
from deepspeed_gear.store.reaper import NAME
from deepspeed_gear.store.shared_memory import SHM

_PROC = Path("/proc")


@dataclass(frozen=True)
class LiveStore:
    """The store of a table of a run.

    Args:
        table: Name of the table.
        processes: Ids of the processes attached to it.
        run: The run that it belongs to.
        layout: Where everything lies.
        views: Its regions, read-only; their contents change as the run goes on.
    """

    table: str
    processes: tuple[int, ...]
    run: RunIdentity
    layout: Layout
    views: dict[str, np.ndarray]


def living_stores(process: int | None = None) -> list[LiveStore]:
    """Return the stores of this user's other processes, or of one process.

    Raises:
        StoreError: The process does not exist, is another user's, or a store of it cannot be read.
    """
    if process is None:
        found = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
        processes = sorted(pid for pid in found if pid != os.getpid())
    else:
        processes = [process]
    holders: dict[tuple[int, int], list[int]] = {}
    paths: dict[tuple[int, int], list[Path]] = {}
    for pid in processes:
        try:
            if process is None and _is_reaper(pid):
                continue
            for path, identity in _shared_files(pid):
                paths.setdefault(identity, []).append(path)
                if pid not in holders.setdefault(identity, []):
                    holders[identity].append(pid)
        except OSError as error:  # it has ended, or belongs to another user
            if process is not None:
                rule = f"must be a running process of user {os.geteuid()}"
                raise StoreError(f"process {pid}", rule, error.strerror) from error
    opened = ((_open_any(paths[key], key, strict=process is not None), tuple(holders[key])) for key in paths)
    return [
        LiveStore(str(found[1].meaning["table"]), processes, *found)
        for found, processes in opened
        if found is not None and "table" in found[1].meaning  # not places of simulators
    ]


def _is_reaper(pid: int) -> bool:
    """Return whether a process only waits to remove a store."""
    return (_PROC / str(pid) / "comm").read_text().rstrip("\n") == NAME


def _shared_files(pid: int) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Iterate over the descriptors of a process that are regular files of this user in shared memory."""
    for path in sorted((_PROC / str(pid) / "fd").iterdir()):
        try:
            if not os.readlink(path).startswith(f"{SHM}/"):
                continue
            status = path.stat()
        except FileNotFoundError:  # closed in the meantime
            continue
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            yield path, (status.st_dev, status.st_ino)


def _open_any(
    paths: list[Path], identity: tuple[int, int], strict: bool
) -> tuple[RunIdentity, Layout, dict[str, np.ndarray]] | None:
    """Map a file through the first of its descriptors that is still open; None if it is no store."""
    found = None
    for path in paths:
        found = _open(path, identity, strict)
        if found is not None:
            break
    return found


def _open(
    path: Path, identity: tuple[int, int], strict: bool
) -> tuple[RunIdentity, Layout, dict[str, np.ndarray]] | None:
    """Map a file read-only; None if it is no store, or the descriptor is another file's by now."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        size = status.st_size
        if (status.st_dev, status.st_ino) != identity:
            return None
        if os.pread(fd, len(MAGIC), 0) != MAGIC:  # another program's, or not initialised yet
            return None
        memory = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
    except OSError:  # no permission to map it
        return None
    finally:
        os.close(fd)
    try:
        layout, run = read_header(memory, size, str(path))
    except StoreError:
        if strict:
            raise
        return None  # of another version
    if "table" not in layout.meaning:  # a policy board
        return None
    return run, layout, layout.views(memory)
