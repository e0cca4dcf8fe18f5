"""`gear clean`: remove unused shared memory of this user from /dev/shm.

Removes the stores of ended runs, and the deepspeed_allreduce_buffer files that DeepSpeed's CPU
communication leaves. Files that a process is attached to stay.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
from functools import partial
from pathlib import Path

from deepspeed_gear.cli import ssh_hosts
from deepspeed_gear.errors import show_bytes
from deepspeed_gear.file_system import is_open
from deepspeed_gear.store.shared_memory import SHM, is_held, is_kept, opened, remove_garbage, stores

OPTIONS = {
    "--prefix PREFIX": (
        "first part of the names in /dev/shm (gear.shared_memory.prefix)",
        {"default": "gear"},
    ),
    "--kept": "also remove stores that jobs have left to the next one (gear.shared_memory.keep)",
    "--hostfile F": "on each host of this file, over ssh (default: on this machine)",
}
_TIMEOUT_S = 120.0  # for each host to answer
# DeepSpeed (csrc/cpu/comm/shm.cpp) creates a buffer of 66 MiB for each rank, and never removes it.
# A rank maps the buffers of all ranks from `init_distributed` to its end.
_BUFFERS = "deepspeed_allreduce_buffer_{user}_*"  # ..._USER_ADDRESS_PORT_RANK


def run(args: argparse.Namespace) -> int:
    """Remove stores and buffers that no process is attached to."""
    if args.hostfile is not None:
        return _run_on_hosts(args)
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


def _run_on_hosts(args: argparse.Namespace) -> int:
    """Run this command on each host; print the outputs, and the hosts where it failed."""
    hosts = ssh_hosts.read_hostfile(args.hostfile)
    command = [*ssh_hosts.GEAR, "clean", "--prefix", args.prefix, *["--kept"] * args.kept]
    outputs, problems = ssh_hosts.on_each(
        hosts, partial(ssh_hosts.run_on, arguments=command, timeout_s=_TIMEOUT_S)
    )
    for host, output in outputs.items():
        for line in output.splitlines():
            print(f"{host}: {line}")
    for problem in problems:
        print(f"gear: error: {problem}", file=sys.stderr)
    return 2 if problems else 0


def buffers() -> list[Path]:
    """Return this user's buffers, whether they are in use or not."""
    paths = []
    for path in sorted(SHM.glob(_BUFFERS.format(user=os.getuid()))):
        with contextlib.suppress(OSError):  # removed meanwhile
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                paths.append(path)
    return paths


def remove_unused_buffers() -> list[Path]:
    """Remove and return this user's buffers that no process maps or holds open.

    Removal leaves mapped memory intact; it fails ranks only while they open each other's buffers.
    """
    removed = []
    for path in buffers():
        with contextlib.suppress(OSError):  # removed meanwhile
            if not is_open(path):
                path.unlink()
                removed.append(path)
    return removed
