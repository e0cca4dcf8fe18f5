"""Removes locks that killed builds of torch extensions leave, for which every load would wait.

torch creates `lock` in an extension's folder before it compiles and removes it afterwards
(`file_baton`). It outlives a process that is killed meanwhile, such as a launch that compiles
DeepSpeed's communication op, and every later load of the extension waits for ever, without a
message. The holder keeps the file open as long as it compiles, so a lock that no process has open
is stale.
"""

from __future__ import annotations

import time
from pathlib import Path

from deepspeed_gear.errors import BuildError
from deepspeed_gear.file_system import is_open
from deepspeed_gear.log import LOG
from deepspeed_gear.ops.jit import build_folder, build_lock
from deepspeed_gear.ops.toolchain import output

_GUARD_TIMEOUT_S = 60.0
_SECOND_LOOK_S = 0.5  # between closing its lock and removing it, a holder needs some microseconds
_LEAST_AGE_S = 2.0  # a younger lock is not removed
_LONG_BUILD_S = 180.0  # older locks whose holders cannot be seen are worth a warning
# File systems that no other machine writes, as `stat` names them: ext4 is "ext2/ext3".
_LOCAL = {"btrfs", "ext2/ext3", "f2fs", "overlayfs", "ramfs", "tmpfs", "xfs", "zfs"}


def remove() -> list[BuildError]:
    """Remove locks whose holders are dead; return the errors of old ones that may be held.

    Both are logged. One process of a machine looks at a time, for half a second per stale lock;
    other processes may build meanwhile.
    """
    try:
        root = build_folder("any").parent
    except BuildError:  # torch cannot build there either
        return []
    if not any(root.glob("*/lock")):
        return []
    try:
        with build_lock(root / "gear_stale_locks.lock", _GUARD_TIMEOUT_S):
            errors = [error for lock in sorted(root.glob("*/lock")) if (error := _remove(lock))]
    except BuildError as failure:  # not raised: this run may need none of these extensions
        errors = [failure]
    for error in errors:
        LOG.warning("gear: %s", error)
    return errors


def _remove(lock: Path) -> BuildError | None:
    """Remove a stale lock; return an error for an old one whose holder cannot be seen."""
    age_s = 0.0
    try:
        made = lock.stat()
        age_s = time.time() - made.st_mtime
        kind = "".join(output(["stat", "-f", "-c", "%T", str(lock)]))
        if kind not in _LOCAL:
            raise OSError(f"other machines may use its file system, {kind}")
        if age_s < _LEAST_AGE_S or is_open(lock):
            return None
        time.sleep(_SECOND_LOOK_S)
        if is_open(lock) or lock.stat().st_ctime_ns != made.st_ctime_ns:
            return None
        # No race: no process creates the file while it exists, and only its holder, which is dead,
        # would remove it.
        lock.unlink()
        LOG.warning("gear: removed %s, made %.0f s ago by a build that has died", lock, age_s)
    except OSError as error:  # among them that it has just gone
        if age_s > _LONG_BUILD_S and lock.exists():
            value = f"a lock of {age_s:.0f} s, not removed: {error}"
            remedy = f"rm {lock}, if no process builds"
            return BuildError(str(lock), "must be held by a process that builds", value, remedy)
    return None
