"""`gear clean`: remove from /dev/shm what no process of this user is attached to: stores of runs that have
ended, and the deepspeed_allreduce_buffer files that DeepSpeed's CPU communication leaves.

That (`csrc/cpu/comm/shm.cpp`) makes a buffer of 66 MiB for each rank, named
`deepspeed_allreduce_buffer_UID_ADDRESS_PORT_RANK`, and never removes it. A rank maps the buffers of all
ranks from `init_distributed` to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from deepspeed_gear.errors import show_bytes
from deepspeed_gear.store.shared_memory import SHM, is_held, is_kept, opened, remove_garbage, stores

_PROC = Path("/proc")

OPTIONS = {
    "--prefix PREFIX": (
        "first part of the names in /dev/shm (gear.shared_memory.prefix)",
        {"default": "gear"},
    ),
    "--kept": "also remove stores that jobs have left to the next one (gear.shared_memory.keep)",
}


def run(args: argparse.Namespace) -> int:
    """Remove stores and buffers that no process is attached to; never those of a running process."""
    removed = remove_garbage(args.prefix, args.kept)
    left = remove_unused_buffers()
    for path in [*removed, *left]:
        print(f"removed {path}")
    kept = [path for path, fd in opened(args.prefix) if is_kept(fd) and not is_held(fd, 0, 0)]
    for path in kept:
        print(f"kept {path}, {show_bytes(path.stat().st_size)}: --kept removes it")
    print(f"{len(removed)} removed, {len(stores(args.prefix)) - len(kept)} in use")
    if left or buffers():
        print(f"DeepSpeed's buffers: {len(left)} removed, {len(buffers())} in use")
    return 0


def buffers() -> list[Path]:
    """Return this user's buffers, in use or not."""
    found = []
    for path in sorted(SHM.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*")):
        with contextlib.suppress(OSError):  # removed meanwhile
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                found.append(path)
    return found


def remove_unused_buffers() -> list[Path]:
    """Remove and return this user's buffers that no visible process of this user maps or holds open.

    Where containers share /dev/shm but not their process ids, ranks of another container are not visible.
    Removal leaves their mapped memory intact; it fails them only while they open each other's buffers.
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
