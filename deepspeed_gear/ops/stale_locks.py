"""Locks that killed builds of torch extensions leave.

torch creates the file `lock` in the folder of an extension before it compiles and removes it afterwards
(`torch.utils.file_baton`). The file outlives a process that is killed while it compiles, such as a launch
that compiles DeepSpeed's own communication op, and from then on every process that loads the extension waits
for ever, without a message. The holder keeps the file open as long as it compiles, so a lock that no process
has open is stale, if all processes that may hold it are visible. If they are not, the lock is only reported.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError
from .jit import build_folder, build_lock

LOG = logging.getLogger("deepspeed_gear")
_LOCK = "lock"  # torch's name for it
_GUARD = "gear_stale_locks.lock"  # held by the process that removes
_GUARD_TIMEOUT_S = 60.0
_SECOND_LOOK_S = 0.5  # between closing its lock and removing it, a holder needs some microseconds
_LEAST_AGE_S = 2.0  # of a lock that is removed
_LONG_BUILD_S = 180.0  # older locks whose holders are not visible are worth a warning
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}


@dataclass(frozen=True)
class StaleLock:
    """A lock that no visible process holds."""

    path: Path
    age_s: float  # since it was made
    unseen: str  # why a process that is not visible may hold it; empty if none can
    identity: tuple[int, int, int]  # device, inode and time of its last change, in ns

    @property
    def is_dead(self) -> bool:
        return not self.unseen and self.age_s > _LEAST_AGE_S


def find() -> list[StaleLock]:
    """Find locks in torch's folder of extensions that no visible process holds.

    Cost: lists one folder; with a lock in it also the open files of all processes.
    """
    try:
        root = build_folder("any").parent
    except BuildError:  # torch cannot build there either
        return []
    found = {}
    for path in sorted(root.glob(f"*/{_LOCK}")):
        with contextlib.suppress(OSError):  # it has just gone
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found[path] = status
    held, hidden = _open_locks() if found else (set(), "")
    return [
        StaleLock(
            path,
            time.time() - status.st_mtime,
            _why_unseen(path, status.st_uid) or hidden,
            (status.st_dev, status.st_ino, status.st_ctime_ns),
        )
        for path, status in found.items()
        if (status.st_dev, status.st_ino) not in held
    ]


def remove() -> list[Path]:
    """Remove and return the locks whose holders are dead; log these, and old ones of holders not visible.

    Safe while other processes do the same or build: one process of a machine removes at a time, and only
    locks that it found stale twice. Costs half a second if there is a stale lock.
    """
    first, removed = find(), []
    for lock in first:
        if lock.unseen and lock.age_s > _LONG_BUILD_S:
            LOG.warning("gear: %s", as_error(lock))
    dead = [lock for lock in first if lock.is_dead]
    if not dead:
        return []
    try:
        with build_lock(build_folder("any").with_name(_GUARD), _GUARD_TIMEOUT_S):
            seen = {lock.identity for lock in find() if lock.is_dead}
            if not seen:  # another process has removed them
                return []
            time.sleep(_SECOND_LOOK_S)
            for lock in find():
                if lock.identity in seen:
                    # No process creates the file while it exists, and only its dead holder would remove it.
                    lock.path.unlink(missing_ok=True)
                    removed.append(lock.path)
                    text = "gear: removed %s, made %.0f s ago by a build that has died"
                    LOG.warning(text, lock.path, lock.age_s)
    except (BuildError, OSError) as error:  # this run may not need what that lock keeps from being built
        for lock in dead:
            LOG.warning("gear: %s; it could not be removed: %s", as_error(lock), error)
    return removed


def as_error(lock: StaleLock) -> BuildError:
    """Return the error of a lock that blocks every process that loads the extension."""
    value, remedy = f"a lock of {lock.age_s:.0f} s that no process holds", f"rm {lock.path}"
    if lock.unseen:
        value += f" that can be seen ({lock.unseen})"
        remedy += ", if no process builds"
    return BuildError(str(lock.path), "must be held by a process that builds", value, remedy)


def _open_locks() -> tuple[set[tuple[int, int]], str]:
    """Return device and inode of files named `lock` that processes have open, and why there may be more.

    Other users' processes cannot be examined, nor need they be: they hold no lock of this user.
    """
    found, hidden = set(), ""
    for process in os.scandir("/proc"):
        if not process.name.isdigit():
            continue
        try:
            for entry in os.scandir(f"{process.path}/fd"):
                with contextlib.suppress(OSError):  # closed meanwhile
                    if os.readlink(entry.path).endswith(f"/{_LOCK}"):
                        status = os.stat(entry.path)
                        found.add((status.st_dev, status.st_ino))
        except PermissionError:
            with contextlib.suppress(OSError):
                if process.stat().st_uid == os.geteuid():  # in another user namespace
                    hidden = f"process {process.name} cannot be examined"
        except OSError:  # it has ended
            continue
    return found, hidden


def _why_unseen(path: Path, owner: int) -> str:
    """Return why a living holder of a lock need not be visible here; empty if it must be."""
    if os.geteuid() not in (0, owner):
        return f"it belongs to user {owner}"
    mount, kind = _mount(path)
    if kind not in _LOCAL:
        return f"other machines may use its file system, {kind}"
    is_own_root = mount == "/" and kind == "overlay"  # no other container has it
    if os.readlink("/proc/self/ns/pid") != _FIRST_PID_NAMESPACE and not is_own_root:
        return "processes outside this container may use its folder"
    return ""


def _mount(path: Path) -> tuple[str, str]:
    """Return mount point and type of the file system that holds a file."""
    real, found = str(path.resolve()), ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        head, _, tail = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), head.split()[4])
        below = point if point.endswith("/") else f"{point}/"
        if real.startswith(below) and len(point) >= len(found[0]):  # later mounts hide earlier ones
            found = point, tail.split()[0]
    return found
