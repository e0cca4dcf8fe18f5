"""A control group for each system, whose memory is limited: version 1 or 2 of the kernel's
controller.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class MemoryGroups:
    """A group with a limit of its own for each name, below this process's own group where that is
    possible.

    What a member allocates counts, and so does each page of a file that it is the first to read.
    Memory that it had before it joined does not.

    Raises:
        OSError: No group can be made: there is no controller, or this user may not.
    """

    def __init__(self, names: Iterable[str], limit_bytes: int) -> None:
        controllers = [
            line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
        ]
        paths = {
            kind: path.strip("/") for _, kinds, path in controllers for kind in kinds.split(",")
        }
        self._is_v1 = "memory" in paths
        if self._is_v1:
            self.folder = ROOT / "memory" / paths["memory"] / f"peers-{os.getpid()}"
            self.folder.mkdir()
        else:
            self.folder = _below(ROOT / paths.get("", ""))
        self._groups = {name: self.folder / name for name in names}
        for group in self._groups.values():
            group.mkdir()
            if self._is_v1:
                (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
                (group / "memory.swappiness").write_text("0")
            else:
                (group / "memory.max").write_text(str(limit_bytes))
                with contextlib.suppress(FileNotFoundError):  # a kernel without swap
                    (group / "memory.swap.max").write_text("0")

    def has_killed(self, name: str) -> bool:
        """Return whether a member was killed because the group had no more memory."""
        text = (
            self._groups[name] / ("memory.oom_control" if self._is_v1 else "memory.events")
        ).read_text()
        return int(dict(line.split() for line in text.splitlines())["oom_kill"]) > 0

    def close(self) -> None:
        """Remove the groups, whose members have ended or are ended now."""
        for group in (*self._groups.values(), self.folder):
            for _ in range(50):
                try:
                    group.rmdir()
                    break
                except OSError:  # a process that ends is a member until it is gone
                    time.sleep(0.1)


def _below(own: Path) -> Path:
    """Make a group whose children have the memory controller: version 2 refuses it beside
    processes.
    """
    for parent in (own, *own.parents):
        if not parent.is_relative_to(ROOT):
            break
        folder = parent / f"peers-{os.getpid()}"
        try:
            (parent / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
            (folder / "cgroup.subtree_control").write_text("+memory")
            return folder
        except OSError as error:
            refused = error
            if folder.is_dir():
                folder.rmdir()
    raise refused
