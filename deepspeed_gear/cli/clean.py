"""`gear clean`: remove stores of runs that have ended."""

from __future__ import annotations

import argparse

from deepspeed_gear.store.memory import remove_garbage, stores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--prefix", default="gear", help="first part of the names in /dev/shm (gear.shared_memory.prefix)"
    )


def run(args: argparse.Namespace) -> int:
    """Remove what no process is attached to; never touch a living run."""
    removed = remove_garbage(args.prefix)
    for path in removed:
        print(f"removed {path}")
    print(f"{len(removed)} removed, {len(stores(args.prefix))} in use")
    return 0
