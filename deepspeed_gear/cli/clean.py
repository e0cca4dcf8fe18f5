"""`gear clean`: remove from /dev/shm what no process of this user is attached to: stores of runs
that have ended, and the deepspeed_allreduce_buffer files that DeepSpeed's CPU communication leaves.

That (`csrc/cpu/comm/shm.cpp`) makes a buffer of 66 MiB for each rank, named
`deepspeed_allreduce_buffer_UID_ADDRESS_PORT_RANK`, and never removes it. A rank maps the buffers of
all ranks from `init_distributed` to its end.
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
_TIMEOUT_S = 120.0  # of a host


def run(args: argparse.Namespace) -> int:
    """Remove stores and buffers that no process is attached to; never those of a
    running process.
    """
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
    """Run this command on each host; show the output of each, and the hosts where it has failed."""
    hosts = ssh_hosts.read_hostfile(args.hostfile)
    command = [
        "-m",
        "deepspeed_gear.cli.main",
        "clean",
        "--prefix",
        args.prefix,
        *["--kept"] * args.kept,
    ]
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
    """Return this user's buffers, in use or not."""
    found = []
    for path in sorted(SHM.glob(f"deepspeed_allreduce_buffer_{os.getuid()}_*")):
        with contextlib.suppress(OSError):  # removed meanwhile
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                found.append(path)
    return found


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
