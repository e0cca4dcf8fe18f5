"""Memory limits of a process: its cgroups (v1, v2) and available memory, before an allocation.

Pages of /dev/shm are charged to the cgroup that first touches them, and beyond its limit the kernel
ends the process with SIGKILL: so a store's size is checked before it is allocated. Page cache
(active_file, inactive_file) counts as available, since the kernel reclaims it first; swap does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from deepspeed_gear.errors import StoreFullError, show_bytes

Read = Callable[[str], str | None]
_REMEDY = (
    "lower the table's capacity, use load: mmap for a data set, or raise the limit (docker run "
    "--memory, systemd MemoryMax, Slurm --mem, Kubernetes resources.limits.memory)"
)
#: Part of a remedy. Docker gives a container 64 MB, and Kubernetes a pod.
ENLARGE_SHM = (
    "enlarge /dev/shm (mount -o remount,size=50% /dev/shm; docker run --shm-size; Kubernetes: "
    "mount an emptyDir of medium Memory there)"
)
# Of each cgroup version: the files of the limit and the usage, and the page cache's entries in
# memory.stat.
_FILES = {
    # usage_in_bytes of version 1 includes the children's; so do the entries that begin with total_.
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
}


class MemoryLimit(NamedTuple):
    """A bound on what this process may still allocate."""

    name: str  # the file that sets it
    available: int  # bytes that are left
    description: str  # the numbers that it was computed from


def check_available(num_bytes: int) -> None:
    """Raise StoreFullError if a memory limit leaves less than so many bytes; allocate nothing.

    Cost: about 1 ms, three files of /proc and each cgroup. Others may take the memory meanwhile:
    this detects stores that never fit.
    """
    limit = tightest(read_file)
    if limit is not None and num_bytes > limit.available:
        rule = f"must leave {show_bytes(num_bytes)} for a store"
        known = f"{show_bytes(limit.available)} ({limit.description})"
        raise StoreFullError(limit.name, rule, known, _REMEDY)


def read_file(path: str) -> str | None:
    """Return a file's text; None where it is missing or cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


def tightest(read: Read) -> MemoryLimit | None:
    """Return the limit that leaves the least memory; None: `read` finds no file of one."""
    return min(_limits(read), key=lambda limit: limit.available, default=None)


def _limits(read: Read) -> Iterator[MemoryLimit]:
    found = _entries(read("/proc/meminfo")).get("MemAvailable:")
    if found is not None:
        yield MemoryLimit("/proc/meminfo: MemAvailable", found * 1024, "of the whole machine")
    for version, folder in cgroup_folders(read("/proc/self/cgroup"), read("/proc/self/mountinfo")):
        limit_file, usage_file, cache_entries = _FILES[version]
        path = f"{folder}/{limit_file}"
        limit = _number(read(path))
        used = _number(read(f"{folder}/{usage_file}"))
        if limit is None or used is None:
            continue
        entries = _entries(read(f"{folder}/memory.stat"))
        cache = sum(entries.get(key, 0) for key in cache_entries)
        numbers = f"limit {show_bytes(limit)}, used {show_bytes(used)}"
        numbers += f", of this {show_bytes(cache)} page cache"
        yield MemoryLimit(path, max(0, limit - max(0, used - cache)), numbers)


def cgroup_folders(cgroups: str | None, mounts: str | None) -> list[tuple[int, str]]:
    """Return version and folder of this process's memory cgroup and its parents, innermost first.

    From /proc/self/cgroup and mountinfo (None: missing). A cgroup outside the mounted tree, as in a
    container without its own cgroup namespace, is taken for the mounted root.
    """
    own = {}
    for line in (cgroups or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if path and (number, controllers) == ("0", ""):
            own[2] = path
        elif path and "memory" in controllers.split(","):
            own[1] = path
    folders: list[tuple[int, str]] = []
    for version, root, point in _cgroup_mounts(mounts or ""):
        if version not in own:
            continue
        top = PurePosixPath(point)
        inner = PurePosixPath(own[version])
        below = inner.relative_to(root) if inner.is_relative_to(root) else PurePosixPath()
        folder = top / below if ".." not in below.parts else top
        chain = [folder, *folder.parents]
        folders += [(version, str(entry)) for entry in chain[: chain.index(top) + 1]]
    return folders


def _cgroup_mounts(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield version, root and mount point of the hierarchies with memory limits.

    Source: proc_pid_mountinfo(5), where "-" precedes type, source and super options.
    """
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        before = head.split()
        after = tail.split()
        if len(before) < 5 or not after:
            continue
        # Blanks and backslashes are written as octal numbers.
        root, point = (
            re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)
            for field in before[3:5]
        )
        if after[0] == "cgroup2":
            yield 2, root, point
        elif after[0] == "cgroup" and "memory" in after[-1].split(","):
            yield 1, root, point


def _number(text: str | None) -> int | None:
    """Read a file of one number; None for "max" and for a missing file."""
    text = (text or "").strip()
    return int(text) if text.isdigit() else None


def _entries(text: str | None) -> dict[str, int]:
    """Read lines of a key and a number, as in memory.stat and /proc/meminfo."""
    fields = (line.split() for line in (text or "").splitlines())
    return {f[0]: int(f[1]) for f in fields if len(f) >= 2 and f[1].isdigit()}
