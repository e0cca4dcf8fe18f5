"""Buffers of DeepSpeed's CPU communication that remain in /dev/shm after their processes.

DeepSpeed (`csrc/cpu/comm/shm.cpp`) makes one of 66 MiB for each rank, named
`deepspeed_allreduce_buffer_UID_ADDRESS_PORT_RANK`, and never removes it. A rank maps the buffers of all ranks
from `init_distributed` to its end.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from deepspeed_gear.store.shared_memory import SHM

_PROC = Path("/proc")


def buffers() -> list[Path]:
    """Return this user's buffers, in use or not."""
    return [path for path in sorted(SHM.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*")) if _is_own(path)]


def remove_unused_buffers() -> list[Path]:
    """Remove this user's buffers that no visible process of this user maps or holds open.

    Where containers share /dev/shm but not their process ids, ranks of another container are not visible.
    Removal leaves their mapped memory intact; it fails them only while they open each other's buffers.

    Returns:
        The files that were removed.
    """
    found = buffers()
    used = set(_files_in_use()) if found else set()
    removed = []
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino not in used:
                path.unlink()
                removed.append(path)
    return removed


def _is_own(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:  # removed meanwhile
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()


def _files_in_use() -> Iterator[int]:
    """Yield the inodes in shared memory that processes map or hold; those of other users cannot be read."""
    device = os.stat(SHM).st_dev
    for process in _PROC.iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                words = line.split(maxsplit=5)
                if len(words) == 6 and words[5].startswith(f"{SHM}/"):
                    yield int(words[4])
        with contextlib.suppress(OSError):
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    if status.st_dev == device:
                        yield status.st_ino
