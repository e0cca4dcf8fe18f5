"""`gear clean`: remove stores of runs that have ended, and buffers that DeepSpeed's ranks did not remove."""

from __future__ import annotations

import argparse

from deepspeed_gear.cli.shm_comm import buffers, remove_unused_buffers
from deepspeed_gear.store.shared_memory import remove_garbage, stores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.description = (
        "Remove from /dev/shm what no process of this user is attached to: stores of runs that have ended, "
        "and the deepspeed_allreduce_buffer files that DeepSpeed's CPU communication leaves."
    )
    parser.add_argument(
        "--prefix", default="gear", help="first part of the names in /dev/shm (gear.shared_memory.prefix)"
    )


def run(args: argparse.Namespace) -> int:
    """Remove stores and buffers that no process is attached to; never those of a running process."""
    removed = remove_garbage(args.prefix)
    left = remove_unused_buffers()
    for path in [*removed, *left]:
        print(f"removed {path}")
    print(f"{len(removed)} removed, {len(stores(args.prefix))} in use")
    if left or buffers():
        print(f"DeepSpeed's buffers: {len(left)} removed, {len(buffers())} in use")
    return 0
