"""Read-only access to stores of running processes, for inspect and watch, and to kept stores.

A store has no name once its ranks are attached, but /proc/PID/fd leads its user to the memory as
long as a process holds it. It is mapped read-only and no lock is taken, so a reader can neither
change nor block a run; it may read in the middle of a selection.
"""

from __future__ import annotations

import mmap
import os
import stat
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepspeed_gear.errors import StoreError
from deepspeed_gear.store.memory_layout import MAGIC, Layout, RunIdentity, read_header
from deepspeed_gear.store.reaper import NAME as REAPER
from deepspeed_gear.store.shared_memory import SHM, is_held, is_kept, opened

_PROC = Path("/proc")


@dataclass(frozen=True)
class LiveStore:
    table: str  # its name
    processes: tuple[int, ...]  # ids of the processes attached to it; none: it is kept
    run: RunIdentity
    layout: Layout
    views: dict[str, np.ndarray]  # its regions, read-only; their contents change as the run goes on
    descriptor: int  # of its file, open for reading until this object is deleted

    def is_attached(self, peer: int) -> bool:
        """Return whether the process with an index is attached. Takes no lock: it only looks."""
        return is_held(self.descriptor, peer, 1)


def living_stores(process: int | None = None) -> list[LiveStore]:
    """Return the stores of this user's other processes and kept ones, or those of one process.

    Raises:
        StoreError: The process does not exist, is another user's, or a store of it cannot be read.
    """
    if process is None:
        pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
        processes = sorted(pid for pid in pids if pid != os.getpid())
    else:
        processes = [process]
    paths: dict[tuple[int, int], list[Path]] = {}  # /proc/PID/fd/N by the identity of the file
    for pid in processes:
        try:
            if process is None and (_PROC / str(pid) / "comm").read_text().rstrip("\n") == REAPER:
                continue
            for path in sorted((_PROC / str(pid) / "fd").iterdir()):
                with suppress(FileNotFoundError):  # closed in the meantime
                    if os.readlink(path).startswith(f"{SHM}/"):
                        status = path.stat()
                        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                            paths.setdefault((status.st_dev, status.st_ino), []).append(path)
        except OSError as error:  # it has ended, or belongs to another user
            if process is not None:
                rule = f"must be a running process of user {os.geteuid()}"
                raise StoreError(
                    f"process {pid}", rule, error.strerror, "name a process of a running job"
                ) from error
    for path, fd in opened(None) if process is None else ():
        if is_kept(fd):
            paths.setdefault((os.fstat(fd).st_dev, os.fstat(fd).st_ino), [path])
    stores = []
    for identity, candidates in paths.items():
        holders = tuple(
            dict.fromkeys(int(path.parts[2]) for path in candidates if path.parent != SHM)
        )
        for path in candidates:  # the first that is still open
            store = _open(path, identity, holders, strict=process is not None)
            if store is not None:
                stores.append(store)
                break
    return stores


def _open(
    path: Path, identity: tuple[int, int], holders: tuple[int, ...], strict: bool
) -> LiveStore | None:
    """Map a file read-only; None if it is no table, or the descriptor is another file's by now."""
    with suppress(OSError, *(() if strict else [StoreError])), open(path, "rb", 0) as file:
        status = os.fstat(file.fileno())
        is_same = (status.st_dev, status.st_ino) == identity
        # Without the magic it is another program's file, or not initialised yet.
        if is_same and file.read(len(MAGIC)) == MAGIC:
            layout, run = read_header(file.fileno(), str(path))  # StoreError: of another version
            name = layout.meaning.get("table")
            if name is not None:  # else a policy board, or places of simulators
                memory = mmap.mmap(file.fileno(), status.st_size, mmap.MAP_SHARED, mmap.PROT_READ)
                views = layout.views(memory)
                descriptor = os.dup(file.fileno())
                store = LiveStore(str(name), holders, run, layout, views, descriptor)
                weakref.finalize(store, os.close, descriptor)
                return store
    return None  # it was closed meanwhile, or this process may not map it
